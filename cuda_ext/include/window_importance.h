// window_importance as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "entries.h"

namespace sparse_rl {

struct Pooling {
  enum Kind { kNone, kMax, kAverage } kind;
  int half;

  // The pooled value of entry j of `count`. The average counts missing neighbors as zeros.
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

template <class T, class P>
struct Importance {
  Entries entries;
  const P* keys;                 // (R, D)
  const int32_t* positions;      // (R)
  const T* queries;              // (L, S, Hq, A, D)
  const int64_t *seen, *at;      // (S), (S, A) or null
  float *scores, *scratch;       // (L, B, H, N), (X, A + 1, N)
  int64_t at_a_time;             // X
  int group, num_queries, window;
  float scale;
  bool exclude_window, group_max, query_mean;
  Pooling pooling;

  // The position of a query, -1 for none: the newest that is its place modulo the size of the ring, unless given.
  SPARSE_RL_DEVICE int64_t position(int64_t slot, int a) const {
    if (at) return at[slot * num_queries + a];
    const int64_t last = seen[slot] - 1;
    return a > last ? -1 : last - (last - a) % num_queries;
  }

  // Query a of head g of the group.
  SPARSE_RL_DEVICE const T* query(const Span& span, int g, int a) const {
    const int64_t head = ((span.layer * entries.num_slots + span.slot) * entries.num_heads + span.h) * group + g;
    return queries + (head * num_queries + a) * entries.dim;
  }
};

template <class Backend>
void window_importance(
    const Tensor& query_ring, const Tensor& key_pool, const Tensor& position_pool, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& lengths, double scale, int64_t window,
    bool exclude_window, StringHandle group_reduction, StringHandle query_reduction, StringHandle pooling,
    int64_t kernel_size, const std::optional<Tensor>& query_positions, const Tensor& importance, const Tensor& scratch,
    const std::optional<Tensor>& errors) {
  const std::string over_group = take_string(group_reduction), over_queries = take_string(query_reduction);
  const std::string how = take_string(pooling);
  const Entries all = check_entries<Backend>(
      key_pool, slots, offsets, lengths, importance, "importance", errors, Op::window_importance);
  const int64_t L = all.num_layers, S = all.num_slots, H = all.num_heads, N = all.num_entries, D = all.dim;
  const ScalarType dtype = key_pool.scalar_type(), kind = computing_type(dtype, query_ring);
  const int64_t A = query_ring.dim() == 5 ? query_ring.size(3) : 0;
  const int64_t num_heads = query_ring.dim() == 5 ? query_ring.size(2) : 0, group = H > 0 ? num_heads / H : 0;
  STD_TORCH_CHECK(
      H > 0 && num_heads % H == 0, "query_ring has ", num_heads, " heads, expected a multiple of the ", H,
      " KV heads");
  STD_TORCH_CHECK(window >= 0, "window is ", window, ", expected 0 or more entries");
  check_tensor("query_ring", query_ring, key_pool, kind, {L, S, num_heads, A, D});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {all.pool_rows});
  check_tensor("seen", seen, key_pool, ScalarType::Long, {S});
  check_tensor("query_positions", query_positions, key_pool, ScalarType::Long, {S, A});
  const int64_t X = check_scratch(scratch, key_pool, A + 1, N);
  const bool group_max = is_first("group_reduction", over_group, "max", "mean");
  const bool query_mean = is_first("query_reduction", over_queries, "mean", "sum");
  const Pooling pool_over = pooling_of(how, kernel_size);
  Backend::dispatch(dtype, kind, [&](auto computed, auto stored) {
    using T = decltype(computed);
    using P = decltype(stored);
    const Importance<T, P> op{
        all, pointer<P>(key_pool), pointer<int32_t>(position_pool), pointer<T>(query_ring), pointer<int64_t>(seen),
        pointer<int64_t>(query_positions), pointer<float>(importance), pointer<float>(scratch), X,
        static_cast<int>(group), static_cast<int>(A), static_cast<int>(window < N ? window : N),
        static_cast<float>(scale), exclude_window, group_max, query_mean, pool_over};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
