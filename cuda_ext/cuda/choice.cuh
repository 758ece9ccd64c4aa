// Deterministic top-k by radix selection in one block: which entries of one head stay. The CPU version is choice.h.
#pragma once

#include "device.cuh"

namespace sparse_rl {

// Unsigned integers in the order of the scores: -inf lowest but for NaN, -0 equal to +0.
SPARSE_RL_DEVICE uint32_t rank_key(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The number of threads with true in each warp, before this thread, and in all.
struct Count {
  int before, all;
};

SPARSE_RL_DEVICE Count count_block(bool yes, int (&per_warp)[kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned votes = __ballot_sync(kAll, yes);
  __syncthreads();  // the last count has been read
  if (lane == 0) per_warp[warp] = __popc(votes);
  __syncthreads();
  Count count{__popc(votes & ((1u << lane) - 1)), 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) count.before += per_warp[w];
    count.all += per_warp[w];
  }
  return count;
}

// Decides whether entry j stays: pinned entries come first, then the best scores, ties to the lowest index. If
// more are pinned than the budget allows, scores decide among the pinned. The same in all threads of a block.
struct Choice {
  const float* scores;
  const int32_t* positions;  // null: entry j has position j
  int length, budget;
  int64_t num_sinks, window;
  bool among_pinned = false;  // true: only pinned entries compete, the others go; false: the others compete
  uint32_t threshold = 0;
  int ties = 0;  // entries equal to the threshold that stay

  struct Shared {
    int bins[kThreads], per_warp[kWarps], sums[kWarps];
    int bin, places;
  };

  SPARSE_RL_DEVICE bool pinned(int j) const {
    return (positions ? positions[j] : j) < num_sinks || j >= length - window;
  }
  SPARSE_RL_DEVICE bool contested(int j) const { return pinned(j) == among_pinned; }

  // Four rounds of a 256-bin histogram narrow down the key of the last entry that stays.
  SPARSE_RL_DEVICE void settle(Shared& shared) {
    int num_pinned = 0;
    for (int start = 0; start < length; start += kThreads) {
      const int j = start + static_cast<int>(threadIdx.x);
      num_pinned += count_block(j < length && pinned(j), shared.per_warp).all;
    }
    among_pinned = num_pinned > budget;
    int places = among_pinned ? budget : budget - num_pinned;
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; places > 0 && shift >= 0; shift -= 8) {
      shared.bins[threadIdx.x] = 0;
      __syncthreads();
      for (int j = threadIdx.x; j < length; j += kThreads) {
        const uint32_t key = rank_key(scores[j]);
        if (contested(j) && (key & mask) == prefix) atomicAdd(&shared.bins[key >> shift & 255], 1);
      }
      __syncthreads();
      find_bin(places, shared);
      places = shared.places;
      prefix |= static_cast<uint32_t>(shared.bin) << shift;
      mask |= 255u << shift;
      __syncthreads();
    }
    threshold = places > 0 ? prefix : 0xFFFFFFFFu;
    ties = places > 0 ? places : 0;
  }

  // The bin in which the places run out, assigned from the highest bin on, and the number of places left for it.
  SPARSE_RL_DEVICE static void find_bin(int places, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = shared.bins[threadIdx.x];
    int from_here = own;  // entries in this thread's bin and all higher ones
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_down_sync(kAll, from_here, step);
      if (lane + step < 32) from_here += other;
    }
    if (lane == 0) shared.sums[warp] = from_here;
    __syncthreads();
    for (int w = warp + 1; w < kWarps; ++w) from_here += shared.sums[w];
    const int above = from_here - own;
    if (from_here >= places && above < places) shared.bin = threadIdx.x, shared.places = places - above;
    __syncthreads();
  }

  // Whether entry j, this thread's in a chunk of 256, stays; `ties_seen` counts those of earlier chunks.
  SPARSE_RL_DEVICE bool stays(int j, int& ties_seen, Shared& shared) const {
    const bool competes = j < length && contested(j);
    const uint32_t key = competes ? rank_key(scores[j]) : 0;
    const Count tied = count_block(competes && key == threshold, shared.per_warp);
    const int rank = ties_seen + tied.before;
    ties_seen += tied.all;
    if (j >= length) return false;
    if (!competes) return !among_pinned;
    return key > threshold || (key == threshold && rank < ties);
  }
};

}  // namespace sparse_rl
