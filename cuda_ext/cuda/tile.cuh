// Dot products of many rows with many columns, through tiles in shared memory: the inner loop of the scoring kernels.
//
// float32 FMAs for all types.
#pragma once

#include "float8.cuh"

namespace sparse_rl {

constexpr int kDepth = 16;  // elements of a row in shared memory at a time

// A block of 256 threads holds Rows x Cols products, 4 x 4 in each thread.
template <int Rows, int Cols>
struct Product {
  static_assert(Rows * Cols == 16 * kThreads);
  float rows[kDepth][Rows + 4], columns[kDepth][Cols + 4];  // transposed; 4 keeps 16-byte alignment

  SPARSE_RL_DEVICE static int row() { return threadIdx.x / (Cols / 4) * 4; }     // first of this thread's four rows
  SPARSE_RL_DEVICE static int column() { return threadIdx.x % (Cols / 4) * 4; }  // first of its four columns

  // c[i][j] = row_at(row() + i) . column_at(column() + j), rows of T and columns of P; a null pointer is a row of zeros.
  // Begins with a barrier.
  template <class T, class P, class RowAt, class ColumnAt>
  SPARSE_RL_DEVICE void compute(int dim, RowAt row_at, ColumnAt column_at, float (&c)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) c[i / 4][i % 4] = 0;
    for (int start = 0; start < dim; start += kDepth) {
      __syncthreads();
      fill<T>(rows, Rows, start, dim, row_at);
      fill<P>(columns, Cols, start, dim, column_at);
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const float4 a = *reinterpret_cast<const float4*>(&rows[d][row()]);
        const float4 b = *reinterpret_cast<const float4*>(&columns[d][column()]);
        const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 16; ++i) c[i / 4][i % 4] += x[i / 4] * y[i % 4];
      }
    }
  }

  template <class T, int Width, class At>
  SPARSE_RL_DEVICE static void fill(float (&part)[kDepth][Width], int count, int start, int dim, At at) {
    for (int i = threadIdx.x; i < count * (kDepth / 8); i += kThreads) {
      const int r = i / (kDepth / 8), first = i % (kDepth / 8) * 8;
      const T* p = at(r);
      float x[8] = {};
      if (p && start + first < dim) load8(p + start + first, x);
#pragma unroll
      for (int d = 0; d < 8; ++d) part[first + d][r] = x[d];
    }
  }
};

}  // namespace sparse_rl
