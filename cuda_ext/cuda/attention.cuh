// Shared by the kernels of decode_attention and page_attention: a block's share of the work, the entries to read, the
// online softmax, and the merging of partial results.
//
// A block takes some query heads that share a KV head, and one split of its entries. Its warps take tiles in turn, each
// with a softmax of its own, and merge in shared memory. A head of one split is then finished. Otherwise every split
// leaves a partial result, and combine_splits adds them up in their order. Which warp of which split reads an entry
// depends on the number of entries alone, so a row's bits depend on its slot alone.
#pragma once

#include "attention.h"
#include "float8.cuh"

#include <algorithm>

namespace sparse_rl {

constexpr int kAttendThreads = 128, kWideAttendThreads = 64, kCombineThreads = 128;
constexpr int kTile = 16;  // entries of a tile

// The entries that the rows of a tile are.
template <bool kPaged>
struct TileEntries {
  int first, end;

  SPARSE_RL_DEVICE int index(int row) const { return first + row; }
  SPARSE_RL_DEVICE bool valid(int row) const { return first + row < end; }
};

template <>
struct TileEntries<true> {
  int own;  // of row lane % 16, -1 for none; looked up once, and all lanes of a warp must ask

  SPARSE_RL_DEVICE int index(int row) const { return __shfl_sync(kAll, own, row); }
  SPARSE_RL_DEVICE bool valid(int row) const { return index(row) >= 0; }
};

// The entries of one head to read: all, and those that its length does not count yet, or those of the listed pages.
template <bool kPaged>
struct KVEntries {
  int count;

  template <class T, class P>
  SPARSE_RL_DEVICE KVEntries(const Attention<T, P>& op, int64_t unit, int uncounted) {
    const auto heads = static_cast<unsigned>(op.heads.num_heads);
    span = find_slot_span(op.heads, unit / heads, unit % heads, op.max_length - uncounted, op.pool_rows);
    count = span.slot < 0 ? 0 : span.length + uncounted;
  }

  // The index of the j-th entry, -1 from `end` on.
  SPARSE_RL_DEVICE int at(int j, int end) const { return j < end ? j : -1; }
  SPARSE_RL_DEVICE TileEntries<false> tile(int first, int end) const { return {first, end}; }

  SlotSpan span;
};

template <>
struct KVEntries<true> {
  int count, page_size;
  const int32_t* pages;

  template <class T, class P>
  SPARSE_RL_DEVICE KVEntries(const Attention<T, P>& op, int64_t unit, int)
      : page_size(op.page_size), pages(op.pages + unit * op.width) {
    const int num_pages = count_pages(pages, op.width);
    const auto heads = static_cast<unsigned>(op.heads.num_heads);
    span = find_slot_span(op.heads, unit / heads, unit % heads, op.max_length, op.pool_rows);
    count = span.length > 0 ? num_pages * page_size : 0;
    if (threadIdx.x == 0 && count > 0 && int64_t{pages[num_pages - 1]} * page_size >= span.length) {
      complain(op.heads.report, Fault::pages, span.slot);
    }
  }

  // The first negative page ends a list. Every lane looks at another place: few rounds of loads, not one per halving.
  SPARSE_RL_DEVICE static int count_pages(const int32_t* pages, int width) {
    int low = 0, high = width;  // the list ends between them
    while (low < high) {
      const int step = (high - low + 31) / 32, place = low + static_cast<int>(threadIdx.x % 32) * step;
      const int found = __popc(__ballot_sync(kAll, place < high && pages[place] >= 0));
      const int beyond = low + found * step;
      low = found ? beyond - step + 1 : low;
      high = found ? std::min(high, beyond) : low;
    }
    return low;
  }

  SPARSE_RL_DEVICE int at(int j, int end) const {
    if (j >= end) return -1;
    const int64_t entry = int64_t{pages[j / page_size]} * page_size + j % page_size;
    return entry < span.length ? static_cast<int>(entry) : -1;  // the last page may be incomplete
  }
  SPARSE_RL_DEVICE TileEntries<true> tile(int first, int end) const {
    return {at(first + static_cast<int>(threadIdx.x % kTile), end)};
  }

  SlotSpan span;
};

// What block (x, y) of the grid does: up to `kHeads` query heads of KV head x, over one split of its entries. Splits
// are equal but for whole tiles.
template <bool kPaged, int kHeads>
struct BlockWork {
  KVEntries<kPaged> entries;
  int64_t first_head;  // among the query heads (B, Hq)
  int num_heads, split, num_splits, begin, end;

  template <class T, class P>
  SPARSE_RL_DEVICE BlockWork(const Attention<T, P>& op, int uncounted) : entries(op, blockIdx.x, uncounted) {
    const auto passes = static_cast<unsigned>((op.group + kHeads - 1) / kHeads);
    const int64_t skipped = blockIdx.y % passes * kHeads;
    first_head = blockIdx.x * op.group + skipped;
    num_heads = static_cast<int>(op.group - skipped < kHeads ? op.group - skipped : kHeads);
    split = static_cast<int>(blockIdx.y / passes);
    num_splits = static_cast<int>(count_splits(entries.count));
    const int size = (entries.count + num_splits * kTile - 1) / (num_splits * kTile) * kTile;
    begin = split * size;
    end = std::min(begin + size, entries.count);
  }
};

// Running softmax of one query head: the largest logit so far and the sum of exp(logit - max).
struct SoftmaxState {
  float max, sum;

