// window_importance: attention of the most recent queries to the entries before the observation window, pooled.
//
// A block scores one (layer, row, KV head) after the other. Order of the operations: logits; maximum over the query heads of a group ("max");
// softmax over the keys; mean or sum over the queries; pooling; mean over the heads of the group ("mean").

#include "window_importance.h"
#include "tile.cuh"

namespace sparse_rl {
namespace {

constexpr int kRows = 16, kColumns = kThreads;
using Flat = Product<kRows, kColumns>;

// The work on one head.
template <class T, class P>
struct Unit {
  const Importance<T, P>& op;
  Span span;
  const P* keys;
  const int32_t* positions;
  float *rows, *total;  // scratch: logits (A, N), then the sum over the queries (N)
  int before, count;    // entries outside the window, entries in the softmax

  // rows[a][j] of the queries present: the largest logit of `heads_per_row` query heads from first_head on.
  SPARSE_RL_DEVICE void fill_logits(
      Flat& flat, float (&logits)[kRows][kColumns], int first_head, int heads_per_row) const {
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
          float* place = rows + static_cast<int64_t>((base + r) / heads_per_row) * op.entries.num_entries + j;
          const float logit = logits[r][threadIdx.x];
          *place = (base + r) % heads_per_row == 0 ? logit : fmaxf(*place, logit);
        }
      }
    }
    __syncthreads();
  }

  // The logit of query a, which is at position `at`, with entry j.
  SPARSE_RL_DEVICE float logit(int a, int64_t at, int j) const {
    return positions[j] <= at ? rows[static_cast<int64_t>(a) * op.entries.num_entries + j] : kNegInf;
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
  __shared__ Flat flat;
  __shared__ float logits[kRows][kColumns], largest[kWarps], share[kWarps];
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
      unit.fill_logits(flat, logits, g, op.group_max ? op.group : 1);
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
