// decode_attention and page_attention on plain FMAs and 16-byte loads, for float32 and for large heads.
#pragma once

#include "attention.cuh"

namespace sparse_rl {

// `Lanes` lanes read a row of K or V together, each of them `Parts` words of 16 bytes of T (as many elements of P); the
// groups of lanes take four entries at a time.
template <class T, class P, int Lanes, int Parts, int Heads_>
struct Strip {
  static constexpr int Width = kWidth<T>, Groups = 32 / Lanes, Keys = 4;
  float query[Heads_][Parts][Width], sums[Heads_][Parts][Width];
  Softmax softmax[Heads_];

  SPARSE_RL_DEVICE static int place(int part) { return (part * Lanes + static_cast<int>(threadIdx.x % Lanes)) * Width; }

  SPARSE_RL_DEVICE static void load(bool valid, const P* row, int at, float (&x)[Width]) {
    if constexpr (std::is_same_v<P, T>) {
      unpack<T>(load_if(valid, row, at), x);
    } else if (valid) {
      load_floats<Width>(row + at, x);
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) x[i] = 0;
    }
  }

  SPARSE_RL_DEVICE void begin(const T* rows, int count, int dim) {
#pragma unroll
    for (int r = 0; r < Heads_; ++r) {
      softmax[r] = {kNegInf, 0};
#pragma unroll
      for (int p = 0; p < Parts; ++p) {
        unpack<T>(load_if(r < count && place(p) < dim, rows + static_cast<int64_t>(r) * dim, place(p)), query[r][p]);
#pragma unroll
        for (int i = 0; i < Width; ++i) sums[r][p][i] = 0;
      }
    }
  }

  // `entry` returns the index of the k-th of the four, -1 for none.
  template <class Entry>
  SPARSE_RL_DEVICE void dots(const P* keys, Entry entry, int dim, float (&logits)[Heads_][Keys]) const {
#pragma unroll
    for (int k = 0; k < Keys; ++k) {
      float key[Parts][Width];
#pragma unroll
      for (int p = 0; p < Parts; ++p) {
        const bool valid = entry(k) >= 0 && place(p) < dim;
        load(valid, keys + static_cast<int64_t>(entry(k)) * dim, place(p), key[p]);
      }
#pragma unroll
      for (int r = 0; r < Heads_; ++r) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Parts * Width; ++i) sum += query[r][i / Width][i % Width] * key[i / Width][i % Width];
        logits[r][k] = warp_sum<Lanes>(sum);
      }
    }
  }

  template <class Entry>
  SPARSE_RL_DEVICE void add_values(
      const P* values, Entry entry, int dim, const float (&shares)[Heads_][Keys],
      const float (&factors)[Heads_]) {
#pragma unroll
    for (int r = 0; r < Heads_; ++r) {
#pragma unroll
      for (int i = 0; i < Parts * Width; ++i) sums[r][i / Width][i % Width] *= factors[r];
    }
#pragma unroll
    for (int k = 0; k < Keys; ++k) {
#pragma unroll
      for (int p = 0; p < Parts; ++p) {
        float value[Width];
        const bool valid = entry(k) >= 0 && place(p) < dim;
        load(valid, values + static_cast<int64_t>(entry(k)) * dim, place(p), value);
#pragma unroll
        for (int r = 0; r < Heads_; ++r) {
#pragma unroll
          for (int i = 0; i < Width; ++i) sums[r][p][i] += shares[r][k] * value[i];
        }
      }
    }
  }
};

template <class T, class P, int Lanes, int Parts, int Heads_, bool Paged = false>
__global__ void __launch_bounds__(kThreads, 1) attend_plain(Attention<T, P> op) {
  using Rows = Strip<T, P, Lanes, Parts, Heads_>;
  constexpr int Groups = Rows::Groups, Keys = Rows::Keys, Width = Lanes * Parts * Rows::Width;
  __shared__ Merge<kWarps * Groups, Width> all;
  const auto heads = static_cast<unsigned>(op.heads.num_heads);
  const SlotSpan span = find_slot_span(op.heads, blockIdx.x / heads, blockIdx.x % heads, op.max_length, op.pool_rows);
  const P *keys = op.key_pool + span.start * op.dim, *values = op.value_pool + span.start * op.dim;
  const auto reading = Reading<Paged>::of(op, span, blockIdx.x);
  const int part = threadIdx.x / Lanes, dim = static_cast<int>(op.dim);
  for (int64_t g = 0; g < op.group; g += Heads_) {
    const int64_t first = blockIdx.x * op.group + g;
    const int count = static_cast<int>(op.group - g < Heads_ ? op.group - g : Heads_);
    for (int i = threadIdx.x; i < Heads_ * Width; i += kThreads) all.sums[i / Width][i % Width] = 0;
    Rows rows;
    rows.begin(op.query + first * op.dim, count, dim);
    // the loop is the same for all lanes of a warp, which shuffle; entry k of a group is start + k * Groups
    for (int base = part / Groups * Groups * Keys; base < reading.count; base += kWarps * Groups * Keys) {
      const int start = base + part % Groups;
      int entries[Keys];
#pragma unroll
      for (int k = 0; k < Keys; ++k) entries[k] = Paged ? reading.at(start + k * Groups) : 0;
      const auto entry = [&](int k) {  // looked up once; without a list recomputing is cheaper than storing
        return Paged ? entries[k] : reading.at(start + k * Groups);
      };
      float logits[Heads_][Keys], factors[Heads_];
      rows.dots(keys, entry, dim, logits);
#pragma unroll
      for (int r = 0; r < Heads_; ++r) {
#pragma unroll
        for (int k = 0; k < Keys; ++k) {
          const bool valid = entry(k) >= 0;
          logits[r][k] = valid ? logits[r][k] * op.scale : kNegInf;
          if (op.probs && valid && r < count && threadIdx.x % Lanes == 0) {
            op.probs[(first + r) * op.num_probs + start + k * Groups] = logits[r][k];
          }
        }
        factors[r] = rows.softmax[r].add(logits[r], [](float x) { return x; });
      }
      rows.add_values(values, entry, dim, logits, factors);
    }
    if (threadIdx.x % Lanes == 0) {
#pragma unroll
      for (int r = 0; r < Heads_; ++r) all.softmax[part][r] = rows.softmax[r];
    }
    for (int turn = 0; turn < kWarps * Groups; ++turn) {
      __syncthreads();
      if (turn != part) continue;
#pragma unroll
      for (int r = 0; r < Heads_; ++r) {
        const float factor = rescale(rows.softmax[r].largest, all.total(r).largest);
#pragma unroll
        for (int i = 0; i < Parts * Rows::Width; ++i) {
          const int p = i / Rows::Width, k = i % Rows::Width;
          all.sums[r][Rows::place(p) + k] += factor * rows.sums[r][p][k];
        }
      }
    }
    __syncthreads();
    all.finish(op, first, count, span.length);
    __syncthreads();
  }
}

}  // namespace sparse_rl
