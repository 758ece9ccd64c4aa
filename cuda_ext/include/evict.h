// evict as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "heads.h"

namespace sparse_rl {

// Pools are bytes of any type.
struct Eviction {
  const float* scores;     // (L, B, H, N)
  const int32_t* budgets;  // (L, B, H)
  int64_t num_sinks, window;
  const int64_t *slots, *seen, *offsets;
  const int32_t* capacities;
  int64_t num_layers, num_rows, num_slots, num_heads, num_entries, pool_rows, row_bytes;
  char *key_pool, *value_pool;
  int32_t *position_pool, *lengths;
  void* death;  // (L, S, H, T) number of the event at which each token died, null for none
  int64_t death_bytes, num_tokens;
  int32_t* event_steps;  // (S, E) steps of the events of each slot, which ascend, behind them larger numbers
  int64_t num_events;
  char* state_pool;     // running state, null for none
  int64_t state_bytes;  // per entry
  // source of the entries, null for in place
  const char *source_keys, *source_values;
  const int64_t* source_offsets;  // (L, B, H)
  const int32_t* source_lengths;  // (L, B, H)
  int64_t source_rows;
  Report report;
  int32_t* held;       // (S, held_tokens) entries of all layers and heads by token, null for none; in place only
  int64_t held_tokens;

  SPARSE_RL_DEVICE bool in_place() const { return !source_lengths; }

  // The number of the event at the slot's length, num_events if there is none left. Every layer and head finds the
  // same, whether or not one of them has written the step already.
  SPARSE_RL_DEVICE int64_t event(int64_t slot) const {
    const int32_t* steps = event_steps + slot * num_events;
    int64_t first = 0, last = num_events;
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (steps[middle] < seen[slot]) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }

  SPARSE_RL_DEVICE void record_step(int64_t slot, int64_t number) const {
    event_steps[slot * num_events + number] = static_cast<int32_t>(seen[slot]);
  }

  SPARSE_RL_DEVICE void record_death(int64_t at, int64_t number) const {
    if (death_bytes == 1) {
      static_cast<uint8_t*>(death)[at] = static_cast<uint8_t>(number);
    } else if (death_bytes == 2) {
      static_cast<int16_t*>(death)[at] = static_cast<int16_t>(number);
    } else {
      static_cast<int32_t*>(death)[at] = static_cast<int32_t>(number);
    }
  }
};

template <class Backend>
void evict(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& capacities, const Tensor& key_pool,
    const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths, const std::optional<Tensor>& death,
    const std::optional<Tensor>& state_pool, const std::optional<Tensor>& source_keys,
    const std::optional<Tensor>& source_values, const std::optional<Tensor>& source_offsets,
    const std::optional<Tensor>& source_lengths, const std::optional<Tensor>& errors,
    const std::optional<Tensor>& held, const std::optional<Tensor>& event_steps) {
  const PoolShape pool = check_pool<Backend>(key_pool);
  const auto [L, S, H] = check_layers(offsets, key_pool);
  const int64_t B = slots.dim() == 1 ? slots.size(0) : 0, N = scores.dim() == 4 ? scores.size(3) : 0;
  const int64_t tokens = death.has_value() && death->dim() == 4 ? death->size(3) : 0;
  const int64_t events = event_steps.has_value() && event_steps->dim() == 2 ? event_steps->size(1) : 0;
  const int64_t source_rows = source_keys.has_value() && source_keys->dim() == 2 ? source_keys->size(0) : 0;
  const bool in_place = !source_lengths.has_value();
  check_tensor("scores", scores, key_pool, ScalarType::Float, {L, B, H, N});
  check_tensor("budgets", budgets, key_pool, ScalarType::Int, {L, B, H});
  check_tensor("slots", slots, key_pool, ScalarType::Long, {B});
  check_tensor("seen", seen, key_pool, ScalarType::Long, {S});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {L, S, H});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, pool.dim});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("lengths", lengths, key_pool, ScalarType::Int, {L, S, H});
  check_tensor("death", death, key_pool, event_type(death), {L, S, H, tokens});
  check_tensor("event_steps", event_steps, key_pool, ScalarType::Int, {S, events});
  check_tensor("state_pool", state_pool, key_pool, ScalarType::Float, {pool.rows, kAnySize});
  check_tensor("source_keys", source_keys, key_pool, pool.dtype, {source_rows, pool.dim});
  check_tensor("source_values", source_values, key_pool, pool.dtype, {source_rows, pool.dim});
  check_tensor("source_offsets", source_offsets, key_pool, ScalarType::Long, {L, B, H});
  check_tensor("source_lengths", source_lengths, key_pool, ScalarType::Int, {L, B, H});
  check_tensor("held", held, key_pool, ScalarType::Int, {S, kAnySize});
  STD_TORCH_CHECK(
      in_place != source_keys.has_value() && in_place != source_values.has_value() &&
          in_place != source_offsets.has_value() && (in_place || !state_pool.has_value()),
      "give all four tensors of a source and no state_pool, or none of the four");
  STD_TORCH_CHECK(
      num_sinks >= 0 && window >= 0, "num_sinks and window must not be negative, got ", num_sinks, " and ", window);
  STD_TORCH_CHECK(death.has_value() == event_steps.has_value(), "give both death and event_steps, or neither");
  const int64_t death_bytes = death ? static_cast<int64_t>(death->element_size()) : 0;
  const int64_t most = death_bytes == 1 ? 255 : death_bytes == 2 ? 32767 : 2147483647;  // which says never
  STD_TORCH_CHECK(
      events <= most, "event_steps has ", events, " columns, death of ", dtype_text(event_type(death)), " takes ",
      most);
  const int64_t state_bytes = state_pool ? state_pool->size(1) * 4 : 0;
  const Eviction op{
      pointer<float>(scores), pointer<int32_t>(budgets), num_sinks, window, pointer<int64_t>(slots),
      pointer<int64_t>(seen), pointer<int64_t>(offsets), pointer<int32_t>(capacities), L, B, S, H, N, pool.rows,
      pool.dim * static_cast<int64_t>(key_pool.element_size()), pointer<char>(key_pool), pointer<char>(value_pool),
      pointer<int32_t>(position_pool), pointer<int32_t>(lengths), pointer<void>(death), death_bytes, tokens,
      pointer<int32_t>(event_steps), events, state_bytes > 0 ? pointer<char>(state_pool) : nullptr, state_bytes,
      pointer<char>(source_keys), pointer<char>(source_values), pointer<int64_t>(source_offsets),
      pointer<int32_t>(source_lengths), source_rows, check_errors(errors, key_pool, Op::evict),
      pointer<int32_t>(held), held.has_value() ? held->size(1) : 0};
  Backend::run(op, key_pool);
}

}  // namespace sparse_rl
