// window_importance as torch calls it: arguments, their check, and what a kernel gets of them.
#pragma once

#include "heads.h"

namespace sparse_rl {

struct Pooling {
  enum Kind { kNone, kMax, kAverage } kind;
  int half;

  // Of entry j of `count`. The average counts missing neighbours as zeros.
  SPARSE_RL_DEVICE float at(const float* values, int count, int j) const {
    if (kind == kNone) return values[j];
    const int first = j > half ? j - half : 0, last = j + half < count ? j + half : count - 1;
    float top = values[first], sum = 0;
    for (int i = first; i <= last; ++i) top = values[i] > top ? values[i] : top, sum += values[i];
    return kind == kMax ? top : sum / static_cast<float>(2 * half + 1);
  }
};

inline Pooling pooling_of(const std::string& name, int64_t kernel_size) {
  STD_TORCH_CHECK(
      name == "none" || name == "max" || name == "avg", "pooling is '", name, "', expected none, max or avg");
  STD_TORCH_CHECK(
      kernel_size >= 1 && kernel_size % 2 == 1, "kernel_size is ", kernel_size, ", expected an odd number");
  const auto kind = name == "none" ? Pooling::kNone : name == "max" ? Pooling::kMax : Pooling::kAverage;
  return {kind, static_cast<int>(kernel_size / 2)};
}

inline bool is_first(const char* name, const std::string& value, const char* first, const char* second) {
  STD_TORCH_CHECK(
      value == first || value == second, name, " is '", value, "', expected '", first, "' or '", second, "'");
  return value == first;
}

// T computes, P is kept in the pools.
template <class T, class P = T>
struct Importance {
  const T* queries;  // (S, Hq, A, D)
  const P* key_pool;
  const int64_t* query_positions;  // (S, A)
  const int32_t* positions;
  float *scores, *scratch;  // (B, H, N), (B, H, A + 1, N)
  int group, num_queries, num_entries, dim, window;
  int64_t pool_rows;
  float scale;
  bool exclude_window, group_max, query_mean;
  Pooling pooling;
  Heads heads;
};

template <class Backend>
void window_importance(
    const Tensor& queries, const Tensor& query_positions, const Tensor& key_pool, const Tensor& position_pool,
    const Tensor& slots, const Tensor& offsets, const Tensor& lengths, double scale, int64_t window,
    bool exclude_window, StringHandle group_reduction, StringHandle query_reduction, StringHandle pooling,
    int64_t kernel_size, const Tensor& scores, const Tensor& scratch, const std::optional<Tensor>& errors) {
  const std::string over_group = taken(group_reduction), over_queries = taken(query_reduction), how = taken(pooling);
  const PoolShape pool = Backend::check_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::window_importance);
  const int64_t B = heads.num_rows, H = heads.num_heads, S = heads.num_slots;
  const int64_t Hq = queries.dim() == 4 ? queries.size(1) : 0, A = queries.dim() == 4 ? queries.size(2) : 0;
  const int64_t N = scores.dim() == 3 ? scores.size(2) : 0;
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "queries have ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  STD_TORCH_CHECK(window >= 0, "window is ", window, ", expected 0 or more entries");
  const ScalarType kind = computing_type(pool.dtype, queries);
  check_tensor("queries", queries, key_pool, kind, {S, Hq, A, pool.dim});
  check_tensor("query_positions", query_positions, key_pool, ScalarType::Long, {S, A});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("scores", scores, key_pool, ScalarType::Float, {B, H, N});
  check_tensor("scratch", scratch, key_pool, ScalarType::Float, {B, H, A + 1, N});
  const bool group_max = is_first("group_reduction", over_group, "max", "mean");
  const bool query_mean = is_first("query_reduction", over_queries, "mean", "sum");
  const Pooling pool_over = pooling_of(how, kernel_size);
  Backend::dispatch(pool.dtype, kind, [&](auto computed, auto stored) {
    using T = decltype(computed);
    using P = decltype(stored);
    const Importance<T, P> op{
        pointer<T>(queries), pointer<P>(key_pool), pointer<int64_t>(query_positions), pointer<int32_t>(position_pool),
        pointer<float>(scores), pointer<float>(scratch), static_cast<int>(Hq / H), static_cast<int>(A),
        static_cast<int>(N), static_cast<int>(pool.dim), static_cast<int>(window < N ? window : N), pool.rows,
        static_cast<float>(scale), exclude_window, group_max, query_mean, pool_over, heads};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
