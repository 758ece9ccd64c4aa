// Rows in their own order, 8 floats at a time: for elementwise work between tensors of different types.
#pragma once

#include "vec.h"

namespace sparse_rl {

typedef uint16_t Half8 __attribute__((vector_size(16)));

inline constexpr int kEight = 8;

// The upper half of each float, rounded to the nearest even.
SPARSE_RL_INLINE Bits8 upper_halves(Vec8 x) {
  const Bits8 u = same_bits<Bits8>(x), up = u + 0x7FFFu + ((u >> 16) & 1u);
  const Int8 is_number = x == x;
  return (is_number ? up : up * 0 + 0x7FC00000u) >> 16;
}

// The numbers as T keeps them.
template <class T>
SPARSE_RL_INLINE Vec8 rounded(Vec8 x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return same_bits<Vec8>(upper_halves(x) << 16);
  }
}

SPARSE_RL_INLINE Vec8 load8(const BFloat16* p) {
  Half8 half;
  std::memcpy(&half, p, sizeof(half));
  return same_bits<Vec8>(__builtin_convertvector(half, Bits8) << 16);
}

SPARSE_RL_INLINE void store8(BFloat16* p, Vec8 x) {
  const Half8 half = __builtin_convertvector(upper_halves(x), Half8);
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

// exp(x) to 1 ulp or so from -87 to 87, outside of which x counts as the border: floats end at 88.
SPARSE_RL_INLINE Vec8 exp_within(Vec8 x) {
  const Vec8 most = 87.0f - Vec8{};
  x = x < -most ? -most : x;
  x = x > most ? most : x;
  const Vec8 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
  const Vec8 n = shifted - 12582912.0f;
  Vec8 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec8 p = 1.9875691500e-4f - Vec8{};
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * same_bits<Vec8>((same_bits<Bits8>(shifted) - 0x4B400000u + 127u) << 23);
}

SPARSE_RL_INLINE float sum_eight(Vec8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
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
  const float sum = sum_eight((squares[0] + squares[1]) + (squares[2] + squares[3]));
  return 1 / __builtin_sqrtf(sum / static_cast<float>(count) + epsilon);
}

}  // namespace sparse_rl
