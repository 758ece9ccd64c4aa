// Rows in their own order, 8 floats at a time: for elementwise work between tensors of different types.
#pragma once

#include "vec.h"

namespace sparse_rl {

typedef uint16_t Half8 __attribute__((vector_size(16)));

// The numbers as T keeps them.
template <class T>
SPARSE_RL_INLINE Vec8 rounded(Vec8 x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return same_bits<Vec8>(round_to_bfloat16(x));
  }
}

SPARSE_RL_INLINE Vec8 load8(const BFloat16* p) {
  Half8 half;
  std::memcpy(&half, p, sizeof(half));
  return same_bits<Vec8>(__builtin_convertvector(half, Bits8) << 16);
}

SPARSE_RL_INLINE void store8(BFloat16* p, Vec8 x) {
  const Half8 half = __builtin_convertvector(round_to_bfloat16(x) >> 16, Half8);
  std::memcpy(static_cast<void*>(p), &half, sizeof(half));
}

// Up to eight elements; the lanes behind them are zero.
template <class T>
SPARSE_RL_INLINE Vec8 load8(const T* p, int64_t count) {
  if (count >= kEight) return load8(p);
  alignas(32) T some[kEight] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = p[i];
  return load8(some);
}

template <class T>
SPARSE_RL_INLINE void store8(T* p, int64_t count, Vec8 x) {
  if (count >= kEight) return store8(p, x);
  alignas(32) T some[kEight];
  store8(some, x);
  for (int64_t i = 0; i < count; ++i) p[i] = some[i];
}

// exp(x); beyond -87 and 87 x counts as the border.
SPARSE_RL_INLINE Vec8 exp_clamped(Vec8 x) {
  const Vec8 most = splat8(87.0f);
  x = x < -most ? -most : x;
  return exp_within_87(x > most ? most : x);
}

// 1 / sqrt(mean of squares + epsilon) of a row.
template <class T>
SPARSE_RL_INLINE float inverse_rms(const T* row, int64_t count, float epsilon) {
  Vec8 squares[4] = {};  // sums that do not wait for each other
  int64_t i = 0;
  for (; i + 4 * kEight <= count; i += 4 * kEight) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const Vec8 x = load8(row + i + part * kEight);
      squares[part] += x * x;
    }
  }
  for (; i < count; i += kEight) {
    const Vec8 x = load8(row + i, count - i);
    squares[0] += x * x;
  }
  const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  return 1 / __builtin_sqrtf(sum / static_cast<float>(count) + epsilon);
}

}  // namespace sparse_rl
