// Scaled dot products of up to eight query rows with a tile of keys: the inner loop of every scoring kernel.
#pragma once

#include "vec.h"

namespace sparse_rl {

inline constexpr int kRows = 8;   // query rows per call
inline constexpr int kTile = 128;  // keys per call
inline constexpr int kLine = 64;  // bytes of a cache line

// Rows is a compile-time constant so that all accumulators stay in registers. With few rows several keys are taken at
// once, so that always about eight sums are in flight. `ahead` is memory of the size of the tile that is needed next: it
// is fetched meanwhile, since reading it later in strips would wait for every line.
template <class T, int Rows>
SPARSE_RL_CLONES void dot_tile(
    const T* keys, int64_t count, int64_t dim, const float* queries, float scale, float* out, const T* ahead) {
  constexpr int Keys = kRows / Rows;
  const int64_t width = padded(dim);
  for (int64_t j = 0; j < count; j += Keys) {
    const T* row[Keys];
    for (int k = 0; k < Keys; ++k) row[k] = keys + (j + k < count ? j + k : count - 1) * dim;
    for (int64_t at = 0; ahead && at < Keys * dim; at += kLine / sizeof(T)) __builtin_prefetch(ahead + j * dim + at);
    Vec sum[kRows] = {};
    for (int64_t at = 0; at < dim; at += kBlock) {
#pragma GCC unroll 8
      for (int k = 0; k < Keys; ++k) {
        Vec a, b;
        load_part(row[k], at, dim, a, b);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const float* q = queries + r * width + at;
          sum[k * Rows + r] += a * load(q);
          sum[k * Rows + r] += b * load(q + kLanes);
        }
      }
    }
    float sums[kRows];
    sum_lanes(sum, sums);
    for (int k = 0; k < Keys && j + k < count; ++k) {
      for (int r = 0; r < Rows; ++r) out[r * kTile + j + k] = sums[k * Rows + r] * scale;
    }
  }
}

// out[r * kTile + j] = scale * queries[r] . keys[j]; queries are (rows, padded(dim)) floats in the block order of T.
template <class T>
void dots(
    const T* keys, int64_t count, int64_t dim, const float* queries, int rows, float scale, float* out,
    const T* ahead = nullptr) {
  switch (rows) {
    case 1: return dot_tile<T, 1>(keys, count, dim, queries, scale, out, ahead);
    case 2: return dot_tile<T, 2>(keys, count, dim, queries, scale, out, ahead);
    case 3: return dot_tile<T, 3>(keys, count, dim, queries, scale, out, ahead);
    case 4: return dot_tile<T, 4>(keys, count, dim, queries, scale, out, ahead);
    case 5: return dot_tile<T, 5>(keys, count, dim, queries, scale, out, ahead);
    case 6: return dot_tile<T, 6>(keys, count, dim, queries, scale, out, ahead);
    case 7: return dot_tile<T, 7>(keys, count, dim, queries, scale, out, ahead);
    default: return dot_tile<T, 8>(keys, count, dim, queries, scale, out, ahead);
  }
}

template <class T>
SPARSE_RL_CLONES void unpack_rows(const T* rows, int64_t count, int64_t dim, float* out) {
  for (int64_t r = 0; r < count; ++r) unpack_row(rows + r * dim, dim, out + r * padded(dim));
}

template <class T>
SPARSE_RL_CLONES void pack_row_any(const float* in, float factor, int64_t dim, T* row) {
  pack_row(in, factor, dim, row);
}

}  // namespace sparse_rl
