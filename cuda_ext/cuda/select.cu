// select_and_compact, select_and_store: keep the best entries of each head in their order, record when the others died.
//
// One block per (layer, row, KV head) walks over the entries in chunks of 256. In place an entry never moves up, so a
// batch of rows is loaded by all threads, and after a barrier stored: it overwrites only what has been read.

#include "choice.cuh"

namespace sparse_rl {
namespace {

constexpr int kBatch = 4;  // 16-byte words of K, and as many of V, that a thread holds at a time

struct Event {
  const float* scores;     // (L, B, H, N)
  const int32_t* budgets;  // (L, B, H)
  int64_t num_sinks, window;
  const int64_t *slots, *seen, *offsets;
  int64_t num_rows, num_slots, num_heads, num_entries, pool_rows;
  int row_words, state_words;  // of 16 and of 4 bytes
  uint4 *key_pool, *value_pool;
  uint32_t* state_pool;  // null where there is none
  int32_t *position_pool, *lengths, *death;  // death (L, S, H, T) may be null
  int64_t num_tokens;
  // where the entries come from; null for in place
  const uint4 *source_keys, *source_values;
  const int64_t* source_offsets;  // (L, B, H)
  const int32_t *source_lengths, *capacities;
  int64_t source_rows;
};

struct Shared {
  Choice::Shared choice;
  int kept[kThreads];  // of the chunk, the entries that stay
};

// Rows kept[0] .. kept[count - 1] of the source go to rows `to` .. of the destination.
SPARSE_RL_DEVICE void move_rows(
    const uint4* from_keys, const uint4* from_values, uint4* keys, uint4* values, const int (&kept)[kThreads],
    int count, int to, int words, bool in_place) {
  const int all = count * words;
  for (int base = 0; base < all; base += kBatch * kThreads) {
    uint4 key[kBatch], value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int word = base + i * kThreads + static_cast<int>(threadIdx.x), r = word / words;
      if (word >= all || (in_place && kept[r] == to + r)) continue;
      const int64_t at = static_cast<int64_t>(kept[r]) * words + word % words;
      key[i] = from_keys[at], value[i] = from_values[at];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int word = base + i * kThreads + static_cast<int>(threadIdx.x), r = word / words;
      if (word >= all || (in_place && kept[r] == to + r)) continue;
      const int64_t at = static_cast<int64_t>(to + r) * words + word % words;
      keys[at] = key[i], values[at] = value[i];
    }
  }
}

// The same for running state in place, a word of 4 bytes at a time.
SPARSE_RL_DEVICE void move_state(uint32_t* state, const int (&kept)[kThreads], int count, int to, int words) {
  const int all = count * words;
  for (int base = 0; base < all; base += kThreads) {
    const int word = base + static_cast<int>(threadIdx.x), r = word / words;
    uint32_t held = 0;
    if (word < all) held = state[static_cast<int64_t>(kept[r]) * words + word % words];
    __syncthreads();
    if (word < all) state[static_cast<int64_t>(to + r) * words + word % words] = held;
  }
}

__global__ void __launch_bounds__(kThreads) select_kernel(Event op) {
  __shared__ Shared shared;
  const auto rows = static_cast<unsigned>(op.num_rows), heads = static_cast<unsigned>(op.num_heads);
  const int64_t layer = blockIdx.x / heads / rows, b = blockIdx.x / heads % rows, h = blockIdx.x % heads;
  const int64_t slot = op.slots[b], row = blockIdx.x;
  if (slot < 0 || slot >= op.num_slots) return;
  const bool in_place = !op.source_keys;
  const int64_t head = (layer * op.num_slots + slot) * op.num_heads + h;
  const int length = in_place ? op.lengths[head] : op.source_lengths[row];
  const int64_t base = op.offsets[head], from = in_place ? base : op.source_offsets[row];
  int budget = op.budgets[row] > 0 ? op.budgets[row] : 0;
  if (!in_place && budget > op.capacities[head]) budget = op.capacities[head];
  const int most = length < budget ? length : budget;
  if (!inside(from, length, op.num_entries, in_place ? op.pool_rows : op.source_rows)) return;
  if (!inside(base, most, most, op.pool_rows)) return;
  const bool everything = length <= budget;
  if (everything && in_place) return;
  int32_t* positions = op.position_pool + base;
  Choice choice{op.scores + row * op.num_entries, in_place ? positions : nullptr, length, budget, op.num_sinks, op.window};
  if (!everything) choice.settle(shared.choice);
  const uint4* from_keys = (in_place ? op.key_pool : op.source_keys) + from * op.row_words;
  const uint4* from_values = (in_place ? op.value_pool : op.source_values) + from * op.row_words;
  uint4 *keys = op.key_pool + base * op.row_words, *values = op.value_pool + base * op.row_words;
  int ties_seen = 0, to = 0;
  for (int start = 0; start < length; start += kThreads) {
    const int j = start + static_cast<int>(threadIdx.x);
    const bool stays = everything ? j < length : choice.stays(j, ties_seen, shared.choice);
    const int position = j >= length ? 0 : in_place ? positions[j] : j;
    const Count kept = count_block(stays, shared.choice.per_warp);  // its barriers: all positions have been read
    if (stays) {
      shared.kept[kept.before] = j;
      positions[to + kept.before] = position;
    } else if (j < length && op.death && position >= 0 && position < op.num_tokens) {
      op.death[head * op.num_tokens + position] = static_cast<int32_t>(op.seen[slot]);
    }
    __syncthreads();
    move_rows(from_keys, from_values, keys, values, shared.kept, kept.all, to, op.row_words, in_place);
    if (op.state_pool) move_state(op.state_pool + base * op.state_words, shared.kept, kept.all, to, op.state_words);
    to += kept.all;
    __syncthreads();
  }
  if (threadIdx.x == 0) op.lengths[head] = to;
}

// Shapes that both ops share, and the event without its source.
Event make_event(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& key_pool, const Tensor& value_pool,
    const Tensor& position_pool, const Tensor& lengths, const std::optional<Tensor>& death) {
  const PoolShape pool = check_device_pool(key_pool);
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
  check_aligned("value_pool", value_pool);
  STD_TORCH_CHECK(num_sinks >= 0 && window >= 0, "num_sinks and window must not be negative, got ", num_sinks, " and ", window);
  const bool known = pool.dtype == ScalarType::Float || pool.dtype == ScalarType::BFloat16 || pool.dtype == ScalarType::Half;
  STD_TORCH_CHECK(known, "the pools are ", dtype_text(pool.dtype), ": call the .reference overload");
  Event event{};
  event.scores = data<float>(scores), event.budgets = data<int32_t>(budgets);
  event.num_sinks = num_sinks, event.window = window;
  event.slots = data<int64_t>(slots), event.seen = data<int64_t>(seen), event.offsets = data<int64_t>(offsets);
  event.num_rows = B, event.num_slots = S, event.num_heads = H, event.num_entries = N, event.pool_rows = pool.rows;
  event.row_words = static_cast<int>(pool.dim / (pool.dtype == ScalarType::Float ? 4 : 8));
  event.key_pool = data<uint4>(key_pool), event.value_pool = data<uint4>(value_pool);
  event.position_pool = data<int32_t>(position_pool), event.lengths = data<int32_t>(lengths);
  event.death = death ? data<int32_t>(*death) : nullptr, event.num_tokens = tokens;
  return event;
}

void run(const Event& event, int64_t num_layers, const Tensor& key_pool) {
  launch(select_kernel, num_layers * event.num_rows * event.num_heads, 1, kThreads, key_pool, event);
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
    event.state_pool = columns > 0 ? data<uint32_t>(*state_pool) : nullptr;
    event.state_words = static_cast<int>(columns);
  }
  run(event, offsets.size(0), key_pool);
}

