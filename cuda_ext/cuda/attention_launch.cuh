// Choice of the kernel: tensor cores for 16-bit queries, plain FMAs for float32 and for heads too large for registers.
#pragma once

#include "attention_plain.cuh"
#include "attention_tensor.cuh"

namespace sparse_rl {

template <class T, class P, bool Paged>
auto tensor_kernel(int64_t dim) {
  if (dim <= 64) return attend_tensor<T, P, 1, Paged>;
  if (dim <= 128) return attend_tensor<T, P, 2, Paged>;
  return dim <= 256 ? attend_tensor<T, P, 4, Paged> : attend_plain<T, P, 32, 2, 4, Paged>;  // more would not fit
}

template <class P, bool Paged>
auto plain_kernel(int64_t dim, int64_t group) {
  const bool few = group <= 4;
  if (dim <= 64) return few ? attend_plain<float, P, 16, 1, 4, Paged> : attend_plain<float, P, 16, 1, 8, Paged>;
  if (dim <= 128) return few ? attend_plain<float, P, 32, 1, 4, Paged> : attend_plain<float, P, 32, 1, 8, Paged>;
  if (dim <= 256) return few ? attend_plain<float, P, 32, 2, 4, Paged> : attend_plain<float, P, 32, 2, 8, Paged>;
  return attend_plain<float, P, 32, 4, 4, Paged>;
}

// One block per (row, KV head).
template <bool Paged, class T, class P>
void launch_attention(const Attention<T, P>& op, const Tensor& on) {
  check_aligned("query", op.query);
  check_aligned("value_pool", op.value_pool);
  const int64_t blocks = op.heads.num_rows * op.heads.num_heads;
  if constexpr (sizeof(T) == 4) {
    launch(plain_kernel<P, Paged>(op.dim, op.group), blocks, 1, kThreads, on, op);
  } else {
    launch(tensor_kernel<T, P, Paged>(op.dim), blocks, 1, kThreads, on, op);
  }
}

}  // namespace sparse_rl
