// fork: copy the content of a slot to other slots, all layers at once; only live entries are moved.

#include "backend.h"
#include "fork.h"

namespace sparse_rl {
namespace {

bool skipped(const Fork& op, int64_t pair) {
  const int64_t source = op.sources[pair], destination = op.destinations[pair];
  return source < 0 || destination < 0 || source == destination;
}

void copy(char* pool, int64_t bytes, int64_t to, int64_t from, int64_t count) {
  if (pool && bytes * count > 0) std::memcpy(pool + to * bytes, pool + from * bytes, count * bytes);
}

void fork_pair(const Fork& op, int64_t layer, int64_t pair) {
  if (skipped(op, pair)) return;
  const int64_t source = layer * op.num_slots + op.sources[pair];
  const int64_t destination = layer * op.num_slots + op.destinations[pair];
  copy(op.ring, op.ring_bytes, destination, source, 1);
  for (int64_t h = 0; h < op.num_heads; ++h) {
    const int64_t from = source * op.num_heads + h, to = destination * op.num_heads + h;
    const int64_t start = op.offsets[from], place = op.offsets[to], length = op.lengths[from];
    copy(op.key_pool, op.row_bytes, place, start, length);
    copy(op.value_pool, op.row_bytes, place, start, length);
    copy(reinterpret_cast<char*>(op.position_pool), sizeof(int32_t), place, start, length);
    copy(op.state_pool, op.state_bytes, place, start, length);
    copy(op.death, op.death_bytes, to, from, 1);
    op.lengths[to] = static_cast<int32_t>(length);
  }
}

void check_pairs(const Fork& op) {
  for (int64_t pair = 0; pair < op.num_pairs; ++pair) {
    check_slot(op.sources[pair], op.num_slots);
    check_slot(op.destinations[pair], op.num_slots);
    if (skipped(op, pair)) continue;
    for (int64_t other = 0; other < op.num_pairs; ++other) {
      STD_TORCH_CHECK(
          op.sources[other] != op.destinations[pair] || op.destinations[other] == op.sources[other],
          "slot ", op.destinations[pair], " is both a destination and a source");
    }
    for (int64_t layer = 0; layer < op.num_layers; ++layer) {
      for (int64_t h = 0; h < op.num_heads; ++h) {
        const int64_t from = (layer * op.num_slots + op.sources[pair]) * op.num_heads + h;
        const int64_t to = (layer * op.num_slots + op.destinations[pair]) * op.num_heads + h;
        check_run(op.offsets[from], op.lengths[from], op.capacities[from], "its capacity", op.pool_rows);
        check_run(op.offsets[to], op.lengths[from], op.capacities[to], "the destination's capacity", op.pool_rows);
      }
    }
  }
}

struct Kernel : Cpu {
  static void run(const Fork& op, const Tensor&) {
    check_pairs(op);
    torch::stable::parallel_for(0, op.num_layers * op.num_pairs, 1, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) fork_pair(op, u / op.num_pairs, u % op.num_pairs);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("fork", TORCH_BOX(&fork<Kernel>)); }

}  // namespace sparse_rl
