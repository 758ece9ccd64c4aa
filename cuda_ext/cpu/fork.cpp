// fork: copy everything a slot holds to other slots, all layers at once; only live entries are moved.

#include "heads.h"
#include "vec.h"

namespace sparse_rl {
namespace {

struct Fork {
  const int64_t *sources, *destinations, *offsets;
  int64_t num_layers, num_pairs, num_slots, num_heads;
  size_t row_bytes, ring_bytes, death_bytes, state_bytes;  // per entry, per slot and layer, per head, per entry
  char *key_pool, *value_pool, *state_pool, *ring, *death;
  int32_t *position_pool, *lengths;

  void copy(char* pool, size_t bytes, int64_t to, int64_t from, int64_t count) const {
    if (pool && bytes * count > 0) std::memcpy(pool + to * bytes, pool + from * bytes, count * bytes);
  }

  void unit(int64_t layer, int64_t pair) const {
    const int64_t source = sources[pair], destination = destinations[pair];
    if (source < 0 || destination < 0 || source == destination) return;
    copy(ring, ring_bytes, layer * num_slots + destination, layer * num_slots + source, 1);
    for (int64_t h = 0; h < num_heads; ++h) {
      const int64_t from = (layer * num_slots + source) * num_heads + h;
      const int64_t to = (layer * num_slots + destination) * num_heads + h;
      const int64_t length = lengths[from];
      copy(key_pool, row_bytes, offsets[to], offsets[from], length);
      copy(value_pool, row_bytes, offsets[to], offsets[from], length);
      copy(reinterpret_cast<char*>(position_pool), sizeof(int32_t), offsets[to], offsets[from], length);
      copy(state_pool, state_bytes, offsets[to], offsets[from], length);
      copy(death, death_bytes, to, from, 1);
      lengths[to] = static_cast<int32_t>(length);
    }
  }
};

void check_pairs(const Fork& op, const int32_t* capacities, int64_t pool_rows) {
  for (int64_t pair = 0; pair < op.num_pairs; ++pair) {
    check_slot(op.sources[pair], op.num_slots);
    check_slot(op.destinations[pair], op.num_slots);
    if (op.sources[pair] < 0 || op.destinations[pair] < 0 || op.sources[pair] == op.destinations[pair]) continue;
    for (int64_t other = 0; other < op.num_pairs; ++other) {
      STD_TORCH_CHECK(
          op.sources[other] != op.destinations[pair] || op.destinations[other] == op.sources[other],
          "slot ", op.destinations[pair], " is both a destination and a source");
    }
    for (int64_t layer = 0; layer < op.num_layers; ++layer) {
      for (int64_t h = 0; h < op.num_heads; ++h) {
        const int64_t from = (layer * op.num_slots + op.sources[pair]) * op.num_heads + h;
        const int64_t to = (layer * op.num_slots + op.destinations[pair]) * op.num_heads + h;
        check_run(op.offsets[from], op.lengths[from], capacities[from], "its capacity", pool_rows);
        check_run(op.offsets[to], op.lengths[from], capacities[to], "the destination's capacity", pool_rows);
      }
    }
  }
}

void fork(
    const Tensor& sources, const Tensor& destinations, const Tensor& offsets, const Tensor& capacities,
    const Tensor& key_pool, const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& query_ring, const std::optional<Tensor>& death,
    const std::optional<Tensor>& state_pool) {
  const PoolShape pool = check_key_pool(key_pool);
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
  auto bytes = [](const std::optional<Tensor>& t) {
    return t.has_value() ? static_cast<char*>(t->mutable_data_ptr()) : nullptr;
  };
  const size_t item = pool.dtype == ScalarType::Double ? 8 : pool.dtype == ScalarType::Float ? 4 : 2;
  const Fork op{
      data<int64_t>(sources), data<int64_t>(destinations), data<int64_t>(offsets), L, B, S, H, pool.dim * item,
      query_ring ? query_ring->size(2) * query_ring->size(3) * pool.dim * item : 0,
      death ? death->size(3) * sizeof(int32_t) : 0, state_pool ? state_pool->size(1) * sizeof(float) : 0,
      static_cast<char*>(key_pool.mutable_data_ptr()), static_cast<char*>(value_pool.mutable_data_ptr()),
      bytes(state_pool), bytes(query_ring), bytes(death), data<int32_t>(position_pool), data<int32_t>(lengths)};
  check_pairs(op, data<int32_t>(capacities), pool.rows);
  torch::stable::parallel_for(0, L * B, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) op.unit(u / B, u % B);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("fork", TORCH_BOX(&fork)); }

}  // namespace sparse_rl