void select_and_store(
    const Tensor& scores, const Tensor& budgets, int64_t num_sinks, int64_t window, const Tensor& source_keys,
    const Tensor& source_values, const Tensor& source_offsets, const Tensor& source_lengths, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& capacities, const Tensor& key_pool,
    const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& death) {
  Event event = make_event(
      scores, budgets, num_sinks, window, slots, seen, offsets, key_pool, value_pool, position_pool, lengths, death);
  const int64_t L = offsets.size(0), B = event.num_rows, H = event.num_heads, D = key_pool.size(1);
  const int64_t rows = source_keys.dim() == 2 ? source_keys.size(0) : 0;
  check_tensor("source_keys", source_keys, key_pool, key_pool.scalar_type(), {rows, D});
  check_tensor("source_values", source_values, key_pool, key_pool.scalar_type(), {rows, D});
  check_tensor("source_offsets", source_offsets, key_pool, ScalarType::Long, {L, B, H});
  check_tensor("source_lengths", source_lengths, key_pool, ScalarType::Int, {L, B, H});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {L, event.num_slots, H});
  check_aligned("source_keys", source_keys);
  check_aligned("source_values", source_values);
  event.source_keys = data<uint4>(source_keys), event.source_values = data<uint4>(source_values);
  event.source_offsets = data<int64_t>(source_offsets), event.source_lengths = data<int32_t>(source_lengths);
  event.capacities = data<int32_t>(capacities), event.source_rows = rows;
  if (rows > 0) run(event, L, key_pool);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) {
  m.impl("select_and_compact", TORCH_BOX(&select_and_compact));
  m.impl("select_and_store", TORCH_BOX(&select_and_store));
}

}  // namespace sparse_rl
