// decode_attention and page_attention on tensor cores, for 16-bit queries and head sizes up to 256; pools of their type
// or float8.
//
// A warp takes 16 entries at a time and is alone with them until the end: three tiles of keys or values in shared
// memory are its ring, and while it works on one of them, copies of the next two are on their way. No barrier of the
// block is in its loop.
#pragma once

#include "attention.cuh"

#include <async_copy.cuh>
#include <tensor_core.cuh>

namespace sparse_rl {

constexpr int kHeadsPerBlock = 8;  // query heads of a product
constexpr int kStages = 3;         // tiles of a ring

// A warp's tiles of keys and values in shared memory. With kPadded a row has fewer elements than there is room for.
template <class P, int kHeadDim, bool kPadded>
struct Ring {
  static constexpr int kRowWords = kHeadDim / kWidth<P>;  // of 16 bytes
  uint4 words[kStages][kTile][kRowWords];

  // Where a word of a row is: the same word of eight neighboring rows, which ldmatrix reads at a time, is in eight
  // different groups of banks.
  SPARSE_RL_DEVICE static int swizzle(int row, int word) {
    constexpr int kSpread = kRowWords < 8 ? kRowWords : 8;
    return word ^ row / (8 / kSpread) % kSpread;
  }

  SPARSE_RL_DEVICE const uint4* at(int stage, int row, int word) const {
    return &words[stage][row][swizzle(row, word)];
  }

  // Begin to copy a tile; zeros where there is no entry, and beyond the head size.
  template <class TileEntries>
  SPARSE_RL_DEVICE void load(int stage, const P* pool, const TileEntries& entries, int dim) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTile * kRowWords / 32; ++i) {
      const int row = (32 * i + lane) / kRowWords, word = (32 * i + lane) % kRowWords, column = word * kWidth<P>;
      const P* from = pool + static_cast<int64_t>(entries.index(row)) * dim + column;
      const bool valid = entries.valid(row) && (!kPadded || column < dim);
      cp_async_zfill(&words[stage][row][swizzle(row, word)], from, valid);
    }
  }
};

// The queries of a warp, and what it has summed up. Keys and values are the left factors, so that a product has 16
// entries, or 16 elements of the head, and the eight query heads:
// logits (16 entries, 8 heads) = K (16, D) Q^T: lane 4r + q gets entries r and r + 8, heads 2q and 2q + 1;
// sums (D, 8 heads) += V^T (D, 16 entries) P^T: the same lane gets two elements of the same heads.
// Float8 comes from shared memory as pairs of 8 bits. A product may take the elements of a head in any order, if both
// factors agree, so each pair stays where it arrives: `column` and `element` say which elements it has.
template <class T, class P, int kHeadDim>
struct WarpState {
  static constexpr bool kFloat8 = std::is_same_v<P, Float8>;
  uint32_t query[kHeadDim / 16][2];
  float sums[kHeadDim / 16][4];  // [16 elements][element / 8 * 2 + head]
  SoftmaxState states[2];        // of heads 2q and 2q + 1, the sum still spread over the lanes r

  // The first element of the pair that a lane has in half a product.
  SPARSE_RL_DEVICE static int column(int product, int half) {
    const int q = threadIdx.x % 4;
    return 16 * product + (kFloat8 ? 4 * q + 2 * half : 8 * half + 2 * q);
  }
  // The element that a lane's sums are of.
  SPARSE_RL_DEVICE static int element(int product, int half) {
    const int r = threadIdx.x % 32 / 4;
    return 16 * product + (kFloat8 ? 2 * r + half : 8 * half + r);
  }

  SPARSE_RL_DEVICE void begin(const T* query_row, bool valid, int dim) {
    states[0] = states[1] = {kNegInf, 0};
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const int from = column(i / 2, i % 2);
      query[i / 2][i % 2] = valid && from < dim ? *reinterpret_cast<const uint32_t*>(query_row + from) : 0;
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) sums[i / 4][i % 4] = 0;
  }

  // logits[e * 2 + h]: entry r + 8e of the tile with query head 2q + h.
  template <class Ring>
  SPARSE_RL_DEVICE void compute_qk(const Ring& ring, int stage, float (&logits)[4]) const {
    const int row = threadIdx.x % 16, word = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < Ring::kRowWords / 2; ++i) {
      uint32_t key[4];
      ldmatrix_x4<false>(key, ring.at(stage, row, 2 * i + word));
      if constexpr (kFloat8) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float x[4], y[4];
          widen(key[2 * k], x);
          widen(key[2 * k + 1], y);
          const uint32_t a[4] = {pack<T>(x[0], x[1]), pack<T>(y[0], y[1]), pack<T>(x[2], x[3]), pack<T>(y[2], y[3])};
          multiply<T>(logits, a, query[2 * i + k][0], query[2 * i + k][1]);
        }
      } else {
        multiply<T>(logits, key, query[i][0], query[i][1]);
      }
    }
  }

  // Turn logits into weights, relative to the largest logit so far.
  SPARSE_RL_DEVICE void update(float (&logits)[4]) {
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float own[2] = {logits[h], logits[2 + h]};
      factors[h] = states[h].update(own, [](float x) { return over_rows(x, fmaxf); });
      logits[h] = own[0], logits[2 + h] = own[1];
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) sums[i / 4][i % 4] *= factors[i % 2];
  }

  template <class Ring>
  SPARSE_RL_DEVICE void accumulate_pv(const Ring& ring, int stage, const float (&weights)[4]) {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, word = lane / 8 % 2;
    const uint32_t b0 = movmatrix_trans(pack<T>(weights[0], weights[1]));
    const uint32_t b1 = movmatrix_trans(pack<T>(weights[2], weights[3]));
#pragma unroll
    for (int i = 0; i < Ring::kRowWords / 2; ++i) {
      uint32_t value[4];
      ldmatrix_x4<true>(value, ring.at(stage, row, 2 * i + word));
      if constexpr (kFloat8) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float x[4], y[4];
          widen(value[k], x);
          widen(value[2 + k], y);
          const uint32_t a[4] = {pack<T>(x[0], x[2]), pack<T>(x[1], x[3]), pack<T>(y[0], y[2]), pack<T>(y[1], y[3])};
          multiply<T>(sums[2 * i + k], a, b0, b1);
        }
      } else {
        multiply<T>(sums[i], value, b0, b1);
      }
    }
  }

  template <class Merge>
  SPARSE_RL_DEVICE void store(Merge& merge, int warp) const {
    const int lane = threadIdx.x % 32, head = lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const SoftmaxState whole{states[h].max, over_rows(states[h].sum, [](float a, float b) { return a + b; })};
      if (lane < 4) merge.states[warp][head + h] = whole;
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      merge.sums[warp][head + i % 2][element(i / 4, i % 4 / 2)] = sums[i / 4][i % 4];
    }
  }

  // Over the lanes that have the same heads.
  template <class Combine>
  SPARSE_RL_DEVICE static float over_rows(float x, Combine combine) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = combine(x, __shfl_xor_sync(kAll, x, step));
    return x;
  }
};

