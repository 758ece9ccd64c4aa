// select_and_compact and select_and_store as torch calls them: arguments, their check, and what a kernel gets of them.
#pragma once

#include "heads.h"

namespace sparse_rl {

// Pools are bytes, whatever they mean.
struct Event {
  const float* scores;     // (L, B, H, N)
  const int32_t* budgets;  // (L, B, H)
  int64_t num_sinks, window;
  const int64_t *slots, *seen, *offsets;
  int64_t num_layers, num_rows, num_slots, num_heads, num_entries, pool_rows, row_bytes;
  char *key_pool, *value_pool;
  int32_t *position_pool, *lengths, *death;  // death (L, S, H, T), null for none
  int64_t num_tokens;
  Report report;
  // in place only: running state, null for none
  char* state_pool = nullptr;
  int64_t state_bytes = 0;  // per entry
  // from other memory only: where the entries come from, null for in place
  const char *source_keys = nullptr, *source_values = nullptr;
  const int64_t* source_offsets = nullptr;                          // (L, B, H)
  const int32_t *source_lengths = nullptr, *capacities = nullptr;  // (L, B, H), (L, S, H)
  int64_t source_rows = 0;

  SPARSE_RL_DEVICE bool in_place() const { return !source_lengths; }
};

// What both ops share.
template <class Backend>
Event make_event(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& key_pool, const Tensor& value_pool,
    const Tensor& position_pool, const Tensor& lengths, const std::optional<Tensor>& death, Report report) {
  const PoolShape pool = Backend::check_pool(key_pool);
  const auto [L, S, H] = check_layers(offsets, key_pool);
  const int64_t B = slots.dim() == 1 ? slots.size(0) : 0, N = scores.dim() == 4 ? scores.size(3) : 0;
  const int64_t tokens = death.has_value() && death->dim() == 4 ? death->size(3) : 0;
  check_tensor("scores", scores, key_pool, ScalarType::Float, {L, B, H, N});
  check_tensor("budgets", budgets, key_pool, ScalarType::Int, {L, B, H});
  check_tensor("slots", slots, key_pool, ScalarType::Long, {B});
  check_tensor("seen", seen, key_pool, ScalarType::Long, {S});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, pool.dim});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("lengths", lengths, key_pool, ScalarType::Int, {L, S, H});
  check_tensor("death", death, key_pool, ScalarType::Int, {L, S, H, tokens});
  STD_TORCH_CHECK(
      num_sinks >= 0 && window >= 0, "num_sinks and window must not be negative, got ", num_sinks, " and ", window);
  return {
      pointer<float>(scores), pointer<int32_t>(budgets), num_sinks, window, pointer<int64_t>(slots),
      pointer<int64_t>(seen), pointer<int64_t>(offsets), L, B, S, H, N, pool.rows,
      pool.dim * static_cast<int64_t>(key_pool.element_size()), pointer<char>(key_pool), pointer<char>(value_pool),
      pointer<int32_t>(position_pool), pointer<int32_t>(lengths), pointer<int32_t>(death), tokens, report};
}

template <class Backend>
void select_and_compact(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& key_pool, const Tensor& value_pool,
    const Tensor& position_pool, const Tensor& lengths, const std::optional<Tensor>& death,
    const std::optional<Tensor>& state_pool, const std::optional<Tensor>& errors) {
  Event event = make_event<Backend>(
      scores, budgets, num_sinks, window, slots, seen, offsets, key_pool, value_pool, position_pool, lengths, death,
      check_errors(errors, key_pool, Op::select_and_compact));
  check_tensor("state_pool", state_pool, key_pool, ScalarType::Float, {event.pool_rows, kAnySize});
  if (state_pool && state_pool->size(1) > 0) {
    event.state_pool = pointer<char>(state_pool);
    event.state_bytes = state_pool->size(1) * 4;
  }
  Backend::run(event, key_pool);
}

template <class Backend>
void select_and_store(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& source_keys,
    const Tensor& source_values, const Tensor& source_offsets, const Tensor& source_lengths, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& capacities, const Tensor& key_pool,
    const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& death, const std::optional<Tensor>& errors) {
  Event event = make_event<Backend>(
      scores, budgets, num_sinks, window, slots, seen, offsets, key_pool, value_pool, position_pool, lengths, death,
      check_errors(errors, key_pool, Op::select_and_store));
  const int64_t L = event.num_layers, B = event.num_rows, H = event.num_heads, D = key_pool.size(1);
  event.source_rows = source_keys.dim() == 2 ? source_keys.size(0) : 0;
  check_tensor("source_keys", source_keys, key_pool, key_pool.scalar_type(), {event.source_rows, D});
  check_tensor("source_values", source_values, key_pool, key_pool.scalar_type(), {event.source_rows, D});
  check_tensor("source_offsets", source_offsets, key_pool, ScalarType::Long, {L, B, H});
  check_tensor("source_lengths", source_lengths, key_pool, ScalarType::Int, {L, B, H});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {L, event.num_slots, H});
  event.source_keys = pointer<char>(source_keys), event.source_values = pointer<char>(source_values);
  event.source_offsets = pointer<int64_t>(source_offsets);
  event.source_lengths = pointer<int32_t>(source_lengths);
  event.capacities = pointer<int32_t>(capacities);
  Backend::run(event, key_pool);
}

}  // namespace sparse_rl
