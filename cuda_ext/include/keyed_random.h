// Random numbers as a pure function of integer keys, as in ops/keyed_random.py: SplitMix64 over a tuple of keys.
#pragma once

#include "heads.h"

namespace sparse_rl {

SPARSE_RL_DEVICE uint64_t mix(uint64_t state, int64_t key) {
  uint64_t z = state + (static_cast<uint64_t>(key) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Uniform in (0, 1), a multiple of 2^-53: exact in float64, never 0 or 1.
SPARSE_RL_DEVICE double keyed_uniform(int64_t first, int64_t second) {
  return (static_cast<double>(mix(mix(0, first), second) >> 12) + 0.5) * (1.0 / 4503599627370496.0);
}

// hash_uniform of ops/keyed_random.py: 47 of the bits as the nearest float in (0, 1).
SPARSE_RL_DEVICE float keyed_float(uint64_t bits) {
  const float high = static_cast<float>(bits >> 40), low = static_cast<float>(bits >> 17 & 0x7FFFFFu);
  const float uniform = high * 0x1p-24f + (low + 0.5f) * 0x1p-47f;
  return uniform < 1 - 0x1p-24f ? uniform : 1 - 0x1p-24f;
}

}  // namespace sparse_rl
