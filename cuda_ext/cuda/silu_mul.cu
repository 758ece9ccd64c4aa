// silu_mul: x * sigmoid(x) of the first half of each row, times the second half.
//
// Each thread takes 16 bytes of both halves.

#include "device.cuh"
#include "silu_mul.h"

namespace sparse_rl {
namespace {

// Rounds where transformers rounds.
template <class T>
__global__ void __launch_bounds__(kThreads, 4) silu_mul_kernel(SiluMul<T> op) {
  await_previous();
  constexpr int Width = kWidth<T>;
  const int64_t at = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * Width;
  if (at >= op.width) return;
  const T* row = op.gate_and_up + 2 * blockIdx.x * op.width + at;
  float gate[Width], up[Width];
  unpack<T>(load16(row), gate);
  unpack<T>(load16(row + op.width), up);
  alignas(16) T gated[Width];
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    const float silu = gate[i] / (1 + expf(-gate[i]));
    gated[i] = narrow<T>(static_cast<float>(narrow<T>(silu)) * up[i]);
  }
  *reinterpret_cast<uint4*>(op.gated + blockIdx.x * op.width + at) = *reinterpret_cast<const uint4*>(gated);
}

struct Kernel : Device {
  template <class T>
  static void run(const SiluMul<T>& op, const Tensor& on) {
    STD_TORCH_CHECK(
        op.width % 8 == 0, "gate_and_up has halves of ", op.width, " columns, the CUDA kernels take multiples of 8");
    check_aligned("gate_and_up", op.gate_and_up);
    check_aligned("gated", op.gated);
    const int64_t per_block = int64_t{kThreads} * kWidth<T>;
    launch(silu_mul_kernel<T>, op.num_rows, (op.width + per_block - 1) / per_block, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("silu_mul", TORCH_BOX(&silu_mul<Kernel>)); }

}  // namespace sparse_rl
