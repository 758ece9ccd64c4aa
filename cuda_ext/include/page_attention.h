// page_attention as torch calls it: its arguments and their check.
#pragma once

#include "attention.h"
#include "pages.h"

namespace sparse_rl {

template <class Backend>
void page_attention(
    const Tensor& query, const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& offsets,
    const Tensor& lengths, const Tensor& pages, int64_t page_size, double scale, const Tensor& out,
    const std::optional<Tensor>& lse, const std::optional<Tensor>& partials, const std::optional<Tensor>& errors) {
  const PoolShape pool = check_pool<Backend>(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::page_attention);
  const int64_t B = heads.num_rows, H = heads.num_heads, D = pool.dim, group = check_group("query", query, 3, H);
  check_page_size(page_size);
  check_tensor("query", query, key_pool, pool.dtype, {B, group * H, D});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, D});
  check_tensor("pages", pages, key_pool, ScalarType::Int, {B, H, kAnySize});
  check_tensor("out", out, key_pool, pool.dtype, {B, group * H, D});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, group * H});
  const int64_t splits = check_partials(partials, key_pool, B, group * H, D);
  Backend::dispatch(pool.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Attention<T> op{
        pointer<T>(query), pointer<T>(key_pool), pointer<T>(value_pool), pointer<T>(out), pointer<float>(lse), nullptr,
        group, D, pool.rows, 0, pool.rows, static_cast<float>(scale), heads, pointer<float>(partials), splits,
        pointer<int32_t>(pages), static_cast<int>(pages.size(2)), static_cast<int>(page_size)};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
