// key_redundancy: R-KV's mean cosine to the other keys, without the last similar neighbor of every key.
//
// A block takes one (layer, row, KV head) after the other. All but the entries set to zero are linear in the keys: sum_i cos(i, j) =
// k_j . (sum_i k_i - k_j) for unit keys. Only the search for each row's last similar column is pairwise: it goes over
// tiles of 64 columns from the last one on; a row leaves the list of pending rows at its first hit, and the search ends
// with the list. The cosines taken from a column are summed in the order of the rows.

#include "key_redundancy.h"
#include "rows.cuh"
#include "tile.cuh"

namespace sparse_rl {
namespace {

constexpr int kTile = 64;
using Square = Product<kTile, kTile>;

// The last similar column of a row so far, and its cosine.
struct Hit {
  int column = -1;
  float cosine = 0;

  SPARSE_RL_DEVICE void take(int other, float value) {
    if (other > column) column = other, cosine = value;
  }
};

struct Search {
  Square square;
  int rows[kTile], hit_column[kTile];
  float hit_cosine[kTile];
  unsigned still_pending[kTile / 32];
};

template <class T>
struct Unit {
  const Redundancy<T>& op;
  const T* keys;
  int length;
  float *out, *norm;

  SPARSE_RL_DEVICE int* pending() const { return reinterpret_cast<int*>(norm + op.entries.num_entries); }

  SPARSE_RL_DEVICE const T* key(int j) const { return keys + static_cast<int64_t>(j) * op.entries.dim; }

  SPARSE_RL_DEVICE void inverse_norms() const {
    for (int j = threadIdx.x / 32; j < length; j += kWarps) {
      const float sum = square_sum(key(j), op.entries.dim);
      if (threadIdx.x % 32 == 0) norm[j] = 1 / (sqrtf(sum) + 1e-8f);
    }
    __syncthreads();
  }

  SPARSE_RL_DEVICE void linear_part(const float* total) const {
    for (int j = threadIdx.x / 32; j < length; j += kWarps) {
      float sum = 0;
      each_part(key(j), op.entries.dim, [&](int d, const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float unit = x[i] * norm[j];
          sum += unit * (total[d + i] - unit);
        }
      });
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) out[j] = sum, pending()[j] = j;
    }
    __syncthreads();
  }

  // Subtract from each column the cosines of the rows whose last similar column it is.
  SPARSE_RL_DEVICE void spare_last(Search& search) const {
    int left = length;  // pending rows, the same in all threads
    for (int start = (length - 1) / kTile * kTile; left > 0 && start >= 0; start -= kTile) {
      float spared = 0;  // of column start + thread
      int kept = 0;
      for (int base = 0; base < left; base += kTile) {
        if (threadIdx.x < kTile) {
          search.rows[threadIdx.x] = base + static_cast<int>(threadIdx.x) < left ? pending()[base + threadIdx.x] : -1;
        }
        __syncthreads();
        find_hits(search, start);
        __syncthreads();
        kept = settle(search, kept);
        for (int r = 0; threadIdx.x < kTile && r < kTile; ++r) {
          if (search.hit_column[r] == static_cast<int>(threadIdx.x)) spared += search.hit_cosine[r];
        }
        __syncthreads();
      }
      if (threadIdx.x < kTile && start + static_cast<int>(threadIdx.x) < length) out[start + threadIdx.x] -= spared;
      left = kept;
    }
    __syncthreads();
  }

