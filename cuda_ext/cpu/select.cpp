// select_and_compact, select_and_store: keep the best entries of each head in their order, record when the others died.
//
// The first closes ranks in place: an entry never moves up, so one pass from the front overwrites only what was read.
// The second copies the survivors of freshly read prompts into their slots.

#include "heads.h"
#include "select.h"
#include "vec.h"

#include <atomic>

namespace sparse_rl {
namespace {

struct Event {
  const float* scores;     // (L, B, H, N)
  const int32_t* budgets;  // (L, B, H)
  int64_t num_sinks, window, num_entries;
  const int64_t *slots, *seen, *offsets;
  int64_t num_layers, num_rows, num_slots, num_heads;
  size_t row_bytes, state_bytes;
  char *key_pool, *value_pool, *state_pool;  // state_pool may be null
  int32_t *position_pool, *lengths, *death;  // death (L, S, H, T) may be null
  int64_t num_tokens;
  // where the entries come from; null for in place
  const char *source_keys, *source_values;
  const int64_t* source_offsets;  // (L, B, H)
  const int32_t* source_lengths;

  int64_t index(int64_t layer, int64_t b, int64_t h) const {
    return (layer * num_slots + slots[b]) * num_heads + h;
  }

  // Entries [first, end) of the source become entries `to` and on.
  void move(int64_t from, int64_t base, int64_t first, int64_t end, int64_t to) const {
    const size_t bytes = (end - first) * row_bytes;
    const bool in_place = !source_keys;
    if (in_place && first == to) return;
    std::memmove(key_pool + (base + to) * row_bytes, (in_place ? key_pool : source_keys) + (from + first) * row_bytes, bytes);
    std::memmove(
        value_pool + (base + to) * row_bytes, (in_place ? value_pool : source_values) + (from + first) * row_bytes, bytes);
    if (in_place) {
      std::memmove(position_pool + base + to, position_pool + base + first, (end - first) * sizeof(int32_t));
      if (state_pool) {
        std::memmove(state_pool + (base + to) * state_bytes, state_pool + (base + first) * state_bytes, (end - first) * state_bytes);
      }
    } else {
      for (int64_t j = first; j < end; ++j) position_pool[base + to + j - first] = static_cast<int32_t>(j);
    }
  }

  // Returns whether all positions fitted the death record.
  bool unit(int64_t layer, int64_t b, int64_t h) const {
    const int64_t slot = slots[b];
    if (slot < 0) return true;
    const int64_t i = index(layer, b, h), row = (layer * num_rows + b) * num_heads + h;
    const int64_t length = source_keys ? source_lengths[row] : lengths[i];
    const int64_t base = offsets[i], from = source_keys ? source_offsets[row] : base;
    const int32_t* positions = source_keys ? nullptr : position_pool + base;
    Choice choice{scores + row * num_entries, positions, length, budgets[row], num_sinks, window};
    choice.settle();
    int64_t kept = 0, run = 0;  // entries [run, j) stay together
    bool fits = true;
    for (int64_t j = 0; j < length; ++j) {
      // the position must be read before a move can overwrite it: moves end before j
      if (choice.stays(j)) continue;
      const int64_t position = positions ? positions[j] : j;
      if (death && position >= 0 && position < num_tokens) {
        death[i * num_tokens + position] = static_cast<int32_t>(seen[slot]);
      } else if (death) {
        fits = false;
      }
      move(from, base, run, j, kept);
      kept += j - run;
      run = j + 1;
    }
    move(from, base, run, length, kept);
    lengths[i] = static_cast<int32_t>(kept + length - run);
    return fits;
  }

  void run() const {
    std::atomic<bool> fits{true};
    torch::stable::parallel_for(0, num_layers * num_rows * num_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) {
        if (!unit(u / (num_rows * num_heads), u / num_heads % num_rows, u % num_heads)) fits = false;
      }
    });
    STD_TORCH_CHECK(fits, "a position lies outside the death record of ", num_tokens, " tokens");
  }
};