  // Turn logits into exp(logit - largest so far); returns the factor of earlier sums. `over_lanes` is the maximum over
  // the lanes that hold logits of the same head.
  template <int kCount, class OverLanes>
  SPARSE_RL_DEVICE float update(float (&logits)[kCount], OverLanes over_lanes) {
    float top = logits[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) top = fmaxf(top, logits[i]);
    top = fmaxf(max, over_lanes(top));
    const float base = top == kNegInf ? 0.0f : top, factor = rescale(max, top);
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += logits[i] = expf(logits[i] - base);
    max = top;
    return factor;
  }
};

// Write the result of one query head, by a warp. `sum_at(d)` is the sum of element d of the values, weighted by
// exp(logit - max); all lanes ask for it.
template <class T, class P, class SumAt>
SPARSE_RL_DEVICE void write_head(
    const Attention<T, P>& op, int64_t head, int num_entries, SoftmaxState state, SumAt sum_at) {
  const int lane = threadIdx.x % 32, dim = static_cast<int>(op.dim);
  const float scale = state.sum > 0 ? 1 / state.sum : state.sum;  // zeros where there is nothing to read
  for (int d = lane; d - lane < dim; d += 32) {
    const float sum = sum_at(d);
    if (d < dim) op.out[head * dim + d] = narrow<T>(sum * scale);
  }
  const float lse = state.max == kNegInf ? kNegInf : state.max + logf(state.sum);
  if (op.lse && lane == 0) op.lse[head] = lse;
  if (!op.probs) return;
  float* row = op.probs + head * op.num_probs;  // holds the logits
  for (int64_t j = lane; j < op.num_probs; j += 32) {
    row[j] = j < num_entries && lse != kNegInf ? expf(row[j] - lse) : 0.0f;
  }
}

// The partial result of a split for one query head: the sum of its values, the largest logit, the sum of exponentials.
template <class T, class P>
SPARSE_RL_DEVICE float* partial_of(const Attention<T, P>& op, int64_t head, int split) {
  return op.partials + (head * op.max_splits + split) * (op.dim + 2);
}

// What the parts of a block (warps, or groups of their lanes) have summed up for each head, in shared memory.
template <int kParts, int kHeads, int kHeadDim>
struct alignas(16) BlockMerge {
  SoftmaxState states[kParts][kHeads];
  float sums[kParts][kHeads][kHeadDim + 4];  // 4 keep 16-byte alignment and put heads into different banks

  // All parts have been stored and a barrier has followed. The warps take heads in turn.
  template <class T, class P, bool kPaged>
  SPARSE_RL_DEVICE void write(const Attention<T, P>& op, const BlockWork<kPaged, kHeads>& work) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = static_cast<int>(op.dim);
    for (int h = warp; h < work.num_heads; h += blockDim.x / 32) {
      SoftmaxState all{kNegInf, 0};
#pragma unroll
      for (int p = 0; p < kParts; ++p) all.max = fmaxf(all.max, states[p][h].max);
      float factors[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        factors[p] = rescale(states[p][h].max, all.max);
        all.sum += states[p][h].sum * factors[p];
      }
      const auto sum_at = [&](int d) {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kParts; ++p) sum += factors[p] * sums[p][h][d];
        return sum;
      };
      if (work.num_splits == 1) {
        write_head(op, work.first_head + h, work.entries.count, all, sum_at);
        continue;
      }
      float* partial = partial_of(op, work.first_head + h, work.split);
      for (int d = lane; d < dim; d += 32) partial[d] = sum_at(d);
      if (lane == 0) partial[dim] = all.max, partial[dim + 1] = all.sum;
    }
  }
};

// The sum over the splits, in their order. A block per (row, KV head), whose warps take query heads in turn; a head of
// one split is finished already.
template <bool kPaged, class T, class P>
SPARSE_RL_DEVICE void combine_splits(const Attention<T, P>& op, int uncounted) {
  const KVEntries<kPaged> entries(op, blockIdx.x, uncounted);
  const int splits = static_cast<int>(count_splits(entries.count)), dim = static_cast<int>(op.dim);
  if (splits == 1) return;
  const int lane = threadIdx.x % 32;
  for (int h = threadIdx.x / 32; h < op.group; h += kCombineThreads / 32) {
    const int64_t head = blockIdx.x * op.group + h;
    SoftmaxState all{kNegInf, 0};
    for (int s = lane; s < splits; s += 32) all.max = fmaxf(all.max, partial_of(op, head, s)[dim]);
    all.max = warp_max(all.max);
    for (int s = lane; s < splits; s += 32) {
      const float* partial = partial_of(op, head, s) + dim;
      all.sum += partial[1] * rescale(partial[0], all.max);
    }
    all.sum = warp_sum(all.sum);
    write_head(op, head, entries.count, all, [&](int d) {
      float sum = 0;
      for (int first = 0; first < splits; first += 32) {
        const bool valid = first + lane < splits;  // every lane has the factor of another split
        const float own = valid ? rescale(partial_of(op, head, first + lane)[dim], all.max) : 0.0f;
        for (int s = first; s < std::min(first + 32, splits); ++s) {
          const float factor = __shfl_sync(kAll, own, s - first);
          sum += d < dim ? factor * partial_of(op, head, s)[d] : 0.0f;
        }
      }
      return sum;
    });
  }
}

template <class T, class P, bool kPaged>
__global__ void __launch_bounds__(kCombineThreads, 8) combine_splits_kernel(Attention<T, P> op) {
  await_previous();
  combine_splits<kPaged>(op, 0);
}

// A row's 16 bytes at `column`, zeros if they are not valid.
template <class T>
SPARSE_RL_DEVICE uint4 load_if(bool valid, const T* row, int column) {
  return valid ? load16(row + column) : make_uint4(0, 0, 0, 0);
}

}  // namespace sparse_rl
