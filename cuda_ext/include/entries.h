// The heads of some slots in all layers, whose entries the scoring kernels read from the pools.
#pragma once

#include "heads.h"

namespace sparse_rl {

// One head of the call: row b of layer `layer`, KV head h.
struct Span {
  int64_t layer, slot, h;  // slot is -1 for a row to skip
  int64_t start;           // first row of the pool
  int length;
};

struct Entries {
  const int64_t *slots, *offsets;  // (B), (L, S, H)
  const int32_t* lengths;          // (L, S, H)
  int64_t num_layers, num_rows, num_slots, num_heads, pool_rows;
  int num_entries, dim;
  Report report;
  int64_t count;  // L x B x H

  // Head u of `count`, not yet checked.
  SPARSE_RL_DEVICE Span span(int64_t u) const {
    const int64_t layer = u / (num_rows * num_heads), slot = slots[u / num_heads % num_rows], h = u % num_heads;
    if (slot < 0 || slot >= num_slots) return {layer, slot, h, 0, 0};
    const int64_t head = (layer * num_slots + slot) * num_heads + h;
    return {layer, slot, h, offsets[head], lengths[head]};
  }
};

// `scores` is what the op writes, (L, B, H, N).
template <class Backend>
Entries check_entries(
    const Tensor& key_pool, const Tensor& slots, const Tensor& offsets, const Tensor& lengths, const Tensor& scores,
    const char* name, const std::optional<Tensor>& errors, Op op) {
  const PoolShape pool = check_pool<Backend>(key_pool);
  const auto [L, S, H] = check_layers(offsets, key_pool);
  const int64_t B = slots.dim() == 1 ? slots.size(0) : 0, N = scores.dim() == 4 ? scores.size(3) : 0;
  check_tensor("slots", slots, key_pool, ScalarType::Long, {B});
  check_tensor("lengths", lengths, key_pool, ScalarType::Int, {L, S, H});
  check_tensor(name, scores, key_pool, ScalarType::Float, {L, B, H, N});
  return {
      pointer<int64_t>(slots), pointer<int64_t>(offsets), pointer<int32_t>(lengths), L, B, S, H, pool.rows,
      static_cast<int>(N), static_cast<int>(pool.dim), check_errors(errors, key_pool, op), L * B * H};
}

// Memory (X, rows, N) of the heads that are scored at the same time; returns X.
inline int64_t check_scratch(const Tensor& scratch, const Tensor& device_of, int64_t rows, int64_t num_entries) {
  const int64_t X = scratch.dim() == 3 ? scratch.size(0) : 0;
  check_tensor("scratch", scratch, device_of, ScalarType::Float, {X, rows, num_entries});
  STD_TORCH_CHECK(X > 0, "scratch has no room, expected at least one head's");
  return X;
}

}  // namespace sparse_rl
