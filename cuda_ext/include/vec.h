// Vectors of 8 and 16 floats written with the compiler's vector extensions: no intrinsics, any instruction set.
//
// A function marked SPARSE_RL_CLONES is compiled for AVX-512, AVX2 and plain x86-64; the loader picks one at start.
// Vectors of 16 are pairs of 8: GCC keeps wider ones than the machine has in memory, ten times as slow. A loop may carry
// about eight vectors of 8, as many as AVX2 has registers for.
// Rows are read in blocks of 32 elements as two vectors of 16. The block of a float32 row is (first 16, last 16); that of
// a bfloat16 row is (even, odd elements), because one load, a shift and a mask then give both. Dot products do not
// depend on the order as long as both sides share it.
#pragma once

#include "checks.h"

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(SPARSE_RL_NO_CLONES)
#define SPARSE_RL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPARSE_RL_CLONES
#endif
#define SPARSE_RL_INLINE inline __attribute__((always_inline))

namespace sparse_rl {

using torch::headeronly::BFloat16;
typedef float Vec8 __attribute__((vector_size(32)));
typedef int32_t Int8 __attribute__((vector_size(32)));
typedef uint32_t Bits8 __attribute__((vector_size(32)));

inline constexpr int kEight = 8, kLanes = 16;
inline constexpr int kBlock = 32;  // elements per load

inline int64_t padded(int64_t dim) { return (dim + kBlock - 1) / kBlock * kBlock; }

// The bits of a vector as those of another type.
template <class To, class From>
SPARSE_RL_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

SPARSE_RL_INLINE Vec8 load8(const float* p) {
  Vec8 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

SPARSE_RL_INLINE void store8(float* p, Vec8 x) { std::memcpy(p, &x, sizeof(x)); }

// `a` where the mask is all ones, `b` where it is zero.
SPARSE_RL_INLINE Vec8 select(Int8 mask, Vec8 a, Vec8 b) {
  return same_bits<Vec8>((same_bits<Int8>(a) & mask) | (same_bits<Int8>(b) & ~mask));
}

// Sixteen floats.
struct Vec {
  Vec8 low, high;

  SPARSE_RL_INLINE Vec& operator+=(Vec x) { return *this = {low + x.low, high + x.high}; }
  SPARSE_RL_INLINE Vec& operator*=(float x) { return *this = {low * x, high * x}; }
};

SPARSE_RL_INLINE Vec operator-(Vec a, Vec b) { return {a.low - b.low, a.high - b.high}; }
SPARSE_RL_INLINE Vec operator*(Vec a, Vec b) { return {a.low * b.low, a.high * b.high}; }
SPARSE_RL_INLINE Vec operator-(Vec a, float b) { return {a.low - b, a.high - b}; }
SPARSE_RL_INLINE Vec operator*(Vec a, float b) { return {a.low * b, a.high * b}; }

SPARSE_RL_INLINE Vec8 splat8(float x) { return x - Vec8{}; }
SPARSE_RL_INLINE Vec splat(float x) { return {splat8(x), splat8(x)}; }

SPARSE_RL_INLINE Vec load(const float* p) { return {load8(p), load8(p + kEight)}; }

SPARSE_RL_INLINE void store(float* p, Vec v) {
  store8(p, v.low);
  store8(p + kEight, v.high);
}

SPARSE_RL_INLINE void store_block(float* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}

// Half of a block: 8 of its first vector, and 8 of its second.
SPARSE_RL_INLINE void load_half(const float* p, Vec8& a, Vec8& b) {
  a = load8(p);
  b = load8(p + kLanes);
}

SPARSE_RL_INLINE void load_half(const BFloat16* p, Vec8& a, Vec8& b) {
  Bits8 both;
  std::memcpy(&both, p, sizeof(both));
  a = same_bits<Vec8>(both << 16);
  b = same_bits<Vec8>(both & 0xFFFF0000u);
}

// Elements from the start of a block to that of its second half.
template <class T>
inline constexpr int kHalf = sizeof(T) == sizeof(float) ? kEight : kLanes;

template <class T>
SPARSE_RL_INLINE void load_block(const T* p, Vec& a, Vec& b) {
  load_half(p, a.low, b.low);
  load_half(p + kHalf<T>, a.high, b.high);
}

// The last dim % 32 elements of a row, followed by zeros.
template <class T>
SPARSE_RL_INLINE void load_tail(const T* p, int64_t count, Vec& a, Vec& b) {
  alignas(64) T block[kBlock] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) std::memcpy(static_cast<void*>(block + i), p + i, 8 * sizeof(T));  // inlined moves
  for (; i < count; ++i) block[i] = p[i];
  load_block(block, a, b);
}

template <class T>
SPARSE_RL_INLINE void load_part(const T* row, int64_t at, int64_t dim, Vec& a, Vec& b) {
  if (at + kBlock <= dim) {
    load_block(row + at, a, b);
  } else {
    load_tail(row + at, dim - at, a, b);
  }
}

// A whole row as floats in block order, padded with zeros.
template <class T>
SPARSE_RL_INLINE void unpack_row(const T* row, int64_t dim, float* out) {
  for (int64_t at = 0; at < dim; at += kBlock) {
    Vec a, b;
    load_part(row, at, dim, a, b);
    store_block(out + at, a, b);
  }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SPARSE_RL_SHUFFLE 1
#endif
#endif

SPARSE_RL_INLINE float sum_lanes(Vec8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

SPARSE_RL_INLINE float sum_lanes(Vec v) { return sum_lanes(v.low + v.high); }

// Sums of the lanes of eight vectors at once, times a factor. Each step adds the halves of two vectors: one shuffle
// collects the lanes that change sides, a blend those that stay.
SPARSE_RL_INLINE void sum_lanes(const Vec* v, float factor, float* out) {
#ifdef SPARSE_RL_SHUFFLE
  Vec8 q[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec8 x = v[2 * i].low + v[2 * i].high, y = v[2 * i + 1].low + v[2 * i + 1].high;
    q[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 12, 13, 14, 15) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 8, 9, 10, 11);
  }
  Vec8 p[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    p[i] = __builtin_shufflevector(q[2 * i], q[2 * i + 1], 0, 1, 10, 11, 4, 5, 14, 15) +
           __builtin_shufflevector(q[2 * i], q[2 * i + 1], 2, 3, 8, 9, 6, 7, 12, 13);
  }
  const Vec8 r = __builtin_shufflevector(p[0], p[1], 0, 9, 2, 11, 4, 13, 6, 15) +
                 __builtin_shufflevector(p[0], p[1], 1, 8, 3, 10, 5, 12, 7, 14);
  // the sums of 0, 4, 2, 6, 1, 5, 3, 7
  store8(out, __builtin_shufflevector(r, r, 0, 4, 2, 6, 1, 5, 3, 7) * factor);
#else
  for (int i = 0; i < 8; ++i) out[i] = sum_lanes(v[i]) * factor;
#endif
}

// `a` where it is larger, otherwise `b`, also if one of them is NaN.
SPARSE_RL_INLINE Vec larger(Vec a, Vec b) {
  return {a.low > b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

// `a` where it is smaller, otherwise `b`.
SPARSE_RL_INLINE Vec smaller(Vec a, Vec b) {
  return {a.low < b.low ? a.low : b.low, a.high < b.high ? a.high : b.high};
}

// The upper half of each float, rounded to the nearest even.
SPARSE_RL_INLINE Bits8 round_to_bfloat16(Vec8 v) {
  const Bits8 u = same_bits<Bits8>(v), rounded = u + 0x7FFFu + ((u >> 16) & 1u);
  const Bits8 is_nan = same_bits<Bits8>((0x7F800000 - same_bits<Int8>(u & 0x7FFFFFFFu)) >> 31);
  return ((rounded & ~is_nan) | (0x7FC00000u & is_nan)) & 0xFFFF0000u;
}

SPARSE_RL_INLINE void store_half(BFloat16* p, Vec8 a, Vec8 b) {
  const Bits8 both = round_to_bfloat16(b) | (round_to_bfloat16(a) >> 16);
  std::memcpy(static_cast<void*>(p), &both, sizeof(both));
}

SPARSE_RL_INLINE void store_block(BFloat16* p, Vec a, Vec b) {
  store_half(p, a.low, b.low);
  store_half(p + kHalf<BFloat16>, a.high, b.high);
}

// A row from floats in block order, multiplied by a factor.
template <class T>
SPARSE_RL_INLINE void pack_row(const float* in, float factor, int64_t dim, T* row) {
  int64_t at = 0;
  for (; at + kBlock <= dim; at += kBlock) {
    store_block(row + at, load(in + at) * factor, load(in + at + kLanes) * factor);
  }
  if (at < dim) {
    alignas(64) T block[kBlock];
    store_block(block, load(in + at) * factor, load(in + at + kLanes) * factor);
    for (int64_t i = 0; at + i < dim; ++i) row[at + i] = block[i];
  }
}

// exp(x) to 1 ulp or so where |x| <= 87, outside of which floats end or become subnormal.
SPARSE_RL_INLINE Vec8 exp_within_87(Vec8 x) {
  const Vec8 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
  const Vec8 n = shifted - 12582912.0f;
  Vec8 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec8 p = splat8(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Bits8 exponent = (same_bits<Bits8>(shifted) << 23) + (127u << 23);  // the integer is in the lowest bits
  return p * same_bits<Vec8>(exponent);
}

// exp(x) for x <= 0; 0 below -87, for -inf and for NaN.
SPARSE_RL_INLINE Vec8 exp_negative(Vec8 x) {
  // bits of positive floats are ordered as the floats are, with NaN above them all
  const Int8 live = ((same_bits<Int8>(x) & 0x7FFFFFFF) - 0x42AE0001) >> 31;  // |x| <= 87
  return select(live, exp_within_87(select(live, x, splat8(-87.0f))), Vec8{});
}

SPARSE_RL_INLINE Vec exp_negative(Vec x) { return {exp_negative(x.low), exp_negative(x.high)}; }

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Call `run` with a zero of the C++ type of `dtype`.
#define SPARSE_RL_DISPATCH(dtype, run)                                                                  \
  switch (dtype) {                                                                                      \
    case ScalarType::Float: run(float{}); break;                                                        \
    case ScalarType::BFloat16: run(BFloat16{}); break;                                                  \
    default:                                                                                            \
      STD_TORCH_CHECK(false, "keys are ", dtype_text(dtype), ", the CPU kernels take float32 and "      \
          "bfloat16");                                                                                  \
  }

}  // namespace sparse_rl
