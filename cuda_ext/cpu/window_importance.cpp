// window_importance: attention of the most recent queries to the entries before the observation window, pooled.
//
// Order of the operations: logits; maximum over the query heads of a group ("max"); softmax over the keys; mean or sum
// over the queries; pooling; mean over the heads of the group ("mean").

#include "dots.h"
#include "heads.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparse_rl {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// total[j] += softmax(logits)[j] over `count` logits, which it overwrites; nothing to see adds nothing.
SPARSE_RL_CLONES void add_softmax(float* logits, int64_t count, float* total) {
  float largest = kNothing;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) largest = logits[j] > largest ? logits[j] : largest;
  if (largest == kNothing) return;
  Vec sums{};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    Vec p = exp_negative(load(logits + j) - largest);
    store(logits + j, p);
    sums += p;
  }
  float sum = sum_lanes(sums);
  for (; j < count; ++j) sum += logits[j] = std::exp(logits[j] - largest);
  const float share = 1 / sum;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) total[i] += logits[i] * share;
}

struct Pooling {
  enum Kind { kNone, kMax, kAverage } kind;
  int64_t half;

  float at(const float* values, int64_t count, int64_t j) const {
    if (kind == kNone) return values[j];
    const int64_t first = std::max<int64_t>(0, j - half), last = std::min(count - 1, j + half);
    float top = values[first], sum = 0;
    for (int64_t i = first; i <= last; ++i) top = std::max(top, values[i]), sum += values[i];
    return kind == kMax ? top : sum / static_cast<float>(2 * half + 1);
  }
};

template <class T>
struct Importance {
  const T *queries, *key_pool;
  const int64_t* query_positions;
  const int32_t* positions;
  float *scores, *scratch;
  int64_t group, num_queries, num_entries, dim, window;
  float scale;
  bool exclude_window, group_max, query_mean;
  Pooling pooling;
  Heads heads;

  // Logits of the queries present, rows (query, head), against `count` keys; several heads of a query share the row of
  // their maximum.
  void fill_logits(const T* keys, int64_t count, int64_t slot, int64_t first_head, int64_t heads_per_row, float* rows)
      const {
    const int64_t* at = query_positions + slot * num_queries;
    float packed[kRows * kMaxHeadDim], tile[kRows * kTile];
    int64_t row_of[kRows];
    int used = 0;
    std::fill(rows, rows + num_queries * num_entries, kNothing);
    auto flush = [&]() {
      for (int64_t start = 0; used && start < count; start += kTile) {
        const int64_t some = std::min<int64_t>(kTile, count - start);
        dots(keys + start * dim, some, dim, packed, used, scale, tile);
        for (int r = 0; r < used; ++r) {
          float* row = rows + row_of[r] * num_entries + start;
          for (int64_t j = 0; j < some; ++j) row[j] = std::max(row[j], tile[r * kTile + j]);
        }
      }
      used = 0;
    };
    for (int64_t a = 0; a < num_queries; ++a) {
      for (int64_t g = 0; g < heads_per_row && at[a] >= 0; ++g) {
        const int64_t head = slot * heads.num_heads * group + first_head + g;
        pack_query(queries + (head * num_queries + a) * dim, used, dim, packed);
        row_of[used++] = a;
        if (used == kRows) flush();
      }
    }
    flush();
  }

  void unit(int64_t b, int64_t h) const {
    float* out = scores + (b * heads.num_heads + h) * num_entries;
    std::fill(out, out + num_entries, 0.0f);
    const int64_t slot = heads.slots[b];
    if (slot < 0) return;
    const int64_t i = heads.index(b, h), length = heads.lengths[i], before = std::max<int64_t>(0, length - window);
    const int64_t count = exclude_window ? before : length;
    const T* keys = key_pool + heads.offsets[i] * dim;
    const int32_t* entry_positions = positions + heads.offsets[i];
    const int64_t* at = query_positions + slot * num_queries;
    float *rows = scratch + (b * heads.num_heads + h) * (num_queries + 1) * num_entries;
    float* total = rows + num_queries * num_entries;
    int64_t present = 0;
    for (int64_t a = 0; a < num_queries; ++a) present += at[a] >= 0;
    const float share = query_mean && present > 0 ? 1 / static_cast<float>(present) : 1.0f;
    const int64_t passes = group_max ? 1 : group;
    for (int64_t g = 0; g < passes; ++g) {
      fill_logits(keys, count, slot, h * group + g, group_max ? group : 1, rows);
      std::fill(total, total + num_entries, 0.0f);
      for (int64_t a = 0; a < num_queries; ++a) {
        const int64_t visible = std::upper_bound(entry_positions, entry_positions + count, at[a]) - entry_positions;
        add_softmax(rows + a * num_entries, visible, total);
      }
      for (int64_t j = 0; j < before; ++j) total[j] *= share;
      for (int64_t j = 0; j < before; ++j) out[j] += pooling.at(total, before, j) / static_cast<float>(passes);
    }
  }
};

bool is_first(const char* name, const std::string& value, const char* first, const char* second) {
  STD_TORCH_CHECK(value == first || value == second, name, " is '", value, "', expected '", first, "' or '", second, "'");
  return value == first;
}

Pooling pooling_of(const std::string& name, int64_t kernel_size) {
  STD_TORCH_CHECK(name == "none" || name == "max" || name == "avg", "pooling is '", name, "', expected none, max or avg");
  STD_TORCH_CHECK(kernel_size >= 1 && kernel_size % 2 == 1, "kernel_size is ", kernel_size, ", expected an odd number");
  return {name == "none" ? Pooling::kNone : name == "max" ? Pooling::kMax : Pooling::kAverage, kernel_size / 2};
}

void window_importance(
    const Tensor& queries, const Tensor& query_positions, const Tensor& key_pool, const Tensor& position_pool,
    const Tensor& slots, const Tensor& offsets, const Tensor& lengths, double scale, int64_t window,
    bool exclude_window, std::string group_reduction, std::string query_reduction, std::string pooling,
    int64_t kernel_size, const Tensor& scores, const Tensor& scratch) {
  const PoolShape pool = check_key_pool(key_pool);
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
  check_runs(heads, N, "the entries of scores", pool.rows);
  const bool group_max = is_first("group_reduction", group_reduction, "max", "mean");
  const bool query_mean = is_first("query_reduction", query_reduction, "mean", "sum");
  const Pooling pool_over = pooling_of(pooling, kernel_size);

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Importance<T> op{
        data<T>(queries), data<T>(key_pool), data<int64_t>(query_positions), data<int32_t>(position_pool),
        data<float>(scores), data<float>(scratch), Hq / H, A, N, pool.dim, window, static_cast<float>(scale),
        exclude_window, group_max, query_mean, pool_over, heads};
    torch::stable::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) op.unit(i / H, i % H);
    });
  };
  SPARSE_RL_DISPATCH(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("window_importance", TORCH_BOX(&window_importance)); }

}  // namespace sparse_rl
