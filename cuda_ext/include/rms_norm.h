// rms_norm as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "heads.h"

namespace sparse_rl {

// T is the type of the hidden states, P that of the products, which read the result and wrote the addend.
template <class T, class P = T>
struct RmsNorm {
  T* hidden;            // (B, E), the addend is added in place
  const P* addend;      // (B, E) or null
  const float* weight;  // (E)
  P* normed;            // (B, E)
  int64_t num_rows, width;
  float epsilon;
};

template <class Backend>
void rms_norm(
    const Tensor& hidden, const std::optional<Tensor>& addend, const Tensor& norm_weight, double epsilon,
    const Tensor& normed) {
  STD_TORCH_CHECK(hidden.dim() == 2, "hidden must be (rows, width), got ", hidden.dim(), " dimensions");
  const int64_t B = hidden.size(0), E = hidden.size(1);
  const ScalarType dtype = hidden.scalar_type(), product = normed.scalar_type();
  Backend::dispatch(dtype, [](auto) {});
  STD_TORCH_CHECK(E > 0, "hidden has no elements in a row");
  STD_TORCH_CHECK(epsilon >= 0, "epsilon is ", epsilon, ", expected 0 or more");
  STD_TORCH_CHECK(
      product == dtype || dtype == ScalarType::Float, "normed is ", dtype_text(product), " and hidden is ",
      dtype_text(dtype), ", expected the same type, or float32 hidden states");
  check_tensor("hidden", hidden, hidden, dtype, {B, E});
  check_tensor("addend", addend, hidden, product, {B, E});
  check_tensor("norm_weight", norm_weight, hidden, ScalarType::Float, {E});
  check_tensor("normed", normed, hidden, product, {B, E});
  Backend::dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto other) {
      using P = decltype(other);
      const RmsNorm<T, P> op{pointer<T>(hidden), pointer<P>(addend), pointer<float>(norm_weight), pointer<P>(normed),
                             B, E, static_cast<float>(epsilon)};
      Backend::run(op, hidden);
    };
    if constexpr (sizeof(T) == sizeof(float)) {
      Backend::dispatch(product, run);
    } else {
      run(zero);
    }
  });
}

}  // namespace sparse_rl
