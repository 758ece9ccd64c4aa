// What a block computes from rows of a pool: a warp reads a row, eight elements in each lane.
#pragma once

#include "float8.cuh"

namespace sparse_rl {

// f(d, x) for the elements d .. d + 7 of a row that this lane reads.
template <class T, class F>
SPARSE_RL_DEVICE void each_part(const T* row, int dim, F f) {
  for (int d = threadIdx.x % 32 * 8; d < dim; d += 256) {
    float x[8];
    load8(row + d, x);
    f(d, x);
  }
}

// The sum of the squares of a row, in all lanes of the warp.
template <class T>
SPARSE_RL_DEVICE float square_sum(const T* row, int dim) {
  float sum = 0;
  each_part(row, dim, [&](int, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
  });
  return warp_sum(sum);
}

// parts[0][d] = sum_j rows[j][d] * factors[j]; each warp adds up every eighth row. Ends with a barrier.
template <class T>
SPARSE_RL_DEVICE void sum_rows(
    const T* rows, int count, int dim, const float* factors, float (&parts)[kWarps][kMaxHeadDim]) {
  const int warp = threadIdx.x / 32;
  for (int d = threadIdx.x % 32 * 8; d < dim; d += 256) {
    float sum[8] = {};
    for (int j = warp; j < count; j += kWarps) {
      float x[8];
      load8(rows + static_cast<int64_t>(j) * dim + d, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += x[i] * factors[j];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) parts[warp][d + i] = sum[i];
  }
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += kThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += parts[w][d];
    parts[0][d] = sum;
  }
  __syncthreads();
}

}  // namespace sparse_rl
