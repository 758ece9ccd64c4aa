// decode_attention as torch calls it: its arguments and their check.
#pragma once

#include "attention.h"

namespace sparse_rl {

// Call f(op) with the struct of checked arguments.
template <class Backend, class F>
void with_decode_attention(
    const Tensor& query, const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& offsets,
    const Tensor& lengths, double scale, int64_t max_length, const Tensor& out, const std::optional<Tensor>& lse,
    const std::optional<Tensor>& probs, const std::optional<Tensor>& partials, const std::optional<Tensor>& errors,
    Op name, F f) {
  const PoolShape pool = check_pool<Backend>(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, name);
  const int64_t B = heads.num_rows, D = pool.dim, group = check_group("query", query, 3, heads.num_heads);
  const int64_t Hq = group * heads.num_heads;
  const int64_t M = probs.has_value() && probs->dim() == 3 ? probs->size(2) : max_length;
  const ScalarType kind = computing_type(pool.dtype, query);
  check_tensor("query", query, key_pool, kind, {B, Hq, D});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, D});
  check_tensor("out", out, key_pool, kind, {B, Hq, D});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, Hq});
  check_tensor("probs", probs, key_pool, ScalarType::Float, {B, Hq, M});
  const int64_t splits = check_partials(partials, key_pool, B, Hq, D);
  STD_TORCH_CHECK(M >= max_length, "probs has room for ", M, " entries, max_length is ", max_length);
  Backend::dispatch(pool.dtype, kind, [&](auto computed, auto stored) {
    using T = decltype(computed);
    using P = decltype(stored);
    const Attention<T, P> op{
        pointer<T>(query), pointer<P>(key_pool), pointer<P>(value_pool), pointer<T>(out), pointer<float>(lse),
        pointer<float>(probs), group, D, max_length, M, pool.rows, static_cast<float>(scale), heads,
        pointer<float>(partials), splits};
    f(op);
  });
}

template <class Backend>
void decode_attention(
    const Tensor& query, const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& offsets,
    const Tensor& lengths, double scale, int64_t max_length, const Tensor& out, const std::optional<Tensor>& lse,
    const std::optional<Tensor>& probs, const std::optional<Tensor>& partials, const std::optional<Tensor>& errors) {
  with_decode_attention<Backend>(
      query, key_pool, value_pool, slots, offsets, lengths, scale, max_length, out, lse, probs, partials, errors,
      Op::decode_attention, [&](const auto& op) { Backend::run(op, key_pool); });
}

}  // namespace sparse_rl
