// append: rotate (optionally) and write one token's K and V at each slot's length, push its query into the ring.
//
// One block per (row, KV head) and per (row, query head). Only the block of a KV head touches that head's length.

#include "device.cuh"

namespace sparse_rl {
namespace {

constexpr int kAppendThreads = 64;

template <class T>
struct Append {
  T* query;               // (B, Hq, D), rotated in place
  const T *key, *value;   // (B, H, D)
  const float *cos, *sin;  // (B, width), null for no rotation
  int64_t width;
  const int64_t* seen;        // (S)
  const int32_t* capacities;  // (S, H)
  T *key_pool, *value_pool;
  int32_t *position_pool, *lengths;
  T* ring;  // (S, Hq, A, D) or null
  int64_t num_query_heads, num_queries, dim, pool_rows;
  Heads heads;
};

// transformers' convention: element i pairs with i + width / 2. `second` may be null.
template <class T>
SPARSE_RL_DEVICE void rotate(const Append<T>& op, int64_t b, const T* in, T* out, T* second) {
  const int64_t width = op.cos ? op.width : 0, half = width / 2;
  for (int64_t i = threadIdx.x; i < half; i += kAppendThreads) {
    const float *cos = op.cos + b * width, *sin = op.sin + b * width;
    const float x = static_cast<float>(in[i]), y = static_cast<float>(in[i + half]);
    const T first = narrow<T>(x * cos[i] - y * sin[i]);
    const T last = narrow<T>(y * cos[i + half] + x * sin[i + half]);
    out[i] = first, out[i + half] = last;
    if (second) second[i] = first, second[i + half] = last;
  }
  for (int64_t i = width + threadIdx.x; i < op.dim; i += kAppendThreads) {
    const T x = in[i];
    if (out != in) out[i] = x;
    if (second) second[i] = x;
  }
}

template <class T>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(Append<T> op) {
  const int64_t b = blockIdx.x, slot = op.heads.slots[b], H = op.heads.num_heads;
  if (slot < 0 || slot >= op.heads.num_slots || op.seen[slot] < 0) return;
  if (blockIdx.y >= H) {
    const int64_t h = blockIdx.y - H;
    T* query = op.query + (b * op.num_query_heads + h) * op.dim;
    T* place = nullptr;
    if (op.ring) place = op.ring + ((slot * op.num_query_heads + h) * op.num_queries + op.seen[slot] % op.num_queries) * op.dim;
    rotate(op, b, query, query, place);
    return;
  }
  const int64_t h = blockIdx.y, i = slot * H + h, source = (b * H + h) * op.dim;
  const int64_t length = op.lengths[i], at = op.heads.offsets[i] + length;
  if (length >= op.capacities[i] || !inside(op.heads.offsets[i], length + 1, op.capacities[i], op.pool_rows)) return;
  rotate<T>(op, b, op.key + source, op.key_pool + at * op.dim, nullptr);
  for (int64_t d = threadIdx.x; d < op.dim; d += kAppendThreads) op.value_pool[at * op.dim + d] = op.value[source + d];
  __syncthreads();  // all threads have read the length
  if (threadIdx.x == 0) {
    op.position_pool[at] = static_cast<int32_t>(op.seen[slot]);
    op.lengths[i] = static_cast<int32_t>(length + 1);
  }
}

void append(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& cos,
    const std::optional<Tensor>& sin, const Tensor& slots, const Tensor& seen, const Tensor& offsets,
    const Tensor& capacities, const Tensor& key_pool, const Tensor& value_pool, const Tensor& position_pool,
    const Tensor& lengths, const std::optional<Tensor>& query_ring) {
  const PoolShape pool = check_device_pool(key_pool);
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

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Append<T> op{
        data<T>(query), data<T>(key), data<T>(value), cos ? data<float>(*cos) : nullptr,
        sin ? data<float>(*sin) : nullptr, width, data<int64_t>(seen), data<int32_t>(capacities), data<T>(key_pool),
        data<T>(value_pool), data<int32_t>(position_pool), data<int32_t>(lengths),
        A > 0 ? data<T>(*query_ring) : nullptr, Hq, A, D, pool.rows, heads};
    launch(append_kernel<T>, B, H + Hq, kAppendThreads, key_pool, op);
  };
  SPARSE_RL_DISPATCH_DEVICE(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("append", TORCH_BOX(&append)); }

}  // namespace sparse_rl
