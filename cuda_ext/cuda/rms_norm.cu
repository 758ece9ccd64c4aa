// rms_norm: add to the hidden states, and divide each row by the root of its mean square.
//
// A block per row, which each thread reads eight elements at a time: for the sum of squares and, from the cache, for
// the result.

#include "device.cuh"
#include "rms_norm.h"

namespace sparse_rl {
namespace {

template <class T>
SPARSE_RL_DEVICE void store8(T* p, const float (&x)[8]) {
  constexpr int Width = kWidth<T>;
#pragma unroll
  for (int part = 0; part < 8 / Width; ++part) {
    alignas(16) T some[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) some[i] = narrow<T>(x[part * Width + i]);
    *reinterpret_cast<uint4*>(p + part * Width) = *reinterpret_cast<const uint4*>(some);
  }
}

// The sum over a block in the same order for every row.
SPARSE_RL_DEVICE float block_sum(float x) {
  __shared__ float sums[kWarps];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += sums[i];
  return total;
}

// Rounds where transformers rounds: the sum, the quotient and the product with the weight to T, at last to P.
template <class T, class P>
__global__ void __launch_bounds__(kThreads, 4) rms_norm_kernel(RmsNorm<T, P> op) {
  await_previous();
  const int64_t start = blockIdx.x * op.width;
  float squares = 0;
  for (int64_t i = 8 * threadIdx.x; i < op.width; i += 8 * kThreads) {
    float x[8];
    load8(op.hidden + start + i, x);
    if (op.addend) {
      float more[8];
      load8(op.addend + start + i, more);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = static_cast<float>(narrow<T>(x[j] + more[j]));
      store8(op.hidden + start + i, x);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += x[j] * x[j];
  }
  const float factor = 1 / sqrtf(block_sum(squares) / static_cast<float>(op.width) + op.epsilon);
  for (int64_t i = 8 * threadIdx.x; i < op.width; i += 8 * kThreads) {  // what the same thread has stored
    float x[8], weight[8];
    load8(op.hidden + start + i, x);
    load8(op.weight + i, weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float quotient = static_cast<float>(narrow<T>(x[j] * factor));
      x[j] = static_cast<float>(narrow<T>(quotient * weight[j]));
    }
    store8(op.normed + start + i, x);
  }
}

struct Kernel : Device {
  template <class T, class P>
  static void run(const RmsNorm<T, P>& op, const Tensor& on) {
    STD_TORCH_CHECK(op.width % 8 == 0, "hidden has rows of ", op.width, ", the CUDA kernels take multiples of 8");
    check_aligned("hidden", op.hidden);
    check_aligned("addend", op.addend);
    check_aligned("norm_weight", op.weight);
    check_aligned("normed", op.normed);
    launch(rms_norm_kernel<T, P>, op.num_rows, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("rms_norm", TORCH_BOX(&rms_norm<Kernel>)); }

}  // namespace sparse_rl
