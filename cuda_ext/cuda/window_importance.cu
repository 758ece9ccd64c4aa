// window_importance: attention of the most recent queries to the entries before the observation window, pooled.
//
// One block per (row, KV head). Order of the operations: logits; maximum over the query heads of a group ("max");
// softmax over the keys; mean or sum over the queries; pooling; mean over the heads of the group ("mean").

#include "tile.cuh"

#include <string>

namespace sparse_rl {
namespace {

constexpr int kRows = 16, kColumns = kThreads;
using Flat = Product<kRows, kColumns>;

struct Pooling {
  enum Kind { kNone, kMax, kAverage } kind;
  int half;

  SPARSE_RL_DEVICE float at(const float* values, int count, int j) const {
    if (kind == kNone) return values[j];
    const int first = j > half ? j - half : 0, last = j + half < count ? j + half : count - 1;
    float top = values[first], sum = 0;
    for (int i = first; i <= last; ++i) top = fmaxf(top, values[i]), sum += values[i];
    return kind == kMax ? top : sum / static_cast<float>(2 * half + 1);
  }
};

template <class T>
struct Importance {
  const T *queries, *key_pool;  // queries (S, Hq, A, D)
  const int64_t* query_positions;
  const int32_t* positions;
  float *scores, *scratch;
  int group, num_queries, num_entries, dim, window;
  int64_t pool_rows;
  float scale;
  bool exclude_window, group_max, query_mean;
  Pooling pooling;
  Heads heads;
};

// What one block works on.
template <class T>
struct Unit {
  const Importance<T>& op;
  Run run;
  const T* keys;
  const int32_t* positions;
  const int64_t* at;  // positions of the queries
  float *rows, *total;  // scratch: logits (A, N), then the sum over the queries (N)
  int before, count;    // entries outside the window, entries in the softmax

  // rows[a][j] of the queries present: the largest logit of `heads_per_row` query heads from first_head on.
  SPARSE_RL_DEVICE void fill_logits(Flat& flat, float (&logits)[kRows][kColumns], int first_head, int heads_per_row) const {
    const int num_rows = op.num_queries * heads_per_row;
    const int64_t head = run.head * op.group + first_head;
    for (int start = 0; start < count; start += kColumns) {
      for (int base = 0; base < num_rows; base += kRows) {
        float c[4][4];
        flat.compute<T>(
            op.dim,
            [&](int r) -> const T* {
              const int a = (base + r) / heads_per_row, g = (base + r) % heads_per_row;
              const bool there = base + r < num_rows && at[a] >= 0;
              return there ? op.queries + ((head + g) * op.num_queries + a) * op.dim : nullptr;
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
    return positions[j] <= at[a] ? rows[static_cast<int64_t>(a) * op.num_entries + j] : kNothing;
  }

  // total[j] = sum over the queries of their softmax; a query that sees nothing adds nothing.
  SPARSE_RL_DEVICE void add_softmax(float (&largest)[kWarps], float (&share)[kWarps]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int j = threadIdx.x; j < count; j += kThreads) total[j] = 0;
    for (int base = 0; base < op.num_queries; base += kWarps) {
      const int a = base + warp;
      const bool present = a < op.num_queries && at[a] >= 0;
      float top = kNothing, sum = 0;
      for (int j = lane; present && j < count; j += 32) top = fmaxf(top, logit(a, j));
      top = warp_max(top);
      for (int j = lane; present && j < count && top != kNothing; j += 32) sum += expf(logit(a, j) - top);
      sum = warp_sum(sum);
      if (lane == 0) largest[warp] = top, share[warp] = top == kNothing ? 0.0f : 1 / sum;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
        for (int j = threadIdx.x; largest[w] != kNothing && j < count; j += kThreads) {
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
  const auto heads = static_cast<unsigned>(op.heads.num_heads);
  float* out = op.scores + static_cast<int64_t>(blockIdx.x) * op.num_entries;
  for (int j = threadIdx.x; j < op.num_entries; j += kThreads) out[j] = 0;
  const Run run = find_run(op.heads, blockIdx.x / heads, blockIdx.x % heads, op.num_entries, op.pool_rows);
  if (run.length == 0) return;
  const int before = run.length > op.window ? run.length - op.window : 0;
  float* rows = op.scratch + static_cast<int64_t>(blockIdx.x) * (op.num_queries + 1) * op.num_entries;
  const Unit<T> unit{
      op, run, op.key_pool + run.start * op.dim, op.positions + run.start,
      op.query_positions + run.slot * op.num_queries, rows, rows + static_cast<int64_t>(op.num_queries) * op.num_entries,
      before, op.exclude_window ? before : run.length};
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

bool is_first(const char* name, const std::string& value, const char* first, const char* second) {
  STD_TORCH_CHECK(value == first || value == second, name, " is '", value, "', expected '", first, "' or '", second, "'");
  return value == first;
}

Pooling pooling_of(const std::string& name, int64_t kernel_size) {
  STD_TORCH_CHECK(name == "none" || name == "max" || name == "avg", "pooling is '", name, "', expected none, max or avg");
  STD_TORCH_CHECK(kernel_size >= 1 && kernel_size % 2 == 1, "kernel_size is ", kernel_size, ", expected an odd number");
  const auto kind = name == "none" ? Pooling::kNone : name == "max" ? Pooling::kMax : Pooling::kAverage;
  return {kind, static_cast<int>(kernel_size / 2)};
}

void window_importance(
    const Tensor& queries, const Tensor& query_positions, const Tensor& key_pool, const Tensor& position_pool,
    const Tensor& slots, const Tensor& offsets, const Tensor& lengths, double scale, int64_t window,
    bool exclude_window, std::string group_reduction, std::string query_reduction, std::string pooling,
    int64_t kernel_size, const Tensor& scores, const Tensor& scratch) {
  const PoolShape pool = check_device_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool);
  const int64_t B = heads.num_rows, H = heads.num_heads, S = heads.num_slots;
  const int64_t Hq = queries.dim() == 4 ? queries.size(1) : 0, A = queries.dim() == 4 ? queries.size(2) : 0;
  const int64_t N = scores.dim() == 3 ? scores.size(2) : 0;
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "queries have ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  STD_TORCH_CHECK(window >= 0, "window is ", window, ", expected 0 or more entries");
  check_tensor("queries", queries, key_pool, pool.dtype, {S, Hq, A, pool.dim});
  check_tensor("query_positions", query_positions, key_pool, ScalarType::Long, {S, A});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("scores", scores, key_pool, ScalarType::Float, {B, H, N});
  check_tensor("scratch", scratch, key_pool, ScalarType::Float, {B, H, A + 1, N});
  check_aligned("queries", queries);
  const bool group_max = is_first("group_reduction", group_reduction, "max", "mean");
  const bool query_mean = is_first("query_reduction", query_reduction, "mean", "sum");
  const Pooling pool_over = pooling_of(pooling, kernel_size);

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Importance<T> op{
        data<T>(queries), data<T>(key_pool), data<int64_t>(query_positions), data<int32_t>(position_pool),
        data<float>(scores), data<float>(scratch), static_cast<int>(Hq / H), static_cast<int>(A), static_cast<int>(N),
        static_cast<int>(pool.dim), static_cast<int>(window < N ? window : N), pool.rows, static_cast<float>(scale),
        exclude_window, group_max, query_mean, pool_over, heads};
    launch(importance_kernel<T>, B * H, 1, kThreads, key_pool, op);
  };
  SPARSE_RL_DISPATCH_DEVICE(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("window_importance", TORCH_BOX(&window_importance)); }

}  // namespace sparse_rl
