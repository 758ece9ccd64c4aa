// key_redundancy as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "heads.h"

namespace sparse_rl {

template <class T>
struct Redundancy {
  HeadView<T> keys;
  const int32_t* lengths;  // (S, H)
  float *out, *scratch;    // (S, H, N), (S, H, 2, N)
  int64_t num_slots, num_heads;
  int num_entries, dim;
  float threshold;
};

template <class Backend>
void key_redundancy(
    const Tensor& keys, const Tensor& lengths, double threshold, const Tensor& redundancy, const Tensor& scratch) {
  STD_TORCH_CHECK(keys.dim() == 4, "keys must be (slots, KV heads, entries, head_dim), got ", keys.dim(), " dimensions");
  Backend::check_rows("keys", keys);
  const ScalarType dtype = keys.scalar_type();
  const int64_t S = keys.size(0), H = keys.size(1), N = keys.size(2), D = keys.size(3);
  check_tensor("keys", keys, keys, dtype, {S, H, N, D}, 2);
  check_tensor("lengths", lengths, keys, ScalarType::Int, {S, H});
  check_tensor("redundancy", redundancy, keys, ScalarType::Float, {S, H, N});
  check_tensor("scratch", scratch, keys, ScalarType::Float, {S, H, 2, N});
  Backend::dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Redundancy<T> op{
        view_heads<T>(keys), pointer<int32_t>(lengths), pointer<float>(redundancy), pointer<float>(scratch), S, H,
        static_cast<int>(N), static_cast<int>(D), static_cast<float>(threshold)};
    Backend::run(op, keys);
  });
}

}  // namespace sparse_rl
