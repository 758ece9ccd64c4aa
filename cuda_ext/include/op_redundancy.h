// key_redundancy as torch calls it: arguments, their check, and what a kernel gets of them.
#pragma once

#include "heads.h"

namespace sparse_rl {

template <class T>
struct Redundancy {
  const T* key_pool;
  float *out, *scratch;  // (B, H, N), (B, H, 2, N)
  int num_entries, dim;
  int64_t pool_rows;
  float threshold;
  Heads heads;
};

template <class Backend>
void key_redundancy(
    const Tensor& key_pool, const Tensor& slots, const Tensor& offsets, const Tensor& lengths, double threshold,
    const Tensor& redundancy, const Tensor& scratch, const std::optional<Tensor>& errors) {
  const PoolShape pool = Backend::check_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::key_redundancy);
  const int64_t B = heads.num_rows, H = heads.num_heads, N = redundancy.dim() == 3 ? redundancy.size(2) : 0;
  check_tensor("redundancy", redundancy, key_pool, ScalarType::Float, {B, H, N});
  check_tensor("scratch", scratch, key_pool, ScalarType::Float, {B, H, 2, N});
  Backend::dispatch(pool.dtype, ScalarType::Float, [&](auto, auto stored) {
    using T = decltype(stored);
    const Redundancy<T> op{
        pointer<T>(key_pool), pointer<float>(redundancy), pointer<float>(scratch), static_cast<int>(N),
        static_cast<int>(pool.dim), pool.rows, static_cast<float>(threshold), heads};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