// Shapes that both ops share, and the event without its source.
Event make_event(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& key_pool, const Tensor& value_pool,
    const Tensor& position_pool, const Tensor& lengths, const std::optional<Tensor>& death) {
  const PoolShape pool = check_key_pool(key_pool);
  STD_TORCH_CHECK(
      offsets.dim() == 3, "offsets must be (layers, slots, KV heads), got ", offsets.dim(), " dimensions");
  const int64_t L = offsets.size(0), S = offsets.size(1), H = offsets.size(2);
  const int64_t B = slots.dim() == 1 ? slots.size(0) : 0, N = scores.dim() == 4 ? scores.size(3) : 0;
  const int64_t tokens = death.has_value() && death->dim() == 4 ? death->size(3) : 0;
  check_tensor("scores", scores, key_pool, ScalarType::Float, {L, B, H, N});
  check_tensor("budgets", budgets, key_pool, ScalarType::Int, {L, B, H});
  check_tensor("slots", slots, key_pool, ScalarType::Long, {B});
  check_tensor("seen", seen, key_pool, ScalarType::Long, {S});
  check_tensor("offsets", offsets, key_pool, ScalarType::Long, {L, S, H});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, pool.dim});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("lengths", lengths, key_pool, ScalarType::Int, {L, S, H});
  check_tensor("death", death, key_pool, ScalarType::Int, {L, S, H, tokens});
  STD_TORCH_CHECK(num_sinks >= 0 && window >= 0, "num_sinks and window must not be negative, got ", num_sinks, " and ", window);
  auto bytes = [](const Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); };
  const size_t item = pool.dtype == ScalarType::Double ? 8 : pool.dtype == ScalarType::Float ? 4 : 2;
  return {
      data<float>(scores), data<int32_t>(budgets), num_sinks, window, N, data<int64_t>(slots), data<int64_t>(seen),
      data<int64_t>(offsets), L, B, S, H, pool.dim * item, 0, bytes(key_pool), bytes(value_pool), nullptr,
      data<int32_t>(position_pool), data<int32_t>(lengths), death ? data<int32_t>(*death) : nullptr, tokens, nullptr,
      nullptr, nullptr, nullptr};
}

void check_slots(const Event& event) {
  for (int64_t b = 0; b < event.num_rows; ++b) check_slot(event.slots[b], event.num_slots);
}

template <class F>
void for_units(const Event& event, F&& f) {
  check_slots(event);
  for (int64_t layer = 0; layer < event.num_layers; ++layer) {
    for (int64_t b = 0; b < event.num_rows; ++b) {
      for (int64_t h = 0; h < event.num_heads && event.slots[b] >= 0; ++h) {
        f(event.index(layer, b, h), (layer * event.num_rows + b) * event.num_heads + h);
      }
    }
  }
}

void select_and_compact(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& key_pool, const Tensor& value_pool,
    const Tensor& position_pool, const Tensor& lengths, const std::optional<Tensor>& death,
    const std::optional<Tensor>& state_pool) {
  Event event = make_event(
      scores, budgets, num_sinks, window, slots, seen, offsets, key_pool, value_pool, position_pool, lengths, death);
  if (state_pool.has_value()) {
    const int64_t columns = state_pool->dim() == 2 ? state_pool->size(1) : 0;
    check_tensor("state_pool", state_pool, key_pool, ScalarType::Float, {key_pool.size(0), columns});
    event.state_pool = static_cast<char*>(state_pool->mutable_data_ptr());
    event.state_bytes = columns * sizeof(float);
  }
  for_units(event, [&](int64_t i, int64_t row) {
    check_run(event.offsets[i], event.lengths[i], event.num_entries, "the entries of scores", key_pool.size(0));
    STD_TORCH_CHECK(event.budgets[row] >= 0, "a budget is ", event.budgets[row], ", expected 0 or more entries");
  });
  event.run();
}

void select_and_store(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& source_keys,
    const Tensor& source_values, const Tensor& source_offsets, const Tensor& source_lengths, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& capacities, const Tensor& key_pool,
    const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& death) {
  Event event = make_event(
      scores, budgets, num_sinks, window, slots, seen, offsets, key_pool, value_pool, position_pool, lengths, death);
  const int64_t L = event.num_layers, B = event.num_rows, H = event.num_heads, D = key_pool.size(1);
  const int64_t rows = source_keys.dim() == 2 ? source_keys.size(0) : 0;
  check_tensor("source_keys", source_keys, key_pool, key_pool.scalar_type(), {rows, D});
  check_tensor("source_values", source_values, key_pool, key_pool.scalar_type(), {rows, D});
  check_tensor("source_offsets", source_offsets, key_pool, ScalarType::Long, {L, B, H});
  check_tensor("source_lengths", source_lengths, key_pool, ScalarType::Int, {L, B, H});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {L, event.num_slots, H});
  event.source_keys = static_cast<const char*>(source_keys.mutable_data_ptr());
  event.source_values = static_cast<const char*>(source_values.mutable_data_ptr());
  event.source_offsets = data<int64_t>(source_offsets);
  event.source_lengths = data<int32_t>(source_lengths);
  const int32_t* room = data<int32_t>(capacities);
  for_units(event, [&](int64_t i, int64_t row) {
    const int64_t length = event.source_lengths[row], budget = event.budgets[row];
    check_run(event.source_offsets[row], length, event.num_entries, "the entries of scores", rows);
    STD_TORCH_CHECK(budget >= 0, "a budget is ", budget, ", expected 0 or more entries");
    check_run(event.offsets[i], length < budget ? length : budget, room[i], "its capacity", key_pool.size(0));
  });
  if (rows > 0) event.run();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) {
  m.impl("select_and_compact", TORCH_BOX(&select_and_compact));
  m.impl("select_and_store", TORCH_BOX(&select_and_store));
}

}  // namespace sparse_rl
