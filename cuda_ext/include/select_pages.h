// select_pages as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "pages.h"

namespace sparse_rl {

template <class T>
struct Selection {
  const T* query;  // (B, Hq, D)
  Kept<T> kept;
  const int32_t* limits;  // (B)
  float* scores;          // (B, H, P)
  int32_t* pages;         // (B, H, K)
  int64_t group, width, page_size, num_first, num_last;
  bool group_max;
  Heads heads;  // without offsets
};

template <class Backend>
void select_pages(
    const Tensor& query, const Tensor& summaries, const Tensor& slots, const Tensor& lengths, const Tensor& limits,
    int64_t page_size, int64_t num_first, int64_t num_last, bool group_max, const Tensor& page_scores,
    const Tensor& pages, const std::optional<Tensor>& errors) {
  STD_TORCH_CHECK(summaries.dim() == 5, "summaries must be (slots, heads, vectors, pages, head_dim)");
  Backend::check_rows("summaries", summaries);
  const ScalarType dtype = summaries.scalar_type();
  const int64_t B = slots.dim() == 1 ? slots.size(0) : 0, S = summaries.size(0), H = summaries.size(1);
  const int64_t P = summaries.size(3), D = summaries.size(4), group = check_group("query", query, 3, H);
  STD_TORCH_CHECK(num_first >= 0 && num_last >= 1, "num_first is ", num_first, " and num_last ", num_last,
                  ", expected at least 0 and 1 pages");
  check_page_size(page_size);
  check_tensor("query", query, summaries, dtype, {B, group * H, D});
  check_tensor("slots", slots, summaries, ScalarType::Long, {B});
  check_tensor("lengths", lengths, summaries, ScalarType::Int, {S, H});
  check_tensor("limits", limits, summaries, ScalarType::Int, {B});
  check_tensor("page_scores", page_scores, summaries, ScalarType::Float, {B, H, P});
  check_tensor("pages", pages, summaries, ScalarType::Int, {B, H, kAnySize});
  const Heads heads{slots.const_data_ptr<int64_t>(), nullptr, lengths.const_data_ptr<int32_t>(), B, S, H,
                    check_errors(errors, summaries, Op::select_pages)};
  Backend::dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kept = check_summaries<T>(summaries, summaries, dtype, S, H, D);
    const Selection<T> op{
        pointer<T>(query), kept, pointer<int32_t>(limits), pointer<float>(page_scores), pointer<int32_t>(pages), group,
        pages.size(2), page_size, num_first, num_last, group_max, heads};
    Backend::run(op, summaries);
  });
}

}  // namespace sparse_rl
