// fork: copy everything a slot holds to other slots, all layers at once; only live entries are moved.
//
// One block per (layer, pair, KV head); the ring of a (layer, slot) is shared out among its heads.

#include "device.cuh"

namespace sparse_rl {
namespace {

struct Fork {
  const int64_t *sources, *destinations, *offsets;
  const int32_t* capacities;
  int64_t num_pairs, num_slots, num_heads, pool_rows;
  int64_t row_words, ring_words;    // of 16 bytes: per entry, per slot and layer
  int64_t death_words, state_words;  // of 4 bytes: per head, per entry
  uint4 *key_pool, *value_pool, *ring;
  uint32_t *state_pool, *death;
  int32_t *position_pool, *lengths;
};

template <class Word>
SPARSE_RL_DEVICE void copy(Word* pool, int64_t to, int64_t from, int64_t count) {
  if (!pool) return;
  const Word* source = pool + from;
  Word* destination = pool + to;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) destination[i] = source[i];
}

__global__ void __launch_bounds__(kThreads, 1) fork_kernel(Fork op) {
  const auto pairs = static_cast<unsigned>(op.num_pairs), heads = static_cast<unsigned>(op.num_heads);
  const int64_t layer = blockIdx.x / pairs, pair = blockIdx.x % pairs, h = blockIdx.y;
  const int64_t source = op.sources[pair], destination = op.destinations[pair];
  if (source < 0 || destination < 0 || source == destination) return;
  if (source >= op.num_slots || destination >= op.num_slots) return;
  const int64_t from_slot = layer * op.num_slots + source, to_slot = layer * op.num_slots + destination;
  for (int64_t i = h * kThreads + threadIdx.x; op.ring && i < op.ring_words; i += heads * kThreads) {
    op.ring[to_slot * op.ring_words + i] = op.ring[from_slot * op.ring_words + i];
  }
  const int64_t from = from_slot * op.num_heads + h, to = to_slot * op.num_heads + h;
  copy(op.death, to * op.death_words, from * op.death_words, op.death_words);
  const int64_t start = op.offsets[from], place = op.offsets[to];
  int64_t length = op.lengths[from];
  if (length > op.capacities[to]) length = op.capacities[to];
  if (!inside(start, length, op.capacities[from], op.pool_rows)) return;
  if (!inside(place, length, op.capacities[to], op.pool_rows)) return;
  copy(op.key_pool, place * op.row_words, start * op.row_words, length * op.row_words);
  copy(op.value_pool, place * op.row_words, start * op.row_words, length * op.row_words);
  copy(op.position_pool, place, start, length);
  copy(op.state_pool, place * op.state_words, start * op.state_words, length * op.state_words);
  if (threadIdx.x == 0) op.lengths[to] = static_cast<int32_t>(length);
}

void fork(
    const Tensor& sources, const Tensor& destinations, const Tensor& offsets, const Tensor& capacities,
    const Tensor& key_pool, const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& query_ring, const std::optional<Tensor>& death,
    const std::optional<Tensor>& state_pool) {
  const PoolShape pool = check_device_pool(key_pool);
  STD_TORCH_CHECK(
      offsets.dim() == 3, "offsets must be (layers, slots, KV heads), got ", offsets.dim(), " dimensions");
  const int64_t L = offsets.size(0), S = offsets.size(1), H = offsets.size(2);
  const int64_t B = sources.dim() == 1 ? sources.size(0) : 0;
  check_tensor("sources", sources, key_pool, ScalarType::Long, {B});
  check_tensor("destinations", destinations, key_pool, ScalarType::Long, {B});
  check_tensor("offsets", offsets, key_pool, ScalarType::Long, {L, S, H});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {L, S, H});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, pool.dim});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("lengths", lengths, key_pool, ScalarType::Int, {L, S, H});
  check_tensor("query_ring", query_ring, key_pool, pool.dtype, {L, S, kAnySize, kAnySize, pool.dim});
  check_tensor("death", death, key_pool, ScalarType::Int, {L, S, H, kAnySize});
  check_tensor("state_pool", state_pool, key_pool, ScalarType::Float, {pool.rows, kAnySize});
  check_aligned("value_pool", value_pool);
  if (query_ring.has_value()) check_aligned("query_ring", *query_ring);
  const int64_t row_words = pool.dim / (pool.dtype == ScalarType::Float ? 4 : 8);
  const bool known = pool.dtype == ScalarType::Float || pool.dtype == ScalarType::BFloat16 || pool.dtype == ScalarType::Half;
  STD_TORCH_CHECK(known, "the pools are ", dtype_text(pool.dtype), ": call the .reference overload");
  const Fork op{
      data<int64_t>(sources), data<int64_t>(destinations), data<int64_t>(offsets), data<int32_t>(capacities), B, S, H,
      pool.rows, row_words, query_ring ? query_ring->size(2) * query_ring->size(3) * row_words : 0,
      death ? death->size(3) : 0, state_pool ? state_pool->size(1) : 0, data<uint4>(key_pool), data<uint4>(value_pool),
      query_ring ? data<uint4>(*query_ring) : nullptr, state_pool ? data<uint32_t>(*state_pool) : nullptr,
      death ? data<uint32_t>(*death) : nullptr, data<int32_t>(position_pool), data<int32_t>(lengths)};
  launch(fork_kernel, L * B, H, kThreads, key_pool, op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("fork", TORCH_BOX(&fork)); }

}  // namespace sparse_rl
