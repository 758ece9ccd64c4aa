// Vectors of 16 floats written with the compiler's vector extensions: no intrinsics, any instruction set.
//
// A function marked SPARSE_RL_CLONES is compiled for AVX-512, AVX2 and plain x86-64; the loader picks one at start.
// Rows are read in blocks of 32 elements as two vectors. The block of a float32 row is (first 16, last 16); that of a
// bfloat16 row is (even, odd elements), because one load, a shift and a mask then give 32 floats. Dot products do not
// depend on the order as long as both sides share it; `order` maps an element to its place.
//
// GCC turns comparisons of vectors wider than the machine's into one of every lane, ten times as slow. So whole vectors
// are never compared: maxima are taken by halves, and masks are made of sign bits.
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
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t VecI __attribute__((vector_size(64)));
typedef uint32_t VecU __attribute__((vector_size(64)));

inline constexpr int kLanes = 16;
inline constexpr int kBlock = 32;  // elements per load

inline int64_t padded(int64_t dim) { return (dim + kBlock - 1) / kBlock * kBlock; }

SPARSE_RL_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

SPARSE_RL_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

SPARSE_RL_INLINE Vec splat(float x) { return x - Vec{}; }

// The bits of a vector as those of another type.
template <class To, class From>
SPARSE_RL_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// `a` where the mask is all ones, `b` where it is zero.
SPARSE_RL_INLINE Vec select(VecI mask, Vec a, Vec b) {
  return same_bits<Vec>((VecU)((same_bits<VecI>(a) & mask) | (same_bits<VecI>(b) & ~mask)));
}

SPARSE_RL_INLINE void load_block(const float* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + kLanes);
}

SPARSE_RL_INLINE void load_block(const BFloat16* p, Vec& a, Vec& b) {
  VecU both;
  std::memcpy(&both, p, sizeof(both));
  a = same_bits<Vec>(both << 16);
  b = same_bits<Vec>(both & 0xFFFF0000u);
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
    store(out + at, a);
    store(out + at + kLanes, b);
  }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SPARSE_RL_SHUFFLE 1
#endif
#endif

// Sums of the lanes of eight vectors at once, times a factor. Each step adds the halves of two vectors: one shuffle
// collects the lanes that change sides, a blend those that stay.
SPARSE_RL_INLINE void sum_lanes(const Vec* v, float factor, float* out) {
#ifdef SPARSE_RL_SHUFFLE
  Vec p[4], q[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Vec x = v[2 * i], y = v[2 * i + 1];
    p[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
           __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    Vec x = p[2 * i], y = p[2 * i + 1];
    q[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  }
  Vec r = __builtin_shufflevector(q[0], q[1], 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
          __builtin_shufflevector(q[0], q[1], 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
  r += __builtin_shufflevector(r, r, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  // the sums of 0, 4, 2, 6, 1, 5, 3, 7 are now in every second lane
  auto s = __builtin_shufflevector(r, r, 0, 8, 4, 12, 2, 10, 6, 14) * factor;
  std::memcpy(out, &s, 8 * sizeof(float));
#else
  for (int i = 0; i < 8; ++i) {
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += v[i][lane];
    out[i] = sum * factor;
  }
#endif
}

typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));

// `a` where it is larger, otherwise `b`, also if one of them is NaN.
SPARSE_RL_INLINE Vec larger(Vec a, Vec b) {
  Vec8 x[2], y[2];
  std::memcpy(x, &a, sizeof(a));
  std::memcpy(y, &b, sizeof(b));
  for (int i = 0; i < 2; ++i) x[i] = x[i] > y[i] ? x[i] : y[i];
  std::memcpy(&a, x, sizeof(a));
  return a;
}

// `a` where it is smaller, otherwise `b`.
SPARSE_RL_INLINE Vec smaller(Vec a, Vec b) {
  Vec8 x[2], y[2];
  std::memcpy(x, &a, sizeof(a));
  std::memcpy(y, &b, sizeof(b));
  for (int i = 0; i < 2; ++i) x[i] = x[i] < y[i] ? x[i] : y[i];
  std::memcpy(&a, x, sizeof(a));
  return a;
}

SPARSE_RL_INLINE float sum_lanes(Vec v) {
  Vec8 halves[2];
  std::memcpy(halves, &v, sizeof(v));
  Vec8 eight = halves[0] + halves[1];
  Vec4 quarters[2];
  std::memcpy(quarters, &eight, sizeof(eight));
  Vec4 four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

SPARSE_RL_INLINE float max_lanes(Vec v) {
  Vec8 halves[2];
  std::memcpy(halves, &v, sizeof(v));
  Vec8 eight = halves[0] > halves[1] ? halves[0] : halves[1];
  Vec4 quarters[2];
  std::memcpy(quarters, &eight, sizeof(eight));
  Vec4 four = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
  const float x = four[0] > four[2] ? four[0] : four[2], y = four[1] > four[3] ? four[1] : four[3];
  return x > y ? x : y;
}

SPARSE_RL_INLINE void store_block(float* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}

// The upper half of each float, rounded to the nearest even.
SPARSE_RL_INLINE VecU round_to_bfloat16(Vec v) {
  VecU u;
  std::memcpy(&u, &v, sizeof(u));
  const VecU rounded = u + 0x7FFFu + ((u >> 16) & 1u);
  const VecU is_nan = (VecU)((0x7F800000 - (VecI)(u & 0x7FFFFFFFu)) >> 31);
  return ((rounded & ~is_nan) | (0x7FC00000u & is_nan)) & 0xFFFF0000u;
}

SPARSE_RL_INLINE void store_block(BFloat16* p, Vec a, Vec b) {
  VecU both = round_to_bfloat16(b) | (round_to_bfloat16(a) >> 16);
  std::memcpy(static_cast<void*>(p), &both, sizeof(both));
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

// exp(x) for x <= 0 to 1 ulp or so; 0 below -87, where floats become subnormal, for -inf and for NaN.
SPARSE_RL_INLINE Vec exp_negative(Vec x) {
  // bits of positive floats are ordered as the floats are, with NaN above them all
  const VecI live = ((same_bits<VecI>(x) & 0x7FFFFFFF) - 0x42AE0001) >> 31;  // |x| <= 87
  x = select(live, x, splat(-87.0f));
  const Vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
  const Vec n = shifted - 12582912.0f;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const VecU exponent = ((VecU)same_bits<VecI>(shifted) << 23) + (127u << 23);  // the integer is in the lowest bits
  return select(live, p * same_bits<Vec>(exponent), Vec{});
}

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
