// summarize_pages, select_pages and page_attention as torch calls them: arguments, their check, and what a kernel gets.
#pragma once

#include "heads.h"

namespace sparse_rl {

// Vectors that are kept of pages, (S, H, C, P, D): the means (C = 1), or the largest and the smallest elements (C = 2).
template <class T>
struct Kept {
  T* data;
  int64_t num_vectors, num_pages, dim;

  // Of the i-th (slot, head): the c-th vector of a page.
  SPARSE_RL_DEVICE T* at(int64_t i, int64_t c, int64_t page) const {
    return data + ((i * num_vectors + c) * num_pages + page) * dim;
  }
};

template <class T>
Kept<T> check_summaries(
    const Tensor& summaries, const Tensor& like, ScalarType dtype, int64_t S, int64_t H, int64_t D) {
  check_tensor("summaries", summaries, like, dtype, {S, H, kAnySize, kAnySize, D});
  const Kept<T> kept{pointer<T>(summaries), summaries.size(2), summaries.size(3), D};
  STD_TORCH_CHECK(
      kept.num_vectors == 1 || kept.num_vectors == 2, "summaries have ", kept.num_vectors,
      " vectors per page, expected 1 (means) or 2 (bounds)");
  return kept;
}

inline void check_page_size(int64_t page_size) {
  STD_TORCH_CHECK(page_size > 0, "page_size is ", page_size, ", expected at least 1 entry");
}

template <class T>
struct Summary {
  const T* key_pool;
  Kept<T> kept;
  int64_t page_size, pool_rows;
  bool newest_only;
  Heads heads;

  // The pages of a head of `length` entries to look at: complete ones, or the one the newest entry has completed.
  SPARSE_RL_DEVICE int64_t end(int64_t length) const { return length / page_size; }
  SPARSE_RL_DEVICE int64_t begin(int64_t length) const {
    if (!newest_only) return 0;
    return length % page_size == 0 && length > 0 ? end(length) - 1 : end(length);
  }
};

template <class Backend>
void summarize_pages(
    const Tensor& key_pool, const Tensor& slots, const Tensor& offsets, const Tensor& lengths, int64_t page_size,
    bool newest_only, const Tensor& summaries, const std::optional<Tensor>& errors) {
  const PoolShape pool = Backend::check_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::summarize_pages);
  check_page_size(page_size);
  Backend::dispatch(pool.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kept =
        check_summaries<T>(summaries, key_pool, pool.dtype, heads.num_slots, heads.num_heads, pool.dim);
    const Summary<T> op{pointer<T>(key_pool), kept, page_size, pool.rows, newest_only, heads};
    Backend::run(op, key_pool);
  });
}

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
    int64_t page_size, int64_t num_first, int64_t num_last, bool group_max, const Tensor& scores,
    const Tensor& pages, const std::optional<Tensor>& errors) {
  STD_TORCH_CHECK(summaries.dim() == 5, "summaries must be (slots, heads, vectors, pages, head_dim)");
  const ScalarType dtype = summaries.scalar_type();
  Backend::dispatch(dtype, [](auto) {});
  const int64_t B = slots.dim() == 1 ? slots.size(0) : 0, S = summaries.size(0), H = summaries.size(1);
  const int64_t P = summaries.size(3), D = summaries.size(4), Hq = query.dim() == 3 ? query.size(1) : 0;
  STD_TORCH_CHECK(D > 0 && D <= kMaxHeadDim, "head_dim is ", D, ", the native kernels take 1 to ", kMaxHeadDim);
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "query has ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  STD_TORCH_CHECK(num_first >= 0 && num_last >= 1, "num_first is ", num_first, " and num_last ", num_last,
                  ", expected at least 0 and 1 pages");
  check_page_size(page_size);
  check_tensor("query", query, summaries, dtype, {B, Hq, D});
  check_tensor("slots", slots, summaries, ScalarType::Long, {B});
  check_tensor("lengths", lengths, summaries, ScalarType::Int, {S, H});
  check_tensor("limits", limits, summaries, ScalarType::Int, {B});
  check_tensor("scores", scores, summaries, ScalarType::Float, {B, H, P});
  check_tensor("pages", pages, summaries, ScalarType::Int, {B, H, kAnySize});
  const Heads heads{slots.const_data_ptr<int64_t>(), nullptr, lengths.const_data_ptr<int32_t>(), B, S, H,
                    check_errors(errors, summaries, Op::select_pages)};
  Backend::dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kept = check_summaries<T>(summaries, summaries, dtype, S, H, D);
    const Selection<T> op{
        pointer<T>(query), kept, pointer<int32_t>(limits), pointer<float>(scores), pointer<int32_t>(pages), Hq / H,
        pages.size(2), page_size, num_first, num_last, group_max, heads};
    Backend::run(op, summaries);
  });
}

template <class T>
struct PageReading {
  const T *query, *key_pool, *value_pool;
  const int32_t* pages;  // (B, H, K)
  T* out;
  float* lse;  // null where not wanted
  int64_t group, dim, width, page_size, pool_rows;
  float scale;
  Heads heads;
};

template <class Backend>
void page_attention(
    const Tensor& query, const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& offsets,
    const Tensor& lengths, const Tensor& pages, int64_t page_size, double scale, const Tensor& out,
    const std::optional<Tensor>& lse, const std::optional<Tensor>& errors) {
  const PoolShape pool = Backend::check_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::page_attention);
  const int64_t B = heads.num_rows, H = heads.num_heads, D = pool.dim, Hq = query.dim() == 3 ? query.size(1) : 0;
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "query has ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  check_page_size(page_size);
  check_tensor("query", query, key_pool, pool.dtype, {B, Hq, D});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, D});
  check_tensor("pages", pages, key_pool, ScalarType::Int, {B, H, kAnySize});
  check_tensor("out", out, key_pool, pool.dtype, {B, Hq, D});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, Hq});
  Backend::dispatch(pool.dtype, [&](auto zero) {
    using T = decltype(zero);
    const PageReading<T> op{
        pointer<T>(query), pointer<T>(key_pool), pointer<T>(value_pool), pointer<int32_t>(pages), pointer<T>(out),
        pointer<float>(lse), Hq / H, D, pages.size(2), page_size, pool.rows, static_cast<float>(scale), heads};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
