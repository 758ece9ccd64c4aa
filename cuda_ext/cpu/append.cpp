// append: rotate (optionally) and write one token's K and V at each slot's length, push its query into the ring.

#include "heads.h"
#include "vec.h"

namespace sparse_rl {
namespace {

struct Angles {
  const float *cos, *sin;  // one row each, null for no rotation
  int64_t width;           // rotated elements; the rest of the head stays
};

// transformers' convention: element i pairs with i + width / 2.
template <class T>
void rotate(const T* in, T* out, Angles angles, int64_t dim) {
  const int64_t half = angles.width / 2;
  for (int64_t i = 0; i < half; ++i) {
    float x = in[i], y = in[i + half];
    out[i] = x * angles.cos[i] - y * angles.sin[i];
    out[i + half] = y * angles.cos[i + half] + x * angles.sin[i + half];
  }
  if (in != out) std::memcpy(static_cast<void*>(out + angles.width), in + angles.width, (dim - angles.width) * sizeof(T));
}

template <class T>
struct Append {
  T *query;            // (B, Hq, D), rotated in place
  const T *key, *value;  // (B, H, D)
  const float *cos, *sin;  // (B, width)
  int64_t width;
  const int64_t* seen;        // (S)
  const int32_t* capacities;  // (S, H)
  T *key_pool, *value_pool;
  int32_t *position_pool, *lengths;
  T* ring;  // (S, Hq, A, D) or null
  int64_t num_query_heads, num_queries, dim;
  Heads heads;

  void row(int64_t b) const {
    const int64_t slot = heads.slots[b];
    if (slot < 0) return;
    const size_t bytes = dim * sizeof(T);
    const Angles angles{cos ? cos + b * width : nullptr, cos ? sin + b * width : nullptr, cos ? width : 0};
    for (int64_t h = 0; h < num_query_heads; ++h) {
      T* q = query + (b * num_query_heads + h) * dim;
      if (cos) rotate(q, q, angles, dim);
      if (ring) {
        T* place = ring + ((slot * num_query_heads + h) * num_queries + seen[slot] % num_queries) * dim;
        std::memcpy(static_cast<void*>(place), q, bytes);
      }
    }
    for (int64_t h = 0; h < heads.num_heads; ++h) {
      const int64_t i = heads.index(b, h), source = (b * heads.num_heads + h) * dim;
      if (lengths[i] >= capacities[i]) continue;  // a slot listed twice: checked before, full since
      const int64_t at = heads.offsets[i] + lengths[i]++;
      rotate(key + source, key_pool + at * dim, angles, dim);
      std::memcpy(static_cast<void*>(value_pool + at * dim), value + source, bytes);
      position_pool[at] = static_cast<int32_t>(seen[slot]);
    }
  }
};

void check_room(const Heads& heads, const int32_t* capacities, const int64_t* seen, int64_t pool_rows) {
  for (int64_t b = 0; b < heads.num_rows; ++b) {
    const int64_t slot = heads.slots[b];
    check_slot(slot, heads.num_slots);
    if (slot < 0) continue;
    STD_TORCH_CHECK(seen[slot] >= 0, "seen[", slot, "] is ", seen[slot], ", a position cannot be negative");
    for (int64_t h = 0; h < heads.num_heads; ++h) {
      const int64_t i = heads.index(b, h);
      check_run(heads.offsets[i], heads.lengths[i], capacities[i], "its capacity", pool_rows);
      STD_TORCH_CHECK(
          heads.lengths[i] < capacities[i], "slot ", slot, ", KV head ", h, " is full: ", heads.lengths[i], " of ",
          capacities[i], " entries. Compress it before the next token");
      check_run(heads.offsets[i], heads.lengths[i] + 1, capacities[i], "its capacity", pool_rows);
    }
  }
}

void append(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& cos,
    const std::optional<Tensor>& sin, const Tensor& slots, const Tensor& seen, const Tensor& offsets,
    const Tensor& capacities, const Tensor& key_pool, const Tensor& value_pool, const Tensor& position_pool,
    const Tensor& lengths, const std::optional<Tensor>& query_ring) {
  const PoolShape pool = check_key_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool);
  const int64_t B = heads.num_rows, H = heads.num_heads, S = heads.num_slots, D = pool.dim;
  const int64_t Hq = query.dim() == 3 ? query.size(1) : 0;
  const int64_t A = query_ring.has_value() && query_ring->dim() == 4 ? query_ring->size(2) : 0;
  const int64_t width = cos.has_value() && cos->dim() == 2 ? cos->size(1) : 0;
  check_tensor("query", query, key_pool, pool.dtype, {B, Hq, D});
  check_tensor("key", key, key_pool, pool.dtype, {B, H, D});
  check_tensor("value", value, key_pool, pool.dtype, {B, H, D});
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "give both cos and sin, or neither");
  STD_TORCH_CHECK(width % 2 == 0 && width <= D, "cos has ", width, " columns, expected an even number up to ", D);
  check_tensor("cos", cos, key_pool, ScalarType::Float, {B, width});
  check_tensor("sin", sin, key_pool, ScalarType::Float, {B, width});
  check_tensor("seen", seen, key_pool, ScalarType::Long, {S});
  check_tensor("capacities", capacities, key_pool, ScalarType::Int, {S, H});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, D});
  check_tensor("position_pool", position_pool, key_pool, ScalarType::Int, {pool.rows});
  check_tensor("query_ring", query_ring, key_pool, pool.dtype, {S, Hq, A, D});
  check_room(heads, capacities.const_data_ptr<int32_t>(), seen.const_data_ptr<int64_t>(), pool.rows);

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Append<T> op{
        data<T>(query), data<T>(key), data<T>(value), cos ? data<float>(*cos) : nullptr,
        sin ? data<float>(*sin) : nullptr, width, data<int64_t>(seen), data<int32_t>(capacities), data<T>(key_pool),
        data<T>(value_pool), data<int32_t>(position_pool), data<int32_t>(lengths),
        A > 0 ? data<T>(*query_ring) : nullptr, Hq, A, D, heads};
    const int64_t grain = 1 + 32768 / ((Hq + 2 * H) * D + 1);
    torch::stable::parallel_for(0, B, grain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) op.row(b);
    });
  };
  SPARSE_RL_DISPATCH(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("append", TORCH_BOX(&append)); }

}  // namespace sparse_rl
