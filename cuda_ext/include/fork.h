// fork as torch calls it: its arguments, their check, and the struct for a kernel, with pools as bytes of any type.
#pragma once

#include "heads.h"

namespace sparse_rl {

struct Fork {
  const int64_t *sources, *destinations, *offsets;
  const int32_t* capacities;
  int64_t num_layers, num_pairs, num_slots, num_heads, pool_rows;
  int64_t row_bytes, state_bytes;   // per entry
  int64_t ring_bytes, death_bytes;  // per slot and layer, per head
  char *key_pool, *value_pool, *ring, *death, *state_pool;  // the last three null for none
  int32_t *position_pool, *lengths;
  Report report;
};

template <class Backend>
void fork(
    const Tensor& sources, const Tensor& destinations, const Tensor& offsets, const Tensor& capacities,
    const Tensor& key_pool, const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& query_ring, const std::optional<Tensor>& death,
    const std::optional<Tensor>& state_pool, const std::optional<Tensor>& errors) {
  const PoolShape pool = check_pool<Backend>(key_pool);
  const auto [L, S, H] = check_layers(offsets, key_pool);
  const int64_t B = sources.dim() == 1 ? sources.size(0) : 0;
  check_tensor("sources", sources, key_pool, ScalarType::Long, {B});
  check_tensor("destinations", destinations, key_pool, ScalarType::Long, {B});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {L, S, H});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, pool.dim});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("lengths", lengths, key_pool, ScalarType::Int, {L, S, H});
  const ScalarType kind = query_ring ? computing_type(pool.dtype, *query_ring) : pool.dtype;
  check_tensor("query_ring", query_ring, key_pool, kind, {L, S, kAnySize, kAnySize, pool.dim});
  check_tensor("death", death, key_pool, event_type(death), {L, S, H, kAnySize});
  check_tensor("state_pool", state_pool, key_pool, ScalarType::Float, {pool.rows, kAnySize});
  const int64_t row_bytes = pool.dim * key_pool.element_size();
  const int64_t query_bytes = query_ring ? pool.dim * query_ring->element_size() : 0;
  const Fork op{
      pointer<int64_t>(sources), pointer<int64_t>(destinations), pointer<int64_t>(offsets),
      pointer<int32_t>(capacities), L, B, S, H, pool.rows, row_bytes, state_pool ? state_pool->size(1) * 4 : 0,
      query_ring ? query_ring->size(2) * query_ring->size(3) * query_bytes : 0,
      death ? death->size(3) * static_cast<int64_t>(death->element_size()) : 0,
      pointer<char>(key_pool), pointer<char>(value_pool), pointer<char>(query_ring), pointer<char>(death),
      pointer<char>(state_pool), pointer<int32_t>(position_pool), pointer<int32_t>(lengths),
      check_errors(errors, key_pool, Op::fork)};
  Backend::run(op, key_pool);
}

}  // namespace sparse_rl
