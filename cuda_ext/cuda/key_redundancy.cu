// key_redundancy: R-KV's mean cosine to the other keys, without the last similar neighbor of every key.
//
// A block takes one (layer, row, KV head) after the other. All but the entries set to zero are linear in the keys: sum_i cos(i, j) =
// k_j . (sum_i k_i - k_j) for unit keys. Only the search for each row's last similar column is pairwise: it goes over
// tiles of 64 columns from the last one on; a row leaves the list of pending rows at its first hit, and the search ends
// with the list. The cosines taken from a column are summed in the order of the rows.
//
// Fewer heads than a GPU has places for would leave most of it idle: then every 64 rows of a head are searched by a block
// of their own, and a third launch takes their cosines from the columns, in the same order, so with the same bits.

#include "key_redundancy.h"
#include "rows.cuh"
#include "tile.cuh"

namespace sparse_rl {
namespace {

constexpr int kTile = 64;
constexpr int kFew = 512;  // heads: four blocks on each of 128 multiprocessors
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

  // Where a few heads keep the last similar column of each row, and its cosine.
  SPARSE_RL_DEVICE int* column() const { return pending(); }
  SPARSE_RL_DEVICE float* cosine() const { return norm + 2 * op.entries.num_entries; }

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
  await_previous();
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

// ---------------------------------------------------------------- a few heads

// Head u, which has a block or several to itself; a length of 0 is one to skip.
template <class T>
SPARSE_RL_DEVICE Unit<T> unit_of(const Redundancy<T>& op, unsigned u) {
  const Span span = find_span(op.entries, u);
  const int64_t place = static_cast<int64_t>(u) * op.entries.num_entries;
  return {op, op.keys + span.start * op.entries.dim, span.length, op.out + place, op.scratch + 3 * place};
}

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 4) linear_kernel(Redundancy<T> op) {
  await_previous();
  __shared__ float parts[kWarps][kMaxHeadDim];
  const Unit<T> unit = unit_of(op, blockIdx.x);
  for (int j = unit.length + static_cast<int>(threadIdx.x); j < op.entries.num_entries; j += kThreads) unit.out[j] = 0;
  if (unit.length == 0) return;
  unit.inverse_norms();
  sum_rows(unit.keys, unit.length, op.entries.dim, unit.norm, parts);
  unit.linear_part(parts[0]);
}

// 64 rows of a head, until the last of them has its column.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 3) similar_rows_kernel(Redundancy<T> op) {
  await_previous();
  __shared__ Search search;
  const Unit<T> unit = unit_of(op, blockIdx.x);
  const int r = threadIdx.x, row = static_cast<int>(blockIdx.y) * kTile + r;
  if (row - r >= unit.length) return;
  if (r < kTile) search.rows[r] = row < unit.length ? row : -1;
  __syncthreads();
  for (int start = (unit.length - 1) / kTile * kTile; start >= 0; start -= kTile) {
    unit.find_hits(search, start);
    __syncthreads();
    bool waits = false;
    if (r < kTile && search.rows[r] >= 0) {
      const int hit = search.hit_column[r];
      waits = hit < 0;
      if (!waits) unit.column()[row] = start + hit, unit.cosine()[row] = search.hit_cosine[r], search.rows[r] = -1;
    }
    if (!__syncthreads_or(waits)) return;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) spare_kernel(Redundancy<T> op) {
  await_previous();
  __shared__ int columns[kThreads];
  __shared__ float cosines[kThreads], parts[kWarps];
  const Unit<T> unit = unit_of(op, blockIdx.x);
  if (unit.length == 0) return;
  for (int first = 0; first < unit.length; first += kThreads) {
    const int j = first + static_cast<int>(threadIdx.x);
    float spared = 0;
    for (int from = 0; from < unit.length; from += kThreads) {
      const int row = from + static_cast<int>(threadIdx.x);
      __syncthreads();  // the last rows have been read
      columns[threadIdx.x] = row < unit.length ? unit.column()[row] : -1;
      cosines[threadIdx.x] = row < unit.length ? unit.cosine()[row] : 0.0f;
      __syncthreads();
      for (int k = 0; k < kThreads; ++k) {
        if (columns[k] == j) spared += cosines[k];
      }
    }
    if (j < unit.length) unit.out[j] = (unit.out[j] - spared) / static_cast<float>(unit.length);
  }
  __syncthreads();
  if (op.importance) mix_with(op, op.importance + (unit.out - op.out), unit.out, unit.length, parts);
}

struct Kernel : Device {
  template <class T>
  static void run(const Redundancy<T>& op, const Tensor& on) {
    const int64_t count = op.entries.count;
    if (count > kFew || count > op.at_a_time) {
      return launch(redundancy_kernel<T>, op.at_a_time, 1, kThreads, on, op);
    }
    launch(linear_kernel<T>, count, 1, kThreads, on, op);
    launch(similar_rows_kernel<T>, count, (op.entries.num_entries + kTile - 1) / kTile, kThreads, on, op);
    launch(spare_kernel<T>, count, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("key_redundancy", TORCH_BOX(&key_redundancy<Kernel>)); }

}  // namespace sparse_rl