  // The last similar column of each row in the tile of columns, relative to its start; -1 for none.
  SPARSE_RL_DEVICE void find_hits(Search& search, int start) const {
    float c[4][4];
    search.square.template compute<T, T>(
        op.entries.dim, [&](int r) -> const T* { return search.rows[r] >= 0 ? key(search.rows[r]) : nullptr; },
        [&](int j) -> const T* { return start + j < length ? key(start + j) : nullptr; }, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = Square::row() + i, own = search.rows[slot];
      Hit hit;
      float first = 0;  // cosine with the first column of the tile
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = Square::column() + j, at = start + column;
        const bool there = own >= 0 && at < length;
        const float cosine = !there || own == at ? 0.0f : c[i][j] * norm[own] * norm[at];  // the diagonal counts as 0
        if (there && cosine > op.threshold) hit.take(column, cosine);
        if (column == 0) first = cosine;
      }
#pragma unroll
      for (int step = 8; step > 0; step /= 2) {  // a row is spread over 16 lanes
        const int column = __shfl_xor_sync(kAll, hit.column, step);
        const float cosine = __shfl_xor_sync(kAll, hit.cosine, step);
        hit.take(column, cosine);
      }
      if (Square::column() != 0) continue;
      // as in the published code, a row without a similar column sets its first entry to zero
      if (own >= 0 && start == 0) hit.take(0, first);
      search.hit_column[slot] = hit.column;
      search.hit_cosine[slot] = hit.cosine;
    }
  }

  // Rows without a hit go on to the next tile of columns, in their order. Returns how many have so far.
  SPARSE_RL_DEVICE int settle(Search& search, int kept) const {
    const int r = threadIdx.x, lane = r % 32;
    bool stays = false;
    unsigned votes = 0;
    if (r < kTile) {  // whole warps
      stays = search.rows[r] >= 0 && search.hit_column[r] < 0;
      votes = __ballot_sync(kAll, stays);
      if (lane == 0) search.still_pending[r / 32] = votes;
    }
    __syncthreads();
    const int first = __popc(search.still_pending[0]);
    if (stays) pending()[kept + (r < 32 ? 0 : first) + __popc(votes & ((1u << lane) - 1))] = search.rows[r];
    return kept + first + __popc(search.still_pending[1]);
  }
};

// out = mix * importance - (1 - mix) * softmax(out)
template <class T>
SPARSE_RL_DEVICE void mix_with(const Redundancy<T>& op, const float* importance, float* out, int length, float* parts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float largest = kNegInf, sum = 0;
  for (int j = threadIdx.x; j < length; j += kThreads) largest = fmaxf(largest, out[j]);
  largest = warp_max(largest);
  if (lane == 0) parts[warp] = largest;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, parts[w]);
  __syncthreads();
  for (int j = threadIdx.x; j < length; j += kThreads) sum += out[j] = expf(out[j] - largest);
  sum = warp_sum(sum);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  float all = 0;
  for (int w = 0; w < kWarps; ++w) all += parts[w];
  for (int j = threadIdx.x; j < length; j += kThreads) out[j] = op.mix * importance[j] - (1 - op.mix) * (out[j] / all);
}

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 4) redundancy_kernel(Redundancy<T> op) {
  __shared__ union {
    Search search;
    float parts[kWarps][kMaxHeadDim];
  } shared;
  float* norm = op.scratch + static_cast<int64_t>(blockIdx.x) * 2 * op.entries.num_entries;
  for (unsigned u = blockIdx.x; u < static_cast<unsigned>(op.entries.count); u += gridDim.x) {
    const Span span = find_span(op.entries, u);
    float* out = op.out + static_cast<int64_t>(u) * op.entries.num_entries;
    const int length = span.length;
    for (int j = length + static_cast<int>(threadIdx.x); j < op.entries.num_entries; j += kThreads) out[j] = 0;
    if (length == 0) continue;  // the same in all threads
    const Unit<T> unit{op, op.keys + span.start * op.entries.dim, length, out, norm};
    unit.inverse_norms();
    sum_rows(unit.keys, unit.length, op.entries.dim, unit.norm, shared.parts);
    unit.linear_part(shared.parts[0]);
    unit.spare_last(shared.search);
    for (int j = threadIdx.x; j < length; j += kThreads) out[j] /= static_cast<float>(length);
    __syncthreads();  // what is shared has been read
    if (op.importance) mix_with(op, op.importance + (out - op.out), out, length, shared.parts[0]);
    __syncthreads();
  }
}

struct Kernel : Device {
  template <class T>
  static void run(const Redundancy<T>& op, const Tensor& on) {
    launch(redundancy_kernel<T>, op.entries.count > 0 ? op.at_a_time : 0, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("key_redundancy", TORCH_BOX(&key_redundancy<Kernel>)); }

}  // namespace sparse_rl
