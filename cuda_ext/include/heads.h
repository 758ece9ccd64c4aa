// The place of each head of each slot in the flat pools, and the bounds checks that CPU kernels make before they start.
//
// Tensors of state are indexed by slot: offsets, capacities, lengths (S, H), or (L, S, H) in ops on all layers.
// Inputs and outputs of a call are indexed by row b of `slots` (B); slots[b] = -1 marks a row to skip.
#pragma once

#include "checks.h"

// Functions that kernels call, on either side.
#ifdef __CUDACC__
#define SPARSE_RL_DEVICE __device__ __forceinline__
#else
#define SPARSE_RL_DEVICE inline
#endif

namespace sparse_rl {

// The word `errors` that a kernel writes because it cannot raise, as ops/pools.py reads it.
enum class Op : int32_t {
  append = 1, decode_attention, append_attend, window_importance, key_redundancy, score_entries, evict, fork, summarize_pages,
  select_pages, page_attention, draw, rms_norm, silu_mul
};
enum class Fault : int32_t { slot = 1, run, full, budget, position, pages, nan, events };

struct Report {
  int32_t* word;  // null for none
  Op op;
};

inline Report check_errors(const std::optional<Tensor>& errors, const Tensor& device_of, Op op) {
  check_tensor("errors", errors, device_of, ScalarType::Int, {1});
  return {pointer<int32_t>(errors), op};
}

struct Heads {
  const int64_t* slots;    // (B)
  const int64_t* offsets;  // (S, H) first row of each head
  const int32_t* lengths;  // (S, H) live entries
  int64_t num_rows, num_slots, num_heads;
  Report report;

  int64_t index(int64_t b, int64_t h) const { return slots[b] * num_heads + h; }
};

inline Heads check_heads(
    const Tensor& slots, const Tensor& offsets, const Tensor& lengths, const Tensor& key_pool,
    const std::optional<Tensor>& errors, Op op) {
  STD_TORCH_CHECK(offsets.dim() == 2, "offsets must be (slots, KV heads), got ", offsets.dim(), " dimensions");
  const int64_t rows = slots.dim() == 1 ? slots.size(0) : 0;
  const Report report = check_errors(errors, key_pool, op);
  Heads heads{nullptr, nullptr, nullptr, rows, offsets.size(0), offsets.size(1), report};
  check_tensor("slots", slots, key_pool, ScalarType::Long, {heads.num_rows});
  check_tensor("offsets", offsets, key_pool, ScalarType::Long, {heads.num_slots, heads.num_heads});
  check_tensor("lengths", lengths, key_pool, ScalarType::Int, {heads.num_slots, heads.num_heads});
  heads.slots = slots.const_data_ptr<int64_t>();
  heads.offsets = offsets.const_data_ptr<int64_t>();
  heads.lengths = lengths.const_data_ptr<int32_t>();
  return heads;
}

struct Layers {
  int64_t num_layers, num_slots, num_heads;
};

// For an op on all layers.
inline Layers check_layers(const Tensor& offsets, const Tensor& key_pool) {
  STD_TORCH_CHECK(
      offsets.dim() == 3, "offsets must be (layers, slots, KV heads), got ", offsets.dim(), " dimensions");
  const Layers all{offsets.size(0), offsets.size(1), offsets.size(2)};
  check_tensor("offsets", offsets, key_pool, ScalarType::Long, {all.num_layers, all.num_slots, all.num_heads});
  return all;
}

inline void check_slot(int64_t slot, int64_t num_slots) {
  STD_TORCH_CHECK(
      slot >= -1 && slot < num_slots, "slots contains ", slot, ", expected 0 to ", num_slots - 1,
      " or -1 for a row to skip");
}

// One head's run of entries lies inside the pool. CPU only: it reads the tensors.
inline void check_run(int64_t offset, int64_t length, int64_t limit, const char* limit_name, int64_t pool_rows) {
  STD_TORCH_CHECK(
      length >= 0 && length <= limit, "a head holds ", length, " entries, allowed are 0 to ", limit_name, " = ", limit);
  STD_TORCH_CHECK(
      offset >= 0 && offset <= pool_rows - length, "a head of ", length, " entries starts at row ", offset,
      ", outside the pool of ", pool_rows, " rows");
}

inline void check_runs(const Heads& heads, int64_t limit, const char* limit_name, int64_t pool_rows) {
  for (int64_t b = 0; b < heads.num_rows; ++b) {
    check_slot(heads.slots[b], heads.num_slots);
    for (int64_t h = 0; h < heads.num_heads && heads.slots[b] >= 0; ++h) {
      int64_t i = heads.index(b, h);
      check_run(heads.offsets[i], heads.lengths[i], limit, limit_name, pool_rows);
    }
  }
}

}  // namespace sparse_rl
