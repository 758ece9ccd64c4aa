// Scaled dot products of up to eight query rows with a tile of keys: the inner loop of every scoring kernel.
#pragma once

#include "vec.h"

namespace sparse_rl {

inline constexpr int kRows = 8;   // query rows per call
inline constexpr int kTile = 128;  // keys per call
inline constexpr int kLine = 64;  // bytes of a cache line
inline constexpr int kAhead = 16;  // keys from the one read to the one fetched

// Up to eight query rows as floats, block by block: the r-th row's n-th block of 32 is at (n * kRows + r) * kBlock,
// so that the inner loop reads all rows through one pointer.
template <class T>
SPARSE_RL_CLONES void pack_query(const T* row, int r, int64_t dim, float* queries) {
  for (int64_t at = 0; at < dim; at += kBlock) {
    Vec a, b;
    load_part(row, at, dim, a, b);
    store_block(queries + at * kRows + r * kBlock, a, b);
  }
}

// The sum of the squares of a row.
template <class T>
SPARSE_RL_INLINE float square_sum(const T* row, int64_t dim) {
  Vec sum{};
  for (int64_t at = 0; at < dim; at += kBlock) {
    Vec a, b;
    load_part(row, at, dim, a, b);
    sum += a * a;
    sum += b * b;
  }
  return sum_lanes(sum);
}

// out = sum_j rows[j] * factors[j], with room for whole blocks.
template <class T>
SPARSE_RL_INLINE void sum_rows(const T* rows, int64_t count, int64_t dim, const float* factors, float* out) {
  for (int64_t at = 0; at < dim; at += kBlock) {
    Vec first{}, second{};
    for (int64_t j = 0; j < count; ++j) {
      Vec a, b;
      load_part(rows + j * dim, at, dim, a, b);
      first += a * factors[j];
      second += b * factors[j];
    }
    store_block(out + at, first, second);
  }
}

// Floats from one key to the next in a tile of products: a divisor of the vector length.
constexpr int key_stride(int rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }

// The products of some keys with query rows First to First + Count - 1, lane by lane: at most four sums, which stay in
// registers. sum[k * key_stride(Rows) + r] is that of key k and row r.
template <class T, int Rows, int First, int Count, int Keys>
SPARSE_RL_INLINE void multiply(const T* const* row, int64_t dim, const float* queries, Vec* sum) {
  Vec own[Keys * Count] = {};
  int64_t at = 0;
  auto add = [&](int k, Vec a, Vec b) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < Count; ++r) {
      const float* query = queries + at * kRows + (First + r) * kBlock;
      own[k * Count + r] += a * load(query);
      own[k * Count + r] += b * load(query + kLanes);
    }
  };
  for (; at + kBlock <= dim; at += kBlock) {
#pragma GCC unroll 4
    for (int k = 0; k < Keys; ++k) {
      Vec a, b;
      load_block(row[k] + at, a, b);
      add(k, a, b);
    }
  }
  if (at < dim) {
#pragma GCC unroll 4
    for (int k = 0; k < Keys; ++k) {
      Vec a, b;
      load_tail(row[k] + at, dim - at, a, b);
      add(k, a, b);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < Keys; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < Count; ++r) sum[k * key_stride(Rows) + First + r] = own[k * Count + r];
  }
}

// out[j * key_stride(Rows) + r] = scale * queries[r] . keys[j], for a tile of at most kTile keys.
//
// Rows is a compile-time constant so that all sums stay in registers. The keys are prefetched a little ahead, because
// the processor does not see one stream in them; `ahead`, if given, is the memory of the next tile, which is prefetched
// meanwhile. `after` is prefetched instead of the keys behind this one, if those are not the next to be read.
template <class T, int Rows>
SPARSE_RL_CLONES void dot_tile(
    const T* keys, int64_t count, int64_t dim, const float* queries, float scale, float* out, const T* ahead,
    const T* after = nullptr) {
  constexpr int Stride = key_stride(Rows), Together = Stride > 4 ? 1 : 4 / Stride, Sums = 8, Keys = Sums / Stride;
  if (!after) after = keys + kAhead * dim;
  Vec sum[Sums] = {};
  for (int64_t j = 0; j < count; j += Keys) {
    const T* row[Keys];
    for (int k = 0; k < Keys; ++k) row[k] = keys + (j + k < count ? j + k : count - 1) * dim;
    for (int64_t at = 0; at < Keys * dim; at += kLine / sizeof(T)) {
      __builtin_prefetch(after + j * dim + at);
      if (ahead) __builtin_prefetch(ahead + j * dim + at);
    }
#pragma GCC unroll 8
    for (int k = 0; k < Keys; k += Together) {
      multiply<T, Rows, 0, Rows < 4 ? Rows : 4, Together>(row + k, dim, queries, sum + k * Stride);
      if constexpr (Rows > 4) multiply<T, Rows, 4, Rows - 4, 1>(row + k, dim, queries, sum + k * Stride);
    }
    float sums[Sums];
    sum_lanes(sum, scale, sums);
    std::memcpy(out + j * Stride, sums, sizeof(float) * Stride * (j + Keys <= count ? Keys : count - j));
  }
}

// out[r * kTile + j] = scale * queries[r] . keys[j]; queries are laid out by pack_query.
template <class T, int Rows>
SPARSE_RL_CLONES void dot_rows(
    const T* keys, int64_t count, int64_t dim, const float* queries, float scale, float* out) {
  float tile[kTile * key_stride(Rows)];
  dot_tile<T, Rows>(keys, count, dim, queries, scale, tile, nullptr);
  for (int64_t j = 0; j < count; ++j) {
    for (int r = 0; r < Rows; ++r) out[r * kTile + j] = tile[j * key_stride(Rows) + r];
  }
}

template <class T>
void dots(const T* keys, int64_t count, int64_t dim, const float* queries, int rows, float scale, float* out) {
  switch (rows) {
    case 1: return dot_rows<T, 1>(keys, count, dim, queries, scale, out);
    case 2: return dot_rows<T, 2>(keys, count, dim, queries, scale, out);
    case 3: return dot_rows<T, 3>(keys, count, dim, queries, scale, out);
    case 4: return dot_rows<T, 4>(keys, count, dim, queries, scale, out);
    case 5: return dot_rows<T, 5>(keys, count, dim, queries, scale, out);
    case 6: return dot_rows<T, 6>(keys, count, dim, queries, scale, out);
    case 7: return dot_rows<T, 7>(keys, count, dim, queries, scale, out);
    default: return dot_rows<T, 8>(keys, count, dim, queries, scale, out);
  }
}

template <class T>
SPARSE_RL_CLONES void pack_row_any(const float* in, float factor, int64_t dim, T* row) {
  pack_row(in, factor, dim, row);
}

}  // namespace sparse_rl
