// window_importance: attention of the most recent queries to the entries before the observation window, pooled.
//
// One block per (row, KV head). Order of the operations: logits; maximum over the query heads of a group ("max");
// softmax over the keys; mean or sum over the queries; pooling; mean over the heads of the group ("mean").

#include "window_importance.h"
#include "tile.cuh"

namespace sparse_rl {
namespace {

constexpr int kRows = 16, kColumns = kThreads;
using Flat = Product<kRows, kColumns>;

// The work of one block.
template <class T>
struct Unit {
  const Importance<T>& op;
  int64_t head;  // (slot, KV head)
  const T* keys;
  const int64_t* positions;
  const int64_t* at;  // positions of the queries
  float *rows, *total;  // scratch: logits (A, N), then the sum over the queries (N)
  int before, count;    // entries outside the window, entries in the softmax

  // rows[a][j] of the queries present: the largest logit of `heads_per_row` query heads from first_head on.
  SPARSE_RL_DEVICE void fill_logits(
      Flat& flat, float (&logits)[kRows][kColumns], int first_head, int heads_per_row) const {
    const int num_rows = op.num_queries * heads_per_row;
    const int64_t first = head * op.group + first_head;
    for (int start = 0; start < count; start += kColumns) {
      for (int base = 0; base < num_rows; base += kRows) {
        float c[4][4];
        flat.template compute<T>(
            op.dim,
            [&](int r) -> const T* {
              const int a = (base + r) / heads_per_row, g = (base + r) % heads_per_row;
              const bool there = base + r < num_rows && at[a] >= 0;
              return there ? op.queries + ((first + g) * op.num_queries + a) * op.dim : nullptr;
            },
            [&](int j) { return start + j < count ? keys + static_cast<int64_t>(start + j) * op.dim : nullptr; }, c);
#pragma unroll
        for (int i = 0; i < 16; ++i) logits[Flat::row() + i / 4][Flat::column() + i % 4] = c[i / 4][i % 4] * op.scale;
        __syncthreads();
        const int j = start + static_cast<int>(threadIdx.x);  // from here on each thread has its own column
        for (int r = 0; r < kRows && base + r < num_rows && j < count; ++r) {
          float* place = rows + static_cast<int64_t>((base + r) / heads_per_row) * op.num_entries + j;
          const float logit = logits[r][threadIdx.x];
          *place = (base + r) % heads_per_row == 0 ? logit : fmaxf(*place, logit);
        }
      }
    }
    __syncthreads();
  }

  SPARSE_RL_DEVICE float logit(int a, int j) const {
    return positions[j] <= at[a] ? rows[static_cast<int64_t>(a) * op.num_entries + j] : kNegInf;
  }

  // total[j] = sum over the queries of their softmax; a query that sees nothing adds nothing.
  SPARSE_RL_DEVICE void add_softmax(float (&largest)[kWarps], float (&share)[kWarps]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int j = threadIdx.x; j < count; j += kThreads) total[j] = 0;
    for (int base = 0; base < op.num_queries; base += kWarps) {
      const int a = base + warp;
      const bool present = a < op.num_queries && at[a] >= 0;
      float top = kNegInf, sum = 0;
      for (int j = lane; present && j < count; j += 32) top = fmaxf(top, logit(a, j));
      top = warp_max(top);
      for (int j = lane; present && j < count && top != kNegInf; j += 32) sum += expf(logit(a, j) - top);
      sum = warp_sum(sum);
      if (lane == 0) largest[warp] = top, share[warp] = top == kNegInf ? 0.0f : 1 / sum;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
        for (int j = threadIdx.x; largest[w] != kNegInf && j < count; j += kThreads) {
          total[j] += expf(logit(base + w, j) - largest[w]) * share[w];
        }
      }
      __syncthreads();
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) importance_kernel(Importance<T> op) {
  __shared__ Flat flat;
  __shared__ float logits[kRows][kColumns], largest[kWarps], share[kWarps];
  const auto heads = static_cast<unsigned>(op.num_heads);
  float* out = op.scores + static_cast<int64_t>(blockIdx.x) * op.num_entries;
  for (int j = threadIdx.x; j < op.num_entries; j += kThreads) out[j] = 0;
  const int length = count_live(op.lengths, blockIdx.x, op.num_entries);
  if (length == 0) return;
  const int64_t slot = blockIdx.x / heads, h = blockIdx.x % heads;
  const int before = length > op.window ? length - op.window : 0;
  float* rows = op.scratch + static_cast<int64_t>(blockIdx.x) * (op.num_queries + 1) * op.num_entries;
  float* total = rows + static_cast<int64_t>(op.num_queries) * op.num_entries;
  const Unit<T> unit{
      op, blockIdx.x, op.keys.at(slot, h), op.positions.at(slot, h), op.query_positions + slot * op.num_queries, rows,
      total, before, op.exclude_window ? before : length};
  int present = 0;
  for (int a = 0; a < op.num_queries; ++a) present += unit.at[a] >= 0;
  const float mean = op.query_mean && present > 0 ? 1 / static_cast<float>(present) : 1.0f;
  const int passes = op.group_max ? 1 : op.group;
  for (int g = 0; g < passes; ++g) {
    unit.fill_logits(flat, logits, g, op.group_max ? op.group : 1);
    unit.add_softmax(largest, share);
    for (int j = threadIdx.x; j < before; j += kThreads) unit.total[j] *= mean;
    __syncthreads();
    for (int j = threadIdx.x; j < before; j += kThreads) {
      out[j] += op.pooling.at(unit.total, before, j) / static_cast<float>(passes);
    }
    __syncthreads();
  }
}

struct Kernel : Device {
  template <class T>
  static void run(const Importance<T>& op, const Tensor& on) {
    check_aligned("queries", op.queries);
    launch(importance_kernel<T>, op.num_slots * op.num_heads, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) {
  m.impl("window_importance", TORCH_BOX(&window_importance<Kernel>));
}

}  // namespace sparse_rl
