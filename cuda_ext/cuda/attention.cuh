// Shared by the kernels of decode_attention and page_attention: the entries to read, the online softmax, and the
// merging of a block's parts.
#pragma once

#include "attention.h"
#include "float8.cuh"

namespace sparse_rl {

constexpr int kHeads = 8;  // query heads per pass over the entries

// The entries of one head to read: all, or those of the listed pages. Both return the index of the j-th of them, -1
// for none; from `count` on there are none.
template <bool Paged>
struct Reading {
  int count;

  template <class T, class P>
  SPARSE_RL_DEVICE static Reading of(const Attention<T, P>&, const SlotSpan& span, int64_t) {
    return {span.length};
  }

  SPARSE_RL_DEVICE int at(int j) const { return j < count ? j : -1; }
};

template <>
struct Reading<true> {
  int count, length, page_size;
  const int32_t* pages;

  // The first negative page ends a list.
  template <class T, class P>
  SPARSE_RL_DEVICE static Reading of(const Attention<T, P>& op, const SlotSpan& span, int64_t unit) {
    const int32_t* pages = op.pages + unit * op.width;
    int low = 0, high = span.length > 0 ? op.width : 0;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (pages[middle] >= 0) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (threadIdx.x == 0 && low > 0 && int64_t{pages[low - 1]} * op.page_size >= span.length) {
      complain(op.heads.report, Fault::pages, span.slot);
    }
    return {low * op.page_size, span.length, op.page_size, pages};
  }

  SPARSE_RL_DEVICE int at(int j) const {
    if (j >= count) return -1;
    const int64_t entry = int64_t{pages[j / page_size]} * page_size + j % page_size;
    return entry < length ? static_cast<int>(entry) : -1;  // the last page may be incomplete
  }
};

// Running softmax of one query head: the largest logit so far and the sum of exp(logit - largest).
struct Softmax {
  float largest, sum;

  // Turn logits into exp(logit - largest so far); returns the factor of earlier sums.
  template <int Count, class Spread>
  SPARSE_RL_DEVICE float add(float (&logits)[Count], Spread spread) {
    float top = logits[0];
#pragma unroll
    for (int i = 1; i < Count; ++i) top = fmaxf(top, logits[i]);
    top = fmaxf(largest, spread(top));
    const float base = top == kNegInf ? 0.0f : top, factor = rescale(largest, top);
    sum *= factor;
#pragma unroll
    for (int i = 0; i < Count; ++i) sum += logits[i] = expf(logits[i] - base);
    largest = top;
    return factor;
  }
};

// State of a block's parts (warps, or halves of warps) for each head, and the sums that they add up in turn.
template <int Parts, int Width>
struct Merge {
  Softmax softmax[Parts][kHeads];
  float sums[kHeads][Width];

  // The largest logit and the sum of exponentials of a head over all parts.
  SPARSE_RL_DEVICE Softmax total(int head) const {
    Softmax all{kNegInf, 0};
    for (int p = 0; p < Parts; ++p) all.largest = fmaxf(all.largest, softmax[p][head].largest);
    for (int p = 0; p < Parts; ++p) all.sum += softmax[p][head].sum * rescale(softmax[p][head].largest, all.largest);
    return all;
  }

  // Results of up to eight heads, once the sums are complete.
  template <class T, class P>
  SPARSE_RL_DEVICE void finish(const Attention<T, P>& op, int64_t first, int count, int length) const {
    const int dim = static_cast<int>(op.dim);
    for (int i = threadIdx.x; i < count * dim; i += kThreads) {
      const int head = i / dim, d = i % dim;
      const float sum = total(head).sum;
      op.out[(first + head) * op.dim + d] = narrow<T>(sums[head][d] * (sum > 0 ? 1 / sum : sum));
    }
    for (int head = threadIdx.x; op.lse && head < count; head += kThreads) op.lse[first + head] = log_sum(head);
    if (!op.probs) return;
    for (int head = 0; head < count; ++head) {
      float* row = op.probs + (first + head) * op.num_probs;
      const float log = log_sum(head);
      for (int64_t j = threadIdx.x; j < op.num_probs; j += kThreads) {
        row[j] = j < length && log != kNegInf ? expf(row[j] - log) : 0.0f;
      }
    }
  }

  SPARSE_RL_DEVICE float log_sum(int head) const {
    const Softmax all = total(head);
    return all.largest == kNegInf ? kNegInf : all.largest + logf(all.sum);
  }
};

// A row's 16 bytes at element `at`, zeros beyond the end.
template <class T>
SPARSE_RL_DEVICE uint4 load_if(bool valid, const T* row, int at) {
  return valid ? load16(row + at) : make_uint4(0, 0, 0, 0);
}

}  // namespace sparse_rl
