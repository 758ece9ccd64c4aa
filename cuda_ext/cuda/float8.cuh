// Pools of float8_e4m3fn: numbers of eight bits, read as floats and written rounded; nothing is computed in them.
//
// From compute capability 8.9 on there are instructions for both. Older GPUs decode and round the bits, as the emulation
// does.
#pragma once

#include "device.cuh"

#include <type_traits>

namespace sparse_rl {

// Four numbers in a word as floats, exactly.
SPARSE_RL_DEVICE void widen(uint32_t word, float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> 8 * i);
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    x[i] = element<Half>(halves.x), x[i + 1] = element<Half>(halves.y);
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = word >> 8 * i & 255, magnitude = bits & 127;
    // the float of the same exponent and mantissa is 2^120 times smaller, subnormal ones too
    const float value = __uint_as_float(bits >> 7 << 31 | magnitude << 20) * 0x1p120f;
    x[i] = magnitude == 127 ? std::numeric_limits<float>::quiet_NaN() : value;
  }
#endif
}

// Four or eight neighboring numbers as floats.
template <int Width>
SPARSE_RL_DEVICE void load_floats(const Float8* p, float (&x)[Width]) {
  static_assert(Width == 4 || Width == 8);
  uint32_t words[Width / 4];
  if constexpr (Width == 4) {
    words[0] = *reinterpret_cast<const uint32_t*>(p);
  } else {
    const uint2 pair = *reinterpret_cast<const uint2*>(p);
    words[0] = pair.x, words[1] = pair.y;
  }
#pragma unroll
  for (int part = 0; part < Width / 4; ++part) {
    float some[4];
    widen(words[part], some);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * part + i] = some[i];
  }
}

SPARSE_RL_DEVICE void load8(const Float8* p, float (&x)[8]) { load_floats(p, x); }

// The stored value of a number: the nearest one, +-448 for those beyond; NaN stays.
template <class P, class T>
SPARSE_RL_DEVICE P stored(T x) {
  if constexpr (std::is_same_v<P, T>) {
    return x;
  } else {
    const float wide = static_cast<float>(x);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return P(__nv_cvt_float_to_fp8(wide, __NV_SATFINITE, __NV_E4M3), P::from_bits());
#else
    return narrow<P>(wide > 448 ? 448.0f : wide < -448 ? -448.0f : wide);
#endif
  }
}

}  // namespace sparse_rl
