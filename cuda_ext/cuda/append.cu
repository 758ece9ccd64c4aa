// append: normalize and rotate (both optional) and write one token's K and V at each slot's length, push its query into
// the ring.
//
// A warp per (row, query head) and per (row, KV head). Only the warp of a KV head touches that head's length.

#include "float8.cuh"
#include "append.h"

namespace sparse_rl {
namespace {

constexpr int kAppendThreads = 128, kAppendWarps = kAppendThreads / 32;

// A head as T, with its norm if it has one. Rounds where transformers rounds.
template <class T>
struct NormedHead {
  const T* in;
  const float* weight;  // null for no norm
  float factor;

  SPARSE_RL_DEVICE float operator[](int64_t i) const {
    const float x = static_cast<float>(in[i]);
    if (!weight) return x;
    return static_cast<float>(narrow<T>(static_cast<float>(narrow<T>(x * factor)) * weight[i]));
  }
};

template <class T>
SPARSE_RL_DEVICE NormedHead<T> normed_head(const T* in, const float* weight, float epsilon, int64_t dim) {
  if (!weight) return {in, nullptr, 1.0f};
  float squares = 0;
  for (int64_t i = threadIdx.x % 32; i < dim; i += 32) {
    const float x = static_cast<float>(in[i]);
    squares += x * x;
  }
  return {in, weight, 1 / sqrtf(warp_sum(squares) / static_cast<float>(dim) + epsilon)};
}

// transformers' convention: element i pairs with i + width / 2. `second` may be null.
template <class T, class P, class Out>
SPARSE_RL_DEVICE void rotate(const Append<T, P>& op, int64_t b, NormedHead<T> in, Out* out, T* second) {
  const int64_t width = op.cos ? op.width : 0, half = width / 2, lane = threadIdx.x % 32;
  const float *cos = op.cos + b * width, *sin = op.sin + b * width;
  for (int64_t i = lane; i < half; i += 32) {
    const float x = in[i], y = in[i + half];
    const T first = narrow<T>(x * cos[i] - y * sin[i]);
    const T last = narrow<T>(y * cos[i + half] + x * sin[i + half]);
    out[i] = stored<Out>(first), out[i + half] = stored<Out>(last);
    if (second) second[i] = first, second[i + half] = last;
  }
  for (int64_t i = width + lane; i < op.dim; i += 32) {
    const T x = narrow<T>(in[i]);
    out[i] = stored<Out>(x);
    if (second) second[i] = x;
  }
}

// Store a query head for attention and in the ring; zeros for rows to skip, and for those that cannot be.
template <class T, class P>
SPARSE_RL_DEVICE void append_query(const Append<T, P>& op, int64_t b, int64_t h, int64_t slot) {
  T* query = op.query + (b * op.num_query_heads + h) * op.dim;
  if (slot < 0) {
    for (int64_t i = threadIdx.x % 32; i < op.dim; i += 32) query[i] = narrow<T>(0.0f);
    return;
  }
  T* place = nullptr;
  if (op.ring) {
    const int64_t turn = op.seen[slot] % op.num_queries;
    place = op.ring + ((slot * op.num_query_heads + h) * op.num_queries + turn) * op.dim;
  }
  rotate(op, b, normed_head(op.head(b, h), op.query_norm, op.epsilon, op.dim), query, place);
}

template <class T, class P>
SPARSE_RL_DEVICE void append_entry(const Append<T, P>& op, int64_t b, int64_t h, int64_t slot) {
  const int64_t H = op.heads.num_heads, lane = threadIdx.x % 32, i = slot * H + h, own = op.num_query_heads + h;
  const int64_t length = op.lengths[i], at = op.heads.offsets[i] + length;
  if (length < 0 || !inside(op.heads.offsets[i], length + 1, op.capacities[i], op.pool_rows)) {
    const bool full = length >= 0 && length == op.capacities[i];
    if (lane == 0) complain(op.heads.report, full ? Fault::full : Fault::run, slot);
    return;
  }
  rotate<T, P, P>(
      op, b, normed_head(op.head(b, own), op.key_norm, op.epsilon, op.dim), op.key_pool + at * op.dim, nullptr);
  const T* value = op.head(b, own + H);
  for (int64_t d = lane; d < op.dim; d += 32) op.value_pool[at * op.dim + d] = stored<P>(value[d]);
  __syncwarp();  // all lanes have read the length
  if (lane == 0) {
    op.position_pool[at] = static_cast<int32_t>(op.seen[slot]);
    op.lengths[i] = static_cast<int32_t>(length + 1);
  }
}

template <class T, class P>
__global__ void __launch_bounds__(kAppendThreads, 6) append_kernel(Append<T, P> op) {
  const int64_t b = blockIdx.x, h = blockIdx.y * kAppendWarps + threadIdx.x / 32, H = op.heads.num_heads;
  if (h >= H + op.num_query_heads) return;
  int64_t slot = op.heads.slots[b];
  const bool there = slot >= 0 && slot < op.heads.num_slots;
  if (slot != -1 && (!there || op.seen[slot] < 0)) {
    if (threadIdx.x % 32 == 0) complain(op.heads.report, there ? Fault::position : Fault::slot, slot);
    slot = -1;
  }
  if (h >= H) {
    append_query(op, b, h - H, slot);
  } else if (slot >= 0) {
    append_entry(op, b, h, slot);
  }
}

struct Kernel : Device {
  template <class T, class P>
  static void run(const Append<T, P>& op, const Tensor& on) {
    const int64_t units = op.heads.num_heads + op.num_query_heads;
    launch(
        append_kernel<T, P>, op.heads.num_rows, (units + kAppendWarps - 1) / kAppendWarps, kAppendThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("append", TORCH_BOX(&append<Kernel>)); }

}  // namespace sparse_rl
