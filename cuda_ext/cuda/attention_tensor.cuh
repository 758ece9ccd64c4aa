// decode_attention and page_attention on tensor cores, for 16-bit queries and head sizes up to 256; pools of their type or
// float8.
#pragma once

#include "attention.cuh"

#include <tensor_core.cuh>

namespace sparse_rl {

template <class T>
SPARSE_RL_DEVICE uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(narrow<T>(low).x) | static_cast<uint32_t>(narrow<T>(high).x) << 16;
}

// Eight neighboring elements as stored in memory, zeros beyond the end: float8 takes half the registers.
template <class P>
SPARSE_RL_DEVICE auto load_eight(bool valid, const P* row, int at) {
  if constexpr (std::is_same_v<P, Float8>) {
    return valid ? *reinterpret_cast<const uint2*>(row + at) : make_uint2(0, 0);
  } else {
    return load_if(valid, row, at);
  }
}

// The same as words of T.
template <class T>
SPARSE_RL_DEVICE uint4 words(uint4 v) {
  return v;
}
template <class T>
SPARSE_RL_DEVICE uint4 words(uint2 v) {
  float low[4], high[4];
  widen(v.x, low);
  widen(v.y, high);
  return make_uint4(
      pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]), pack<T>(high[2], high[3]));
}

// K and V do not go through shared memory. Products may take the elements of a head, and the entries, in any order as
// long as both factors agree, so every lane simply loads eight neighboring elements and uses them in the order of its
// registers.
// A warp takes 16 entries at a time:
// logits (8 heads, 16 entries) = Q (8 heads, D) K^T: lane 4r + q loads elements 32i + 8q.. of query r and of entry r;
// sums^T (D, 8 heads) += V^T (D, 16 entries) P^T: lane 4r + q loads elements 64i + 8r.. of entries 2q, 2q + 1 (+ 8) and
// pairs them up; the logits of exactly these entries are in this lane after the first product.
template <class T, class P, int Chunks>
struct Tile {
  using Eight = decltype(load_eight<P>(true, nullptr, 0));
  uint4 query[2 * Chunks];
  float sums[Chunks][4][4];  // [64 elements][pair of elements][element * 2 + head]
  Softmax softmax;           // of query head r, the sum still spread over the lanes q

  SPARSE_RL_DEVICE void begin(const T* query_row, bool valid, int dim) {
    const int column = threadIdx.x % 4 * 8;
    softmax = {kNegInf, 0};
#pragma unroll
    for (int i = 0; i < 2 * Chunks; ++i) {
      query[i] = load_if(valid && 32 * i + column < dim, query_row, 32 * i + column);
    }
#pragma unroll
    for (int i = 0; i < 16 * Chunks; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0;
  }

  // logits[n * 2 + k]: query head r with entry 8n + 2q + k of the tile; `entry` returns its index, -1 for none.
  template <class Entry>
  SPARSE_RL_DEVICE void dots(const P* keys, Entry entry, int dim, float (&logits)[4]) const {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 8;
    Eight key[2][2 * Chunks];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = entry(8 * n + row);
#pragma unroll
      for (int i = 0; i < 2 * Chunks; ++i) {
        const bool valid = j >= 0 && 32 * i + column < dim;
        key[n][i] = load_eight(valid, keys + static_cast<int64_t>(j) * dim, 32 * i + column);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < 2 * Chunks; ++i) {
        const uint32_t first[4] = {query[i].x, 0, query[i].y, 0}, second[4] = {query[i].z, 0, query[i].w, 0};
        const uint4 word = words<T>(key[n][i]);
        multiply<T>(c, first, word.x, word.y);
        multiply<T>(c, second, word.z, word.w);
      }
      logits[2 * n] = c[0], logits[2 * n + 1] = c[1];
    }
  }

