// evict: keep the best entries of each head in their order, record when the others died.
//
// In place the survivors close up at the front: an entry never moves to a later row, so one pass from the front
// overwrites only entries that were read. With a source they are copied from there.

#include "backend.h"
#include "choice.h"
#include "evict.h"

#include <algorithm>
#include <atomic>

namespace sparse_rl {
namespace {

// One KV head of one layer and row b of the call.
struct Unit {
  const Eviction& op;
  int64_t slot, head, row;  // head (layer, slot, KV head) of the state, row (layer, b, KV head) of the call
  int64_t base, from, length;  // first row of the destination and of the source, live entries of the source

  Unit(const Eviction& op_, int64_t layer, int64_t b, int64_t h) : op(op_), slot(op.slots[b]) {
    head = (layer * op.num_slots + slot) * op.num_heads + h;
    row = (layer * op.num_rows + b) * op.num_heads + h;
    base = op.offsets[head];
    from = op.in_place() ? base : op.source_offsets[row];
    length = op.in_place() ? op.lengths[head] : op.source_lengths[row];
  }

  void check() const {
    const int64_t budget = op.budgets[row];
    check_run(from, length, op.num_entries, "the entries of scores", op.in_place() ? op.pool_rows : op.source_rows);
    STD_TORCH_CHECK(budget >= 0, "a budget is ", budget, ", expected 0 or more entries");
    if (!op.in_place()) check_run(base, std::min(length, budget), op.capacities[head], "its capacity", op.pool_rows);
    STD_TORCH_CHECK(
        !dies() || op.event(slot) < op.num_events, "slot ", slot, " has no number left for an event, of ",
        op.num_events);
  }

  // Whether deaths are recorded.
  bool dies() const { return op.death && length > op.budgets[row]; }

  void copy(char* pool, const char* source, int64_t bytes, int64_t first, int64_t end, int64_t to) const {
    std::memmove(pool + (base + to) * bytes, source + (from + first) * bytes, (end - first) * bytes);
  }

  // Entries [first, end) of the source become entries `to` and following.
  void move(int64_t first, int64_t end, int64_t to) const {
    if (first == end || (op.in_place() && first == to)) return;
    copy(op.key_pool, op.in_place() ? op.key_pool : op.source_keys, op.row_bytes, first, end, to);
    copy(op.value_pool, op.in_place() ? op.value_pool : op.source_values, op.row_bytes, first, end, to);
    if (op.in_place()) {
      auto* positions = reinterpret_cast<char*>(op.position_pool);
      copy(positions, positions, sizeof(int32_t), first, end, to);
      if (op.state_pool) copy(op.state_pool, op.state_pool, op.state_bytes, first, end, to);
    } else {
      for (int64_t j = first; j < end; ++j) op.position_pool[base + to + j - first] = static_cast<int32_t>(j);
    }
  }

  // Returns whether all positions fit into the death record.
  bool run() const {
    const int32_t* positions = op.in_place() ? op.position_pool + base : nullptr;
    Choice choice{op.scores + row * op.num_entries, positions, length, op.budgets[row], op.num_sinks, op.window};
    choice.settle();
    const int64_t event = dies() ? op.event(slot) : 0;
    int64_t kept = 0, start = 0;  // entries [start, j) stay together
    bool fits = true;
    for (int64_t j = 0; j < length; ++j) {
      // the position must be read before a move can overwrite it: moves end before j
      if (choice.stays(j)) continue;
      const int64_t position = positions ? positions[j] : j;
      if (op.death && position >= 0 && position < op.num_tokens) {
        op.record_death(head * op.num_tokens + position, event);
      } else if (op.death) {
        fits = false;
      }
      move(start, j, kept);
      kept += j - start;
      start = j + 1;
    }
    move(start, length, kept);
    op.lengths[head] = static_cast<int32_t>(kept + length - start);
    return fits;
  }
};

// Subtract what each slot holds from its count at its last token, or add it with the sign turned.
void note_held(const Eviction& op, int sign) {
  for (int64_t b = 0; op.held && b < op.num_rows; ++b) {
    const int64_t slot = op.slots[b], last = slot < 0 ? -1 : op.seen[slot] - 1;
    if (last < 0 || last >= op.held_tokens) continue;
    for (int64_t i = 0; i < op.num_layers * op.num_heads; ++i) {
      const int64_t head = (i / op.num_heads * op.num_slots + slot) * op.num_heads + i % op.num_heads;
      op.held[slot * op.held_tokens + last] -= sign * op.lengths[head];
    }
  }
}

struct Kernel : Cpu {
  static void run(const Eviction& op, const Tensor&) {
    const int64_t heads = op.num_heads, units = op.num_layers * op.num_rows * heads;
    auto unit = [&](int64_t u) { return Unit(op, u / (op.num_rows * heads), u / heads % op.num_rows, u % heads); };
    for (int64_t b = 0; b < op.num_rows; ++b) check_slot(op.slots[b], op.num_slots);
    auto used = [&](int64_t u) { return op.slots[u / heads % op.num_rows] >= 0; };
    for (int64_t u = 0; u < units; ++u) {
      if (used(u)) unit(u).check();
    }
    for (int64_t u = 0; u < units; ++u) {
      if (used(u) && unit(u).dies()) op.record_step(unit(u).slot, op.event(unit(u).slot));
    }
    note_held(op, 1);
    std::atomic<bool> fits{true};
    torch::stable::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) {
        if (used(u) && !unit(u).run()) fits = false;
      }
    });
    note_held(op, -1);
    STD_TORCH_CHECK(fits, "a position lies outside the death record of ", op.num_tokens, " tokens");
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("evict", TORCH_BOX(&evict<Kernel>)); }

}  // namespace sparse_rl
