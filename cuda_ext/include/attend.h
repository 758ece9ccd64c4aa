// Attention of one query token over tiles of keys and values, with an online softmax: shared by the CPU kernels of
// decode_attention and page_attention.
#pragma once

#include "dots.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace sparse_rl {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Running softmax of up to eight query rows: the largest logits so far and the sums of exp(logit - largest).
struct Softmax {
  float largest[kRows], sum[kRows] = {};

  Softmax() { std::fill(largest, largest + kRows, kNothing); }
};

// Turn a tile of logits (see dot_tile) into exp(logit - largest so far); `rescale` is the factor of earlier sums.
// A vector has several keys, Stride rows of each.
template <int Rows>
SPARSE_RL_CLONES void add_tile(float* logits, int64_t count, Softmax& state, float* rescale) {
  constexpr int Stride = key_stride(Rows);
  const int64_t end = (count * Stride + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = count * Stride; i < end; ++i) logits[i] = kNothing;
  alignas(64) float lanes[kLanes], base[kLanes];
  Vec top = splat(kNothing);
  for (int64_t at = 0; at < end; at += kLanes) {
    Vec v = load(logits + at);
    top = larger(v, top);
  }
  store(lanes, top);
  for (int r = 0; r < Rows; ++r) {
    const float before = state.largest[r];
    for (int i = r; i < kLanes; i += Stride) state.largest[r] = std::max(state.largest[r], lanes[i]);
    base[r] = state.largest[r] == kNothing ? 0.0f : state.largest[r];
    rescale[r] = before == state.largest[r] ? 1.0f : std::exp(before - base[r]);
  }
  for (int r = Rows; r < Stride; ++r) base[r] = 0.0f;
  for (int i = Stride; i < kLanes; ++i) base[i] = base[i - Stride];
  const Vec bases = load(base);
  Vec sum{};
  for (int64_t at = 0; at < end; at += kLanes) {
    Vec p = exp_negative(load(logits + at) - bases);
    store(logits + at, p);
    sum += p;
  }
  store(lanes, sum);
  for (int r = 0; r < Rows; ++r) {
    state.sum[r] *= rescale[r];
    for (int i = r; i < kLanes; i += Stride) state.sum[r] += lanes[i];
  }
}

// Half of the block at `at`, of rows First to First + Count - 1: as many sums as stay in registers. Whether the block is
// whole is a constant, because GCC does not move the question out of the loop.
template <bool Whole, int Rows, int First, int Count, class T>
SPARSE_RL_INLINE void add_half(
    const T* values, int64_t count, int64_t dim, int64_t at, int half, const float* weights, const float* rescale,
    float* out) {
  Vec8 sum[2 * Count];
  float* own = out + First * padded(dim) + at + half * kEight;
#pragma GCC unroll 4
  for (int r = 0; r < Count; ++r) {
    sum[2 * r] = load8(own + r * padded(dim)) * rescale[First + r];
    sum[2 * r + 1] = load8(own + r * padded(dim) + kLanes) * rescale[First + r];
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec8 a, b;
    if constexpr (Whole) {
      load_half(values + j * dim + at + half * kHalf<T>, a, b);
    } else {
      Vec first, second;
      load_tail(values + j * dim + at, dim - at, first, second);
      a = half ? first.high : first.low;
      b = half ? second.high : second.low;
    }
#pragma GCC unroll 4
    for (int r = 0; r < Count; ++r) {
      const float w = weights[j * key_stride(Rows) + First + r];
      sum[2 * r] += a * w;
      sum[2 * r + 1] += b * w;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Count; ++r) {
    store8(own + r * padded(dim), sum[2 * r]);
    store8(own + r * padded(dim) + kLanes, sum[2 * r + 1]);
  }
}

template <bool Whole, int Rows, class T>
SPARSE_RL_INLINE void add_block(
    const T* values, int64_t count, int64_t dim, int64_t at, const float* weights, const float* rescale, float* out) {
  for (int half = 0; half < 2; ++half) {
    add_half<Whole, Rows, 0, Rows < 4 ? Rows : 4>(values, count, dim, at, half, weights, rescale, out);
    if constexpr (Rows > 4) add_half<Whole, Rows, 4, Rows - 4>(values, count, dim, at, half, weights, rescale, out);
  }
}

// out[r] = out[r] * rescale[r] + sum_j weights[j * key_stride(Rows) + r] * values[j]
template <class T, int Rows>
SPARSE_RL_CLONES void add_values(
    const T* values, int64_t count, int64_t dim, const float* weights, const float* rescale, float* out) {
  int64_t at = 0;
  for (; at + kBlock <= dim; at += kBlock) add_block<true, Rows>(values, count, dim, at, weights, rescale, out);
  if (at < dim) add_block<false, Rows>(values, count, dim, at, weights, rescale, out);
}

// Finish a row: write its result, return its log-sum-exp. A row without entries gives zeros and -inf.
template <class T>
float finish_row(float largest, float sum, const float* sums, int64_t dim, T* out) {
  pack_row_any(sums, sum > 0 ? 1 / sum : sum, dim, out);
  return largest == kNothing ? kNothing : largest + std::log(sum);
}

// Call `run` with the number of rows as a constant, at most kRows.
template <class Run>
void with_rows(int64_t rows, Run run) {
  switch (rows) {
    case 1: return run(std::integral_constant<int, 1>{});
    case 2: return run(std::integral_constant<int, 2>{});
    case 3: return run(std::integral_constant<int, 3>{});
    case 4: return run(std::integral_constant<int, 4>{});
    case 5: return run(std::integral_constant<int, 5>{});
    case 6: return run(std::integral_constant<int, 6>{});
    case 7: return run(std::integral_constant<int, 7>{});
    default: return run(std::integral_constant<int, 8>{});
  }
}

}  // namespace sparse_rl
