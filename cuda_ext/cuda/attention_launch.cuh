// Which kernel attends: tensor cores for 16-bit types, plain FMAs for float32 and for heads too large for registers.
#pragma once

#include "attention_plain.cuh"
#include "attention_tensor.cuh"

namespace sparse_rl {

template <class T, bool Paged>
auto tensor_kernel(int64_t dim) {
  if (dim <= 64) return attend_tensor<T, 1, Paged>;
  if (dim <= 128) return attend_tensor<T, 2, Paged>;
  return dim <= 256 ? attend_tensor<T, 4, Paged> : attend_plain<T, 32, 2, 4, Paged>;  // more would not fit
}

template <bool Paged>
auto plain_kernel(int64_t dim, int64_t group) {
  const bool few = group <= 4;
  if (dim <= 64) return few ? attend_plain<float, 16, 1, 4, Paged> : attend_plain<float, 16, 1, 8, Paged>;
  if (dim <= 128) return few ? attend_plain<float, 32, 1, 4, Paged> : attend_plain<float, 32, 1, 8, Paged>;
  if (dim <= 256) return few ? attend_plain<float, 32, 2, 4, Paged> : attend_plain<float, 32, 2, 8, Paged>;
  return attend_plain<float, 32, 4, 4, Paged>;
}

// One block per (row, KV head).
template <bool Paged, class T>
void launch_attention(const Attention<T>& op, const Tensor& on) {
  const int64_t blocks = op.heads.num_rows * op.heads.num_heads;
  if constexpr (sizeof(T) == 4) {
    launch(plain_kernel<Paged>(op.dim, op.group), blocks, 1, kThreads, on, op);
  } else {
    launch(tensor_kernel<T, Paged>(op.dim), blocks, 1, kThreads, on, op);
  }
}

}  // namespace sparse_rl
