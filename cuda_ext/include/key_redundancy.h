// key_redundancy as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "entries.h"

namespace sparse_rl {

template <class P>
struct Redundancy {
  Entries entries;
  const P* keys;            // (R, D)
  const float* importance;  // (L, B, H, N), null for none: the similarities themselves
  float *out, *scratch;     // (L, B, H, N), (X, 3, N)
  int64_t at_a_time;        // X
  float threshold, mix;     // weight of the importance
};

template <class Backend>
void key_redundancy(
    const Tensor& key_pool, const Tensor& slots, const Tensor& offsets, const Tensor& lengths, double threshold,
    const std::optional<Tensor>& importance, double mix_lambda, const Tensor& redundancy, const Tensor& scratch,
    const std::optional<Tensor>& errors) {
  const Entries all = check_entries<Backend>(
      key_pool, slots, offsets, lengths, redundancy, "redundancy", errors, Op::key_redundancy);
  const int64_t L = all.num_layers, B = all.num_rows, H = all.num_heads, N = all.num_entries;
  check_tensor("importance", importance, key_pool, ScalarType::Float, {L, B, H, N});
  const int64_t X = check_scratch(scratch, key_pool, 3, N);
  const ScalarType dtype = key_pool.scalar_type();
  Backend::dispatch(dtype, dtype == ScalarType::Float8_e4m3fn ? ScalarType::Float : dtype, [&](auto, auto stored) {
    using P = decltype(stored);
    const Redundancy<P> op{
        all, pointer<P>(key_pool), pointer<float>(importance), pointer<float>(redundancy), pointer<float>(scratch), X,
        static_cast<float>(threshold), static_cast<float>(mix_lambda)};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
