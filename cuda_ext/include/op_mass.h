// prefill_mass as torch calls it: arguments, their check, and what a kernel gets of them.
#pragma once

#include "heads.h"

namespace sparse_rl {

// T computes, P is kept in the pools.
template <class T, class P = T>
struct Mass {
  const T* queries;  // (B, Hq, C, D)
  const P* key_pool;
  const int64_t* query_start;  // (B)
  float *mass, *lse;           // (B, H, N), (B, Hq, C)
  int group, chunk, num_entries, dim;
  int64_t pool_rows;
  float scale;
  Heads heads;
};

template <class Backend>
void prefill_mass(
    const Tensor& queries, const Tensor& query_start, const Tensor& key_pool, const Tensor& slots,
    const Tensor& offsets, const Tensor& lengths, double scale, const Tensor& mass, const Tensor& lse,
    const std::optional<Tensor>& errors) {
  const PoolShape pool = Backend::check_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::prefill_mass);
  const int64_t B = heads.num_rows, H = heads.num_heads;
  const int64_t Hq = queries.dim() == 4 ? queries.size(1) : 0, C = queries.dim() == 4 ? queries.size(2) : 0;
  const int64_t N = mass.dim() == 3 ? mass.size(2) : 0;
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "queries have ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  const ScalarType kind = computing_type(pool.dtype, queries);
  check_tensor("queries", queries, key_pool, kind, {B, Hq, C, pool.dim});
  check_tensor("query_start", query_start, key_pool, ScalarType::Long, {B});
  check_tensor("mass", mass, key_pool, ScalarType::Float, {B, H, N});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, Hq, C});
  Backend::dispatch(pool.dtype, kind, [&](auto computed, auto stored) {
    using T = decltype(computed);
    using P = decltype(stored);
    const Mass<T, P> op{
        pointer<T>(queries), pointer<P>(key_pool), pointer<int64_t>(query_start), pointer<float>(mass),
        pointer<float>(lse), static_cast<int>(Hq / H), static_cast<int>(C), static_cast<int>(N),
        static_cast<int>(pool.dim), pool.rows, static_cast<float>(scale), heads};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
