// window_importance: attention of the most recent queries to the entries before the observation window, pooled.
//
// A block scores one (layer, row, KV head) after the other. Order of the operations: logits; maximum over the query
// heads of a group ("max"); softmax over the keys; mean or sum over the queries; pooling; mean over the heads of the
// group ("mean"). Logits of 16-bit queries are products of tensor cores, which are exact and summed up in float32.

#include "window_importance.h"
#include "tile.cuh"

#include <tensor_core.cuh>

namespace sparse_rl {
namespace {

constexpr int kRows = 16, kColumns = kThreads;
constexpr int kHeadsAtOnce = 8;  // query heads whose products a warp has at the same time
using Flat = Product<kRows, kColumns>;

// What float32 queries need of shared memory.
struct Tiles {
  Flat flat;
  float logits[kRows][kColumns];
};

// Eight neighboring elements of a row as words of two numbers of T.
template <class T, class P>
SPARSE_RL_DEVICE void load_words(const P* from, bool valid, uint32_t (&words)[4]) {
  words[0] = words[1] = words[2] = words[3] = 0;
  if (!valid) return;
  if constexpr (std::is_same_v<P, T>) {
    const uint4 whole = load16(from);
    words[0] = whole.x, words[1] = whole.y, words[2] = whole.z, words[3] = whole.w;
  } else {
    float x[8];
    load8(from, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
}

// The work on one head.
template <class T, class P>
struct Unit {
  const Importance<T, P>& op;
  Span span;
  const P* keys;
  const int32_t* positions;
  float *rows, *total;  // scratch: logits (A, N), then the sum over the queries (N)
  int before, count;    // entries outside the window, entries in the softmax

  SPARSE_RL_DEVICE float* row(int a) const { return rows + static_cast<int64_t>(a) * op.entries.num_entries; }

  // row(a)[j] of the queries present: the largest logit of `heads_per_row` query heads from first_head on. A warp has 16
  // entries, and eight queries of every head. Its products take the elements of a head in any order, if both factors
  // agree: so a lane loads eight neighboring ones.
  SPARSE_RL_DEVICE void fill_logits_of_tensor_cores(int first_head, int heads_per_row) const {
    const int lane = threadIdx.x % 32, r = lane / 4, part = lane % 4 * 8, dim = static_cast<int>(op.entries.dim);
    for (int start = threadIdx.x / 32 * 16; start < count; start += 16 * kWarps) {
      const P* low = keys + static_cast<int64_t>(start + r) * dim;
      for (int first = 0; first < op.num_queries; first += 8) {
        float best[4] = {};
        for (int g = 0; g < heads_per_row; g += kHeadsAtOnce) {
          const T* query = op.query(span, first_head + g, first + r);
          float c[kHeadsAtOnce][4] = {};
          for (int d = 0; d < dim; d += 32) {
            const bool valid = d + part < dim;
            uint32_t x[4], y[4], q[4];
            load_words<T>(low + d + part, valid && start + r < count, x);
            load_words<T>(low + 8 * dim + d + part, valid && start + r + 8 < count, y);
            const uint32_t left[4] = {x[0], y[0], x[1], y[1]}, right[4] = {x[2], y[2], x[3], y[3]};
#pragma unroll
            for (int h = 0; h < kHeadsAtOnce; ++h) {
              if (g + h >= heads_per_row) break;  // the same in all lanes
              const T* from = query + static_cast<int64_t>(h) * op.num_queries * dim + d + part;
              load_words<T>(from, valid && first + r < op.num_queries, q);
              multiply<T>(c[h], left, q[0], q[1]);
              multiply<T>(c[h], right, q[2], q[3]);
            }
          }
#pragma unroll
          for (int i = 0; i < 4 * kHeadsAtOnce; ++i) {
            const float logit = c[i / 4][i % 4] * op.scale;
            if (g + i / 4 < heads_per_row) best[i % 4] = g + i / 4 == 0 ? logit : fmaxf(best[i % 4], logit);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = start + r + i / 2 * 8, a = first + lane % 4 * 2 + i % 2;
          if (j < count && a < op.num_queries) row(a)[j] = best[i];
        }
      }
    }
    __syncthreads();
  }

  // The same of any type.
  SPARSE_RL_DEVICE void fill_logits(Tiles& tiles, int first_head, int heads_per_row) const {
    auto& [flat, logits] = tiles;
    const int num_rows = op.num_queries * heads_per_row, dim = op.entries.dim;
    for (int start = 0; start < count; start += kColumns) {
      for (int base = 0; base < num_rows; base += kRows) {
        float c[4][4];
        flat.template compute<T, P>(
            dim,
            [&](int r) -> const T* {
              const int a = (base + r) / heads_per_row, g = (base + r) % heads_per_row;
              const bool valid = base + r < num_rows && op.position(span.slot, a) >= 0;
              return valid ? op.query(span, first_head + g, a) : nullptr;
            },
            [&](int j) { return start + j < count ? keys + static_cast<int64_t>(start + j) * dim : nullptr; }, c);
#pragma unroll
        for (int i = 0; i < 16; ++i) logits[Flat::row() + i / 4][Flat::column() + i % 4] = c[i / 4][i % 4] * op.scale;
        __syncthreads();
        const int j = start + static_cast<int>(threadIdx.x);  // from here on each thread has its own column
        for (int r = 0; r < kRows && base + r < num_rows && j < count; ++r) {
          float* place = row((base + r) / heads_per_row) + j;
          const float logit = logits[r][threadIdx.x];
          *place = (base + r) % heads_per_row == 0 ? logit : fmaxf(*place, logit);
        }
      }
    }
    __syncthreads();
  }

  // The logit of query a, which is at position `at`, with entry j.
  SPARSE_RL_DEVICE float logit(int a, int64_t at, int j) const {
    return positions[j] <= at ? row(a)[j] : kNegInf;
  }

  // total[j] = sum over the queries of their softmax; a query that sees nothing adds nothing.
  SPARSE_RL_DEVICE void add_softmax(float (&largest)[kWarps], float (&share)[kWarps]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int j = threadIdx.x; j < count; j += kThreads) total[j] = 0;
    for (int base = 0; base < op.num_queries; base += kWarps) {
      const int a = base + warp;
      const int64_t at = a < op.num_queries ? op.position(span.slot, a) : -1;
      float top = kNegInf, sum = 0;
      for (int j = lane; at >= 0 && j < count; j += 32) top = fmaxf(top, logit(a, at, j));
      top = warp_max(top);
      for (int j = lane; at >= 0 && j < count && top != kNegInf; j += 32) sum += expf(logit(a, at, j) - top);
      sum = warp_sum(sum);
      if (lane == 0) largest[warp] = top, share[warp] = top == kNegInf ? 0.0f : 1 / sum;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
        if (largest[w] == kNegInf) continue;
        const int64_t its = op.position(span.slot, base + w);
        for (int j = threadIdx.x; j < count; j += kThreads) {
          total[j] += expf(logit(base + w, its, j) - largest[w]) * share[w];
        }
      }
      __syncthreads();
    }
  }
};

template <class T, class P>
__global__ void __launch_bounds__(kThreads, 2) importance_kernel(Importance<T, P> op) {
  await_previous();
  __shared__ float largest[kWarps], share[kWarps];
  const int64_t num_entries = op.entries.num_entries;
  float* rows = op.scratch + static_cast<int64_t>(blockIdx.x) * (op.num_queries + 1) * num_entries;
  float* total = rows + op.num_queries * num_entries;
  for (int64_t u = blockIdx.x; u < op.entries.count; u += gridDim.x) {
    float* out = op.scores + u * num_entries;
    for (int j = threadIdx.x; j < num_entries; j += kThreads) out[j] = 0;
    const Span span = find_span(op.entries, u);
    const int length = span.length, before = length > op.window ? length - op.window : 0;
    if (length == 0) continue;  // the same in all threads
    const Unit<T, P> unit{
        op, span, op.keys + span.start * op.entries.dim, op.positions + span.start, rows, total, before,
        op.exclude_window ? before : length};
    int present = 0;
    for (int a = 0; a < op.num_queries; ++a) present += op.position(span.slot, a) >= 0;
    const float mean = op.query_mean && present > 0 ? 1 / static_cast<float>(present) : 1.0f;
    const int passes = op.group_max ? 1 : op.group;
    for (int g = 0; g < passes; ++g) {
      const int heads_per_row = op.group_max ? op.group : 1;
      if constexpr (sizeof(T) == 2) {
        unit.fill_logits_of_tensor_cores(g, heads_per_row);
      } else {
        __shared__ Tiles tiles;
        unit.fill_logits(tiles, g, heads_per_row);
      }
      unit.add_softmax(largest, share);
      for (int j = threadIdx.x; j < before; j += kThreads) total[j] *= mean;
      __syncthreads();
      for (int j = threadIdx.x; j < before; j += kThreads) {
        out[j] += op.pooling.at(total, before, j) / static_cast<float>(passes);
      }
      __syncthreads();
    }
  }
}

struct Kernel : Device {
  template <class T, class P>
  static void run(const Importance<T, P>& op, const Tensor& on) {
    check_aligned("query_ring", op.queries);
    launch(importance_kernel<T, P>, op.entries.count > 0 ? op.at_a_time : 0, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) {
  m.impl("window_importance", TORCH_BOX(&window_importance<Kernel>));
}

}  // namespace sparse_rl
