// silu_mul as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "heads.h"

namespace sparse_rl {

template <class T>
struct SiluMul {
  const T* gate_and_up;  // (B, 2 F), the gate first
  T* gated;              // (B, F)
  int64_t num_rows, width;
};

template <class Backend>
void silu_mul(const Tensor& gate_and_up, const Tensor& gated) {
  STD_TORCH_CHECK(gate_and_up.dim() == 2, "gate_and_up must be (rows, width), got ", gate_and_up.dim(), " dimensions");
  const ScalarType dtype = gate_and_up.scalar_type();
  const int64_t B = gate_and_up.size(0), F = gate_and_up.size(1) / 2;
  Backend::dispatch(dtype, [](auto) {});
  STD_TORCH_CHECK(
      gate_and_up.size(1) == 2 * F, "gate_and_up has ", gate_and_up.size(1), " columns, expected an even number");
  check_tensor("gate_and_up", gate_and_up, gate_and_up, dtype, {B, 2 * F});
  check_tensor("gated", gated, gate_and_up, dtype, {B, F});
  Backend::dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const SiluMul<T> op{pointer<T>(gate_and_up), pointer<T>(gated), B, F};
    Backend::run(op, gate_and_up);
  });
}

}  // namespace sparse_rl
