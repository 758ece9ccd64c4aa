// window_importance as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "heads.h"

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

template <class T>
struct Importance {
  const T* queries;  // (S, Hq, A, D)
  const int64_t* query_positions;  // (S, A)
  HeadView<T> keys;
  HeadView<int64_t> positions;
  const int32_t* lengths;  // (S, H)
  float *scores, *scratch;  // (S, H, N), (S, H, A + 1, N)
  int64_t num_slots, num_heads;
  int group, num_queries, num_entries, dim, window;
  float scale;
  bool exclude_window, group_max, query_mean;
  Pooling pooling;
};

template <class Backend>
void window_importance(
    const Tensor& queries, const Tensor& query_positions, const Tensor& keys, const Tensor& positions,
    const Tensor& lengths, double scale, int64_t window, bool exclude_window, StringHandle group_reduction,
    StringHandle query_reduction, StringHandle pooling, int64_t kernel_size, const Tensor& importance,
    const Tensor& scratch) {
  const std::string over_group = take_string(group_reduction), over_queries = take_string(query_reduction);
  const std::string how = take_string(pooling);
  STD_TORCH_CHECK(keys.dim() == 4, "keys must be (slots, KV heads, entries, head_dim), got ", keys.dim(), " dimensions");
  Backend::check_rows("keys", keys);
  const ScalarType dtype = keys.scalar_type();
  const int64_t S = keys.size(0), H = keys.size(1), N = keys.size(2), D = keys.size(3);
  const int64_t group = check_group("queries", queries, 4, H), A = queries.dim() == 4 ? queries.size(2) : 0;
  STD_TORCH_CHECK(window >= 0, "window is ", window, ", expected 0 or more entries");
  check_tensor("keys", keys, keys, dtype, {S, H, N, D}, 2);
  check_tensor("queries", queries, keys, dtype, {S, group * H, A, D});
  check_tensor("query_positions", query_positions, keys, ScalarType::Long, {S, A});
  check_tensor("positions", positions, keys, ScalarType::Long, {S, H, N}, 2);
  check_tensor("lengths", lengths, keys, ScalarType::Int, {S, H});
  check_tensor("importance", importance, keys, ScalarType::Float, {S, H, N});
  check_tensor("scratch", scratch, keys, ScalarType::Float, {S, H, A + 1, N});
  const bool group_max = is_first("group_reduction", over_group, "max", "mean");
  const bool query_mean = is_first("query_reduction", over_queries, "mean", "sum");
  const Pooling pool_over = pooling_of(how, kernel_size);
  Backend::dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Importance<T> op{
        pointer<T>(queries), pointer<int64_t>(query_positions), view_heads<T>(keys), view_heads<int64_t>(positions),
        pointer<int32_t>(lengths), pointer<float>(importance), pointer<float>(scratch), S, H, static_cast<int>(group),
        static_cast<int>(A), static_cast<int>(N), static_cast<int>(D), static_cast<int>(window < N ? window : N),
        static_cast<float>(scale), exclude_window, group_max, query_mean, pool_over};
    Backend::run(op, keys);
  });
}

}  // namespace sparse_rl