// `prepare(work)` is called once it is known what a block does, before it reads queries and entries, of which
// `uncounted` are not in the head's length yet.
template <class T, class P, int kHeadDim, bool kPadded, bool kPaged, int kThisBlock, class Prepare>
SPARSE_RL_DEVICE void attend_with_tensor_cores(const Attention<T, P>& op, int uncounted, Prepare prepare) {
  constexpr int kBlockWarps = kThisBlock / 32, kStep = kTile * kBlockWarps;
  using WarpRing = Ring<P, kHeadDim, kPadded>;
  // the rings are no longer read when the merge begins
  __shared__ union {
    WarpRing rings[kBlockWarps];
    BlockMerge<kBlockWarps, kHeadsPerBlock, kHeadDim> merge;
  } shared;
  const BlockWork<kPaged, kHeadsPerBlock> work(op, uncounted);
  if (work.split >= work.num_splits) return;
  prepare(work);
  const int dim = kPadded ? static_cast<int>(op.dim) : kHeadDim;
  const P *keys = op.key_pool + work.entries.span.start * dim, *values = op.value_pool + work.entries.span.start * dim;
  const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, heads = threadIdx.x % 4 * 2;
  WarpRing& ring = shared.rings[warp];

  // Copies are one group per tile of keys or values, empty ones beyond the end.
  int start = work.begin + kTile * warp, keys_at = 0, values_at = 1, free_at = 2;
  auto entries = work.entries.tile(start, work.end), next = work.entries.tile(start + kStep, work.end);
  if (start < work.end) ring.load(keys_at, keys, entries, dim);
  cp_async_commit();
  if (start < work.end) ring.load(values_at, values, entries, dim);
  cp_async_commit();
  WarpState<T, P, kHeadDim> own;
  own.begin(op.query + (work.first_head + row) * dim, row < work.num_heads, dim);
#pragma unroll 1
  for (; start < work.end; start += kStep) {
    const bool more = start + kStep < work.end;
    const auto after = work.entries.tile(start + 2 * kStep, work.end);  // looked up early: pages are a load
    cp_async_wait<1>();
    __syncwarp();  // the keys are there, and nobody reads the values before them
    if (more) ring.load(free_at, keys, next, dim);
    cp_async_commit();
    float logits[4] = {};
    own.compute_qk(ring, keys_at, logits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = row + i / 2 * 8, head = heads + i % 2;
      const bool valid = entries.valid(j);
      logits[i] = valid ? logits[i] * op.scale : kNegInf;
      if (op.probs && valid && head < work.num_heads) {
        op.probs[(work.first_head + head) * op.num_probs + start + j] = logits[i];
      }
    }
    own.update(logits);
    cp_async_wait<1>();
    __syncwarp();  // the values are there, and nobody reads the keys
    if (more) ring.load(keys_at, values, next, dim);
    cp_async_commit();
    own.accumulate_pv(ring, values_at, logits);
    entries = next, next = after;
    const int last = values_at;
    values_at = keys_at, keys_at = free_at, free_at = last;
  }
  __syncthreads();  // nobody reads a ring
  own.store(shared.merge, warp);
  __syncthreads();
  shared.merge.write(op, work);
}

// Blocks on a multiprocessor, so that registers do not hold fewer than the shared memory of sm_90 does.
template <class T, class P, int kHeadDim, bool kPadded, bool kPaged>
__global__ void __launch_bounds__(kAttendThreads, kHeadDim == 64 ? 6 : 4) attend_tensor(Attention<T, P> op) {
  await_previous();
  attend_with_tensor_cores<T, P, kHeadDim, kPadded, kPaged, kAttendThreads>(op, 0, [](const auto&) {});
}

// Heads so large that the rings of two warps are as much as others' of four.
template <class T, class P, bool kPaged>
__global__ void __launch_bounds__(kWideAttendThreads, 4) attend_wide(Attention<T, P> op) {
  await_previous();
  attend_with_tensor_cores<T, P, 256, true, kPaged, kWideAttendThreads>(op, 0, [](const auto&) {});
}

}  // namespace sparse_rl
