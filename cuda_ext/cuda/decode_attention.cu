// decode_attention: one query token per slot over its live entries, softmax kept online, everything summed in float32.
//
// One block per (row, KV head) takes up to eight query heads of the group at once, so that K and V are read once. Its
// warps share out the entries by fixed rules and merge in a fixed order: a row's bits depend on nothing but its slot.
// 16-bit queries run on tensor cores (attention_tensor.cuh), float32 on plain FMAs (attention_plain.cuh).

#include "attention_launch.cuh"

namespace sparse_rl {
namespace {

void decode_attention(
    const Tensor& query, const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& offsets,
    const Tensor& lengths, double scale, int64_t max_length, const Tensor& out, const std::optional<Tensor>& lse,
    const std::optional<Tensor>& probs, const std::optional<Tensor>& errors) {
  const PoolShape pool = Device::check_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::decode_attention);
  const int64_t B = heads.num_rows, H = heads.num_heads, D = pool.dim;
  const int64_t Hq = query.dim() == 3 ? query.size(1) : 0;
  const int64_t M = probs.has_value() && probs->dim() == 3 ? probs->size(2) : max_length;
  const ScalarType kind = computing_type(pool.dtype, query);
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "query has ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  check_tensor("query", query, key_pool, kind, {B, Hq, D});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, D});
  check_tensor("out", out, key_pool, kind, {B, Hq, D});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, Hq});
  check_tensor("probs", probs, key_pool, ScalarType::Float, {B, Hq, M});
  STD_TORCH_CHECK(M >= max_length, "probs has room for ", M, " entries, max_length is ", max_length);
  check_aligned("query", pointer<char>(query));
  check_aligned("value_pool", pointer<char>(value_pool));

  Device::dispatch(pool.dtype, kind, [&](auto computed, auto stored) {
    using T = decltype(computed);
    using P = decltype(stored);
    const Attention<T, P> op{
        pointer<T>(query), pointer<P>(key_pool), pointer<P>(value_pool), pointer<T>(out), pointer<float>(lse),
        pointer<float>(probs), Hq / H, D, max_length, M, pool.rows, static_cast<float>(scale), heads};
    launch_attention<false>(op, key_pool);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention)); }

}  // namespace sparse_rl
