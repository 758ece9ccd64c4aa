// append as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "heads.h"

namespace sparse_rl {

// T is the compute type, P the type of the pools.
template <class T, class P = T>
struct Append {
  const T* projected;                  // (B, Hq + 2 H, D): queries, keys and values of the new tokens
  const float *query_norm, *key_norm;  // (D), null for no norm
  const float *cos, *sin;              // (B, width), null for no rotation
  int64_t width;
  const int64_t* seen;        // (S)
  const int32_t* capacities;  // (S, H)
  P *key_pool, *value_pool;
  int32_t *position_pool, *lengths;
  T* ring;   // (S, Hq, A, D), null for none
  T* query;  // (B, Hq, D), normalized and rotated
  int64_t num_query_heads, num_queries, dim, pool_rows;
  float epsilon;
  Heads heads;

  // The given head of row b: a query head, then the KV heads' keys, then their values.
  SPARSE_RL_DEVICE const T* head(int64_t b, int64_t index) const {
    return projected + (b * (num_query_heads + 2 * heads.num_heads) + index) * dim;
  }
};

// Call f(op) with the struct of checked arguments.
template <class Backend, class F>
void with_append(
    const Tensor& projected, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
    double epsilon, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& capacities, const Tensor& key_pool,
    const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& query_ring, const Tensor& query, const std::optional<Tensor>& errors, Op name,
    F f) {
  const PoolShape pool = check_pool<Backend>(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, name);
  const int64_t B = heads.num_rows, H = heads.num_heads, S = heads.num_slots, D = pool.dim;
  const int64_t Hq = query.dim() == 3 ? query.size(1) : 0;
  const int64_t A = query_ring.has_value() && query_ring->dim() == 4 ? query_ring->size(2) : 0;
  const int64_t width = cos.has_value() && cos->dim() == 2 ? cos->size(1) : 0;
  const ScalarType kind = computing_type(pool.dtype, query);
  check_tensor("query", query, key_pool, kind, {B, Hq, D});
  check_tensor("projected", projected, key_pool, kind, {B, Hq + 2 * H, D});
  STD_TORCH_CHECK(epsilon >= 0, "epsilon is ", epsilon, ", expected 0 or more");
  check_tensor("query_norm", query_norm, key_pool, ScalarType::Float, {D});
  check_tensor("key_norm", key_norm, key_pool, ScalarType::Float, {D});
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "give both cos and sin, or neither");
  STD_TORCH_CHECK(width % 2 == 0 && width <= D, "cos has ", width, " columns, expected an even number up to ", D);
  check_tensor("cos", cos, key_pool, ScalarType::Float, {B, width});
  check_tensor("sin", sin, key_pool, ScalarType::Float, {B, width});
  check_tensor("seen", seen, key_pool, ScalarType::Long, {S});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {S, H});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, D});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("query_ring", query_ring, key_pool, kind, {S, Hq, A, D});
  Backend::dispatch(pool.dtype, kind, [&](auto computed, auto stored) {
    using T = decltype(computed);
    using P = decltype(stored);
    const Append<T, P> op{
        pointer<T>(projected), pointer<float>(query_norm), pointer<float>(key_norm), pointer<float>(cos),
        pointer<float>(sin), width, pointer<int64_t>(seen), pointer<int32_t>(capacities), pointer<P>(key_pool),
        pointer<P>(value_pool), pointer<int32_t>(position_pool), pointer<int32_t>(lengths),
        A > 0 ? pointer<T>(query_ring) : nullptr, pointer<T>(query), Hq, A, D, pool.rows, static_cast<float>(epsilon),
        heads};
    f(op);
  });
}

template <class Backend>
void append(
    const Tensor& projected, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
    double epsilon, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& capacities, const Tensor& key_pool,
    const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& query_ring, const Tensor& query, const std::optional<Tensor>& errors) {
  with_append<Backend>(
      projected, query_norm, key_norm, epsilon, cos, sin, slots, seen, offsets, capacities, key_pool, value_pool,
      position_pool, lengths, query_ring, query, errors, Op::append,
      [&](const auto& op) { Backend::run(op, key_pool); });
}

}  // namespace sparse_rl
