// evict: keep the best entries of each head in their order, record when the others died.
//
// One block per (layer, row, KV head) goes over the entries in chunks of 256. In place an entry never moves to a
// later row, so a batch of rows is loaded by all threads, and after a barrier stored: it overwrites only entries that
// were read.

#include "choice.cuh"
#include "evict.h"

namespace sparse_rl {
namespace {

constexpr int kBatch = 4;  // 16-byte words of K, and as many of V, that a thread holds at a time

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

__global__ void __launch_bounds__(kThreads) evict_kernel(Eviction op) {
  await_previous();
  __shared__ Shared shared;
  const auto rows = static_cast<unsigned>(op.num_rows), heads = static_cast<unsigned>(op.num_heads);
  const int64_t layer = blockIdx.x / heads / rows, b = blockIdx.x / heads % rows, h = blockIdx.x % heads;
  const int64_t slot = op.slots[b], row = blockIdx.x;
  const bool first = threadIdx.x == 0;  // reports errors
  if (slot == -1) return;
  if (slot < 0 || slot >= op.num_slots) {
    if (first) complain(op.report, Fault::slot, slot);
    return;
  }
  const bool in_place = op.in_place();
  const int64_t head = (layer * op.num_slots + slot) * op.num_heads + h;
  const int length = in_place ? op.lengths[head] : op.source_lengths[row];
  const int64_t base = op.offsets[head], from = in_place ? base : op.source_offsets[row];
  int budget = op.budgets[row] > 0 ? op.budgets[row] : 0;
  if (!in_place && budget > op.capacities[head]) {
    if (first && length > op.capacities[head]) complain(op.report, Fault::budget, slot);
    budget = op.capacities[head];
  }
  if (first && op.budgets[row] < 0) complain(op.report, Fault::budget, slot);
  const int most = length < budget ? length : budget;
  if (!inside(from, length, op.num_entries, in_place ? op.pool_rows : op.source_rows) ||
      !inside(base, most, most, op.pool_rows)) {
    if (first) complain(op.report, Fault::run, slot);
    return;
  }
  const bool everything = length <= budget;
  if (everything && in_place) return;
  int32_t* positions = op.position_pool + base;
  Choice choice{
      op.scores + row * op.num_entries, in_place ? positions : nullptr, length, budget, op.num_sinks, op.window};
  if (!everything) choice.settle(shared.choice);
  const int64_t event = op.death && !everything ? op.event(slot) : op.num_events;
  const bool has_event = event < op.num_events;
  // blocks of a slot write the same step to the same place, and read it as if it were not there yet
  if (first && has_event) op.record_step(slot, event);
  if (first && op.death && !everything && !has_event) complain(op.report, Fault::events, slot);
  const int row_words = static_cast<int>(op.row_bytes / 16), state_words = static_cast<int>(op.state_bytes / 4);
  const auto* from_keys = reinterpret_cast<const uint4*>(in_place ? op.key_pool : op.source_keys) + from * row_words;
  const auto* from_values =
      reinterpret_cast<const uint4*>(in_place ? op.value_pool : op.source_values) + from * row_words;
  auto* keys = reinterpret_cast<uint4*>(op.key_pool) + base * row_words;
  auto* values = reinterpret_cast<uint4*>(op.value_pool) + base * row_words;
  auto* state = reinterpret_cast<uint32_t*>(op.state_pool) + base * state_words;
  int ties_seen = 0, to = 0;
  for (int start = 0; start < length; start += kThreads) {
    const int j = start + static_cast<int>(threadIdx.x);
    const bool stays = everything ? j < length : choice.stays(j, ties_seen, shared.choice);
    if (!everything && j < length && choice.scores[j] != choice.scores[j]) complain(op.report, Fault::nan, slot);
    const int position = j >= length ? 0 : in_place ? positions[j] : j;
    const Count kept = count_block(stays, shared.choice.per_warp);  // its barriers: all positions have been read
    if (stays) {
      shared.kept[kept.before] = j;
      positions[to + kept.before] = position;
    } else if (j < length && has_event && position >= 0 && position < op.num_tokens) {
      op.record_death(head * op.num_tokens + position, event);
    } else if (j < length && has_event) {
      complain(op.report, Fault::position, slot);
    }
    __syncthreads();
    move_rows(from_keys, from_values, keys, values, shared.kept, kept.all, to, row_words, in_place);
    if (op.state_pool) move_state(state, shared.kept, kept.all, to, state_words);
    to += kept.all;
    __syncthreads();
  }
  if (!first) return;
  op.lengths[head] = to;
  const int64_t last = op.seen[slot] - 1;
  if (op.held && in_place && last >= 0 && last < op.held_tokens) {
    atomicAdd(op.held + slot * op.held_tokens + last, to - length);  // of integers: their order does not matter
  }
}

struct Kernel : Device {
  static void run(const Eviction& op, const Tensor& on) {
    check_aligned("value_pool", op.value_pool);
    check_aligned("source_keys", op.source_keys);
    check_aligned("source_values", op.source_values);
    launch(evict_kernel, op.num_layers * op.num_rows * op.num_heads, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("evict", TORCH_BOX(&evict<Kernel>)); }

}  // namespace sparse_rl
