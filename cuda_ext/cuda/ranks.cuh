// The tokens of a row in one order, and the search among them for the last one that stays, round by round of bins.
#pragma once

#include "choice.cuh"

#include <type_traits>

namespace sparse_rl {

// The lowest bits of a key that tell no two numbers of a type apart.
template <class T>
constexpr int kIdle = std::is_same_v<T, BFloat16> ? 16 : std::is_same_v<T, Half> ? 13 : 0;

// The number with this key.
SPARSE_RL_DEVICE float rank_value(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// The worst token that stays: logits as rank keys, among equal ones the lowest tokens.
struct Limit {
  uint32_t key = 0;
  int64_t token = -1;

  SPARSE_RL_DEVICE bool stays(float logit, int64_t at) const {
    const uint32_t own = rank_key(logit);
    return own > key || (own == key && at <= token);
  }
};

constexpr int64_t kTies = std::numeric_limits<int64_t>::max();  // as the token of a limit: all with its logit stay

// All tokens in one order: the best have the highest ranks, of equal ones the lowest tokens.
SPARSE_RL_DEVICE uint64_t rank_of(uint32_t key, int64_t token) {
  return static_cast<uint64_t>(key) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(token));
}
SPARSE_RL_DEVICE uint32_t key_of(uint64_t rank) { return static_cast<uint32_t>(rank >> 32); }
SPARSE_RL_DEVICE int64_t token_of(uint64_t rank) { return 0xFFFFFFFFu - static_cast<uint32_t>(rank); }

constexpr int kBySteps = 64;

// The ranks among which the last token that stays is looked for, and how they are sorted into bins, the best first: by
// steps of the logit below the maximum, or by their upper bits.
struct Search {
  uint64_t low, high;
  int shift;
  float scale;  // steps per unit

  // As many steps as there are bins; never fewer for a lower logit.
  SPARSE_RL_DEVICE int steps(float logit, float maximum) const {
    return static_cast<int>(fminf((maximum - logit) * scale, kThreads - 1));
  }

  SPARSE_RL_DEVICE int bin(float logit, int64_t token, float maximum) const {
    if (shift == kBySteps) return steps(logit, maximum);
    const uint64_t rank = rank_of(rank_key(logit), token);
    return rank < low || rank > high ? -1 : static_cast<int>((high >> shift) - (rank >> shift));
  }

  // The lowest key at most so many steps below the maximum, by halving.
  SPARSE_RL_DEVICE uint32_t lowest_key(int most, float maximum) const {
    uint32_t from = rank_key(kNegInf), to = rank_key(maximum);
    while (from < to) {
      const uint32_t middle = from + (to - from) / 2;
      if (steps(rank_value(middle), maximum) > most) {
        from = middle + 1;
      } else {
        to = middle;
      }
    }
    return from;
  }

  // Keep the ranks of one bin.
  SPARSE_RL_DEVICE void narrow(int bin, float maximum) {
    uint64_t first, last;
    if (shift == kBySteps) {
      first = rank_of(lowest_key(bin, maximum), 0xFFFFFFFF);
      last = bin ? rank_of(lowest_key(bin - 1, maximum), 0xFFFFFFFF) - 1 : high;
    } else {
      first = ((high >> shift) - bin) << shift, last = first + ((uint64_t{1} << shift) - 1);
    }
    low = first > low ? first : low, high = last < high ? last : high;
  }

  // Take bins as small as they can be, but not below `least` bits.
  SPARSE_RL_DEVICE void sort_by_bits(int least) {
    for (shift = least; (high >> shift) - (low >> shift) >= kThreads;) ++shift;
  }
};

}  // namespace sparse_rl
