// Deterministic top-k by radix selection: which entries of one head stay. Used by the CPU kernels.
#pragma once

#include <cstdint>
#include <cstring>

namespace sparse_rl {

// Unsigned integers in the order of the scores: -inf lowest but for NaN, -0 equal to +0.
inline uint32_t rank_key(float score) {
  if (score != score) return 0;
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Decides whether entry j of a head stays: pinned entries come first, then the best scores, ties to the lowest
// index. If more are pinned than the budget allows, scores decide among the pinned.
struct Choice {
  const float* scores;
  const int32_t* positions;  // null: entry j has position j
  int64_t length, budget, num_sinks, window;
  int64_t contested_class = 0;  // 1: only pinned entries compete, the others go; 0: the others compete, pinned stay
  uint32_t threshold = 0;
  int64_t ties = 0;  // entries equal to the threshold that stay
  bool everything = false;

  bool pinned(int64_t j) const { return (positions ? positions[j] : j) < num_sinks || j >= length - window; }

  // Four rounds of a 256-bin histogram narrow down the key of the last entry that stays.
  void settle() {
    everything = length <= budget;
    if (everything) return;
    int64_t num_pinned = 0;
    for (int64_t j = 0; j < length; ++j) num_pinned += pinned(j);
    contested_class = num_pinned > budget;
    int64_t places = contested_class ? budget : budget - num_pinned;
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; places > 0 && shift >= 0; shift -= 8) {
      int32_t bins[256] = {};
      for (int64_t j = 0; j < length; ++j) {
        if (pinned(j) != (contested_class != 0)) continue;
        const uint32_t key = rank_key(scores[j]);
        if ((key & mask) == prefix) ++bins[key >> shift & 255];
      }
      int bin = 255;
      while (bin > 0 && places > bins[bin]) places -= bins[bin--];
      prefix |= static_cast<uint32_t>(bin) << shift;
      mask |= 255u << shift;
    }
    threshold = places > 0 ? prefix : 0xFFFFFFFFu;
    ties = places;
  }

  // Call once per entry, from the first to the last.
  bool stays(int64_t j) {
    if (everything) return true;
    if (pinned(j) != (contested_class != 0)) return contested_class == 0;
    const uint32_t key = rank_key(scores[j]);
    return key > threshold || (key == threshold && ties-- > 0);
  }
};

}  // namespace sparse_rl
