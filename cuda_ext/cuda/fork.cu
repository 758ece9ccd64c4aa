// fork: copy the content of a slot to other slots, all layers at once; only live entries are moved.
//
// One block per (layer, pair, KV head); the ring of a (layer, slot) is divided among its heads.

#include "device.cuh"
#include "fork.h"

namespace sparse_rl {
namespace {

template <class Word>
SPARSE_RL_DEVICE void copy(char* pool, int64_t bytes, int64_t to, int64_t from, int64_t count) {
  if (!pool) return;
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
  const Word* source = reinterpret_cast<const Word*>(pool) + from * words;
  Word* destination = reinterpret_cast<Word*>(pool) + to * words;
  for (int64_t i = threadIdx.x; i < count * words; i += kThreads) destination[i] = source[i];
}

__global__ void __launch_bounds__(kThreads, 1) fork_kernel(Fork op) {
  await_previous();
  const auto pairs = static_cast<unsigned>(op.num_pairs), heads = static_cast<unsigned>(op.num_heads);
  const int64_t layer = blockIdx.x / pairs, pair = blockIdx.x % pairs, h = blockIdx.y;
  const int64_t source = op.sources[pair], destination = op.destinations[pair];
  const bool first = threadIdx.x == 0;  // reports errors
  if (source < -1 || destination < -1 || source >= op.num_slots || destination >= op.num_slots) {
    if (first) complain(op.report, Fault::slot, destination);
    return;
  }
  if (source < 0 || destination < 0 || source == destination) return;
  const int64_t from_slot = layer * op.num_slots + source, to_slot = layer * op.num_slots + destination;
  const int64_t ring_words = op.ring ? op.ring_bytes / 16 : 0;
  auto* ring = reinterpret_cast<uint4*>(op.ring);
  for (int64_t i = h * kThreads + threadIdx.x; i < ring_words; i += heads * kThreads) {
    ring[to_slot * ring_words + i] = ring[from_slot * ring_words + i];
  }
  const int64_t from = from_slot * op.num_heads + h, to = to_slot * op.num_heads + h;
  if (op.death_bytes % sizeof(uint32_t) == 0) {
    copy<uint32_t>(op.death, op.death_bytes, to, from, 1);
  } else {
    copy<char>(op.death, op.death_bytes, to, from, 1);
  }
  const int64_t start = op.offsets[from], place = op.offsets[to];
  int64_t length = op.lengths[from];
  if (length > op.capacities[to]) {
    if (first) complain(op.report, Fault::full, destination);
    length = op.capacities[to];
  }
  if (!inside(start, length, op.capacities[from], op.pool_rows) ||
      !inside(place, length, op.capacities[to], op.pool_rows)) {
    if (first) complain(op.report, Fault::run, destination);
    return;
  }
  copy<uint4>(op.key_pool, op.row_bytes, place, start, length);
  copy<uint4>(op.value_pool, op.row_bytes, place, start, length);
  copy<int32_t>(reinterpret_cast<char*>(op.position_pool), sizeof(int32_t), place, start, length);
  copy<uint32_t>(op.state_pool, op.state_bytes, place, start, length);
  if (threadIdx.x == 0) op.lengths[to] = static_cast<int32_t>(length);
}

struct Kernel : Device {
  static void run(const Fork& op, const Tensor& on) {
    check_aligned("value_pool", op.value_pool);
    check_aligned("query_ring", op.ring);
    check_aligned("death", op.death);
    launch(fork_kernel, op.num_layers * op.num_pairs, op.num_heads, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("fork", TORCH_BOX(&fork<Kernel>)); }

}  // namespace sparse_rl
