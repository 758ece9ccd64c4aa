// score_entries as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "entries.h"
#include "keyed_random.h"

namespace sparse_rl {

enum class Method { position, random, key_norm, key_difference, mass, shared };

inline Method method_of(const std::string& name) {
  const char* names[] = {"position", "random", "key_norm", "key_difference", "mass", "shared"};
  for (int i = 0; i < 6; ++i) {
    if (name == names[i]) return static_cast<Method>(i);
  }
  STD_TORCH_CHECK(
      false, "method is '", name, "', expected position, random, key_norm, key_difference, mass or shared");
}

template <class P>
struct EntryScores {
  Entries entries;
  const P *keys, *values;                                       // (R, D)
  const int32_t* positions;                                     // (R)
  const float* state;                                           // (R, state_width), null for none
  int64_t state_width;
  const int64_t *seen, *prompt_lengths, *prompt_keys, *slot_keys;  // (S)
  const float* given;                                           // (L, B, H, N), null for none
  float* out;                                                   // (L, B, H, N)
  Method method;
  bool by_age, by_value;

  SPARSE_RL_DEVICE float random(const Span& span, int position) const {
    const int64_t key = position < prompt_lengths[span.slot] ? prompt_keys[span.slot] : slot_keys[span.slot];
    return keyed_float(mix(mix(mix(mix(0, key), span.layer), span.h), position));
  }

  // The running number of an entry in row `at` of the pools, without the norm of its value.
  SPARSE_RL_DEVICE float mass(const Span& span, int64_t at) const {
    const float sum = state[at * state_width];
    return by_age ? sum / static_cast<float>(seen[span.slot] - positions[at]) : sum;
  }

  // The mean of the given scores of a position over the heads of the slot that have it; u is one of those heads.
  SPARSE_RL_DEVICE float shared(const Span& span, int64_t u, int position) const {
    float total = 0;
    int holders = 0;
    for (int64_t h = 0; h < entries.num_heads; ++h) {
      const int64_t other = u - span.h + h;
      const Span there = entries.span(other);
      if (there.length < 0 || there.length > entries.num_entries || there.start < 0 ||
          there.start > entries.pool_rows - there.length) {
        continue;
      }
      int low = 0, high = there.length;  // the first entry at this position or later
      while (low < high) {
        const int middle = (low + high) / 2;
        if (positions[there.start + middle] < position) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      if (low == there.length || positions[there.start + low] != position) continue;
      total += given[other * entries.num_entries + low];
      ++holders;
    }
    return total / static_cast<float>(holders > 0 ? holders : 1);
  }
};

template <class Backend>
void score_entries(
    const Tensor& key_pool, const Tensor& value_pool, const Tensor& position_pool,
    const std::optional<Tensor>& state_pool, const Tensor& slots, const Tensor& seen, const Tensor& offsets,
    const Tensor& lengths, const Tensor& prompt_lengths, const Tensor& prompt_keys, const Tensor& slot_keys,
    StringHandle method, bool by_age, bool by_value, const std::optional<Tensor>& given, const Tensor& entry_scores,
    const std::optional<Tensor>& errors) {
  const Method kind = method_of(take_string(method));
  const Entries all = check_entries<Backend>(
      key_pool, slots, offsets, lengths, entry_scores, "entry_scores", errors, Op::score_entries);
  const int64_t S = all.num_slots;
  check_tensor("value_pool", value_pool, key_pool, key_pool.scalar_type(), {all.pool_rows, all.dim});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {all.pool_rows});
  check_tensor("state_pool", state_pool, key_pool, ScalarType::Float, {all.pool_rows, kAnySize});
  check_tensor("seen", seen, key_pool, ScalarType::Long, {S});
  check_tensor("prompt_lengths", prompt_lengths, key_pool, ScalarType::Long, {S});
  check_tensor("prompt_keys", prompt_keys, key_pool, ScalarType::Long, {S});
  check_tensor("slot_keys", slot_keys, key_pool, ScalarType::Long, {S});
  check_tensor(
      "given", given, key_pool, ScalarType::Float, {all.num_layers, all.num_rows, all.num_heads, all.num_entries});
  STD_TORCH_CHECK((kind == Method::shared) == given.has_value(), "given belongs to the method shared, and to no other");
  const int64_t width = state_pool.has_value() ? state_pool->size(1) : 0;
  STD_TORCH_CHECK(kind != Method::mass || width > 0, "the method mass needs a state_pool with a number per entry");
  const ScalarType dtype = key_pool.scalar_type();
  Backend::dispatch(dtype, dtype == ScalarType::Float8_e4m3fn ? ScalarType::Float : dtype, [&](auto, auto stored) {
    using P = decltype(stored);
    const EntryScores<P> op{
        all, pointer<P>(key_pool), pointer<P>(value_pool), pointer<int32_t>(position_pool),
        pointer<float>(state_pool), width, pointer<int64_t>(seen), pointer<int64_t>(prompt_lengths),
        pointer<int64_t>(prompt_keys), pointer<int64_t>(slot_keys), pointer<float>(given),
        pointer<float>(entry_scores), kind, by_age, by_value};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
