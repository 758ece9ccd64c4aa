// The struct for the kernels of decode_attention and page_attention.
#pragma once

#include "heads.h"

namespace sparse_rl {

// Split-KV: a block of the CUDA kernels reads at most so many entries of a KV head, and more blocks share a longer
// one. MAX_SPLIT of ops/decode_attention.py.
inline constexpr int64_t kMaxSplit = 768;

// The number of splits of a KV head, by the number of its entries alone: a row's bits do not depend on the batch.
constexpr int64_t count_splits(int64_t entries) {
  return entries <= kMaxSplit ? 1 : (entries + kMaxSplit - 1) / kMaxSplit;
}

// T is the compute type, P the type of the pools.
template <class T, class P = T>
struct Attention {
  const T* query;
  const P *key_pool, *value_pool;
  T* out;
  float *lse, *probs;  // null where not wanted
  int64_t group, dim, max_length, num_probs, pool_rows;
  float scale;
  Heads heads;
  float* partials = nullptr;  // (B, Hq, max_splits, dim + 2) what splits leave; CPU kernels need none
  int64_t max_splits = 1;
  const int32_t* pages = nullptr;  // (B, H, width), in page_attention only
  int width = 0, page_size = 1;
};

// The number of splits that `partials` has room for.
inline int64_t check_partials(
    const std::optional<Tensor>& partials, const Tensor& key_pool, int64_t rows, int64_t query_heads, int64_t dim) {
  check_tensor("partials", partials, key_pool, ScalarType::Float, {rows, query_heads, kAnySize, dim + 2});
  return partials.has_value() ? partials->size(2) : 1;
}

}  // namespace sparse_rl