  // entries[k]: index of entry 2q + k % 2 + k / 2 * 8 of the tile, -1 for none.
  SPARSE_RL_DEVICE void add_values(
      const P* values, const int (&entries)[4], int dim, const float (&shares)[4], float factor) {
    const int lane = threadIdx.x % 32, row = lane / 4 * 8, head = lane % 4 * 2;
    const float factors[2] = {__shfl_sync(kAll, factor, head * 4), __shfl_sync(kAll, factor, head * 4 + 4)};
    const uint32_t b0 = pack<T>(shares[0], shares[1]), b1 = pack<T>(shares[2], shares[3]);
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      uint4 value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = entries[k];
        const bool valid = j >= 0 && 64 * i + row < dim;
        value[k] = words<T>(load_eight(valid, values + static_cast<int64_t>(j) * dim, 64 * i + row));
      }
      add_pair(sums[i][0], value[0].x, value[1].x, value[2].x, value[3].x, b0, b1, factors);
      add_pair(sums[i][1], value[0].y, value[1].y, value[2].y, value[3].y, b0, b1, factors);
      add_pair(sums[i][2], value[0].z, value[1].z, value[2].z, value[3].z, b0, b1, factors);
      add_pair(sums[i][3], value[0].w, value[1].w, value[2].w, value[3].w, b0, b1, factors);
    }
  }

  // Two elements of four entries: the low and the high halves of the words.
  SPARSE_RL_DEVICE static void add_pair(
      float (&c)[4], uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3, uint32_t b0, uint32_t b1,
      const float (&factors)[2]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) c[k] *= factors[k % 2];
    const uint32_t a[4] = {
        __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
        __byte_perm(v2, v3, 0x7632)};
    multiply<T>(c, a, b0, b1);
  }

  // Add to the block's sums, which are relative to the largest logit of all warps.
  template <int Width>
  SPARSE_RL_DEVICE void merge(Merge<kWarps, Width>& all, int warp) const {
    const int lane = threadIdx.x % 32, head = lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float factor = rescale(all.softmax[warp][head + k].largest, all.total(head + k).largest);
#pragma unroll
      for (int i = 0; i < 8 * Chunks; ++i) {
        const int d = 64 * (i / 8) + lane / 4 * 8 + i % 8;
        all.sums[head + k][d] += factor * sums[i / 8][i % 8 / 2][i % 2 * 2 + k];
      }
    }
  }
};

template <class T, class P, int Chunks, bool Paged = false>
__global__ void __launch_bounds__(kThreads, Chunks == 1 ? 3 : Chunks == 2 ? 2 : 1) attend_tensor(Attention<T, P> op) {
  constexpr int Width = 64 * Chunks;
  __shared__ Merge<kWarps, Width> all;
  const auto heads = static_cast<unsigned>(op.heads.num_heads);
  const SlotSpan span = find_slot_span(op.heads, blockIdx.x / heads, blockIdx.x % heads, op.max_length, op.pool_rows);
  const P *keys = op.key_pool + span.start * op.dim, *values = op.value_pool + span.start * op.dim;
  const auto reading = Reading<Paged>::of(op, span, blockIdx.x);
  const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, entry = threadIdx.x % 4 * 2;
  const int dim = static_cast<int>(op.dim);
  for (int64_t g = 0; g < op.group; g += kHeads) {
    const int64_t first = blockIdx.x * op.group + g;
    const int count = static_cast<int>(op.group - g < kHeads ? op.group - g : kHeads);
    for (int i = threadIdx.x; i < kHeads * Width; i += kThreads) all.sums[i / Width][i % Width] = 0;
    Tile<T, P, Chunks> tile;
    tile.begin(op.query + (first + row) * op.dim, row < count, dim);
    for (int start = 16 * warp; start < reading.count; start += 16 * kWarps) {
      float logits[4];
      int entries[4];
      tile.dots(keys, [&](int j) { return reading.at(start + j); }, dim, logits);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = entry + i % 2 + i / 2 * 8;
        entries[i] = reading.at(start + j);
        logits[i] = entries[i] >= 0 ? logits[i] * op.scale : kNegInf;
        if (op.probs && entries[i] >= 0 && row < count) op.probs[(first + row) * op.num_probs + start + j] = logits[i];
      }
      const float factor = tile.softmax.add(logits, [](float x) { return warp_max<4>(x); });
      tile.add_values(values, entries, dim, logits, factor);
    }
    tile.softmax.sum = warp_sum<4>(tile.softmax.sum);
    if (threadIdx.x % 4 == 0) all.softmax[warp][row] = tile.softmax;
    for (int turn = 0; turn < kWarps; ++turn) {
      __syncthreads();
      if (turn == warp) tile.merge(all, warp);
    }
    __syncthreads();
    all.finish(op, first, count, span.length);
    __syncthreads();
  }
}

}  // namespace sparse_rl
