// decode_attention and page_attention on plain FMAs and 16-byte loads, for float32 and for large heads.
#pragma once

#include "attention.cuh"

namespace sparse_rl {

// `kLanes` lanes read a row of K or V together, each of them `kWords` words of 16 bytes of T (as many elements of P);
// the groups of lanes take four entries at a time.
template <class T, class P, int kLanes, int kWords, int kHeads>
struct LaneGroup {
  static constexpr int kGroups = 32 / kLanes, kEntries = 4, kElements = kWords * kWidth<T>;
  float query[kHeads][kElements], sums[kHeads][kElements];
  SoftmaxState states[kHeads];

  // The column of this lane's element i.
  SPARSE_RL_DEVICE static int column(int i) {
    return (i / kWidth<T> * kLanes + static_cast<int>(threadIdx.x % kLanes)) * kWidth<T> + i % kWidth<T>;
  }

  // This lane's elements of a row, zeros if it is not valid.
  template <class Stored>
  SPARSE_RL_DEVICE static void load(bool valid, const Stored* row, int dim, float (&x)[kElements]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int first = column(word * kWidth<T>);
      float part[kWidth<T>] = {};
      if constexpr (std::is_same_v<Stored, T>) {
        unpack<T>(load_if(valid && first < dim, row, first), part);
      } else if (valid && first < dim) {
        load_floats<kWidth<T>>(row + first, part);
      }
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) x[word * kWidth<T> + i] = part[i];
    }
  }

  SPARSE_RL_DEVICE void begin(const T* rows, int num_heads, int dim) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      states[h] = {kNegInf, 0};
      load(h < num_heads, rows + static_cast<int64_t>(h) * dim, dim, query[h]);
#pragma unroll
      for (int i = 0; i < kElements; ++i) sums[h][i] = 0;
    }
  }

  // `entry` returns the index of the k-th of the four, -1 for none.
  template <class Entry>
  SPARSE_RL_DEVICE void compute_qk(const P* keys, Entry entry, int dim, float (&logits)[kHeads][kEntries]) const {
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      float key[kElements];
      load(entry(k) >= 0, keys + static_cast<int64_t>(entry(k)) * dim, dim, key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum += query[h][i] * key[i];
        logits[h][k] = warp_sum<kLanes>(sum);
      }
    }
  }

  template <class Entry>
  SPARSE_RL_DEVICE void accumulate_pv(
      const P* values, Entry entry, int dim, const float (&weights)[kHeads][kEntries], const float (&factors)[kHeads]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) sums[h][i] *= factors[h];
    }
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      float value[kElements];
      load(entry(k) >= 0, values + static_cast<int64_t>(entry(k)) * dim, dim, value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sums[h][i] += weights[h][k] * value[i];
      }
    }
  }

  template <class Merge>
  SPARSE_RL_DEVICE void store(Merge& merge, int part) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (threadIdx.x % kLanes == 0) merge.states[part][h] = states[h];
#pragma unroll
      for (int i = 0; i < kElements; ++i) merge.sums[part][h][column(i)] = sums[h][i];
    }
  }
};

template <class T, class P, int kLanes, int kWords, int kHeads, bool kPaged>
__global__ void __launch_bounds__(kAttendThreads, 2) attend_plain(Attention<T, P> op) {
  await_previous();
  using Group = LaneGroup<T, P, kLanes, kWords, kHeads>;
  constexpr int kGroups = Group::kGroups, kEntries = Group::kEntries, kParts = kAttendThreads / kLanes;
  __shared__ BlockMerge<kParts, kHeads, kLanes * Group::kElements> merge;
  const BlockWork<kPaged, kHeads> work(op, 0);
  if (work.split >= work.num_splits) return;
  const int64_t first_row = work.entries.span.start * op.dim;
  const P *keys = op.key_pool + first_row, *values = op.value_pool + first_row;
  const int part = threadIdx.x / kLanes, dim = static_cast<int>(op.dim);
  Group own;
  own.begin(op.query + work.first_head * op.dim, work.num_heads, dim);
  // the loop is the same for all lanes of a warp, which shuffle; entry k of a group is start + k * kGroups
  const int warp_start = work.begin + part / kGroups * kGroups * kEntries;
  for (int base = warp_start; base < work.end; base += kParts * kEntries) {
    const int start = base + part % kGroups;
    int entries[kEntries];
#pragma unroll
    for (int k = 0; k < kEntries; ++k) entries[k] = kPaged ? work.entries.at(start + k * kGroups, work.end) : 0;
    const auto entry = [&](int k) {  // looked up once; without a list recomputing is cheaper than storing
      return kPaged ? entries[k] : work.entries.at(start + k * kGroups, work.end);
    };
    float logits[kHeads][kEntries], factors[kHeads];
    own.compute_qk(keys, entry, dim, logits);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int k = 0; k < kEntries; ++k) {
        const bool valid = entry(k) >= 0;
        logits[h][k] = valid ? logits[h][k] * op.scale : kNegInf;
        if (op.probs && valid && h < work.num_heads && threadIdx.x % kLanes == 0) {
          op.probs[(work.first_head + h) * op.num_probs + start + k * kGroups] = logits[h][k];
        }
      }
      factors[h] = own.states[h].update(logits[h], [](float x) { return x; });
    }
    own.accumulate_pv(values, entry, dim, logits, factors);
  }
  own.store(merge, part);
  __syncthreads();
  merge.write(op, work);
}

}  // namespace sparse_rl
