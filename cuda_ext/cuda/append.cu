// append: rotate (optionally) and write one token's K and V at each slot's length, push its query into the ring.
//
// One block per (row, KV head) and per (row, query head). Only the block of a KV head touches that head's length.

#include "float8.cuh"
#include "append.h"

namespace sparse_rl {
namespace {

constexpr int kAppendThreads = 64;

// transformers' convention: element i pairs with i + width / 2. `second` may be null.
template <class T, class P, class Out>
SPARSE_RL_DEVICE void rotate(const Append<T, P>& op, int64_t b, const T* in, Out* out, T* second) {
  const int64_t width = op.cos ? op.width : 0, half = width / 2;
  for (int64_t i = threadIdx.x; i < half; i += kAppendThreads) {
    const float *cos = op.cos + b * width, *sin = op.sin + b * width;
    const float x = static_cast<float>(in[i]), y = static_cast<float>(in[i + half]);
    const T first = narrow<T>(x * cos[i] - y * sin[i]);
    const T last = narrow<T>(y * cos[i + half] + x * sin[i + half]);
    out[i] = stored<Out>(first), out[i + half] = stored<Out>(last);
    if (second) second[i] = first, second[i + half] = last;
  }
  for (int64_t i = width + threadIdx.x; i < op.dim; i += kAppendThreads) {
    const T x = in[i];
    if (static_cast<const void*>(out) != in) out[i] = stored<Out>(x);
    if (second) second[i] = x;
  }
}

template <class T, class P>
__global__ void __launch_bounds__(kAppendThreads, 1) append_kernel(Append<T, P> op) {
  const int64_t b = blockIdx.x, slot = op.heads.slots[b], H = op.heads.num_heads;
  if (slot == -1) return;
  if (slot < 0 || slot >= op.heads.num_slots || op.seen[slot] < 0) {
    const bool there = slot >= 0 && slot < op.heads.num_slots;
    if (threadIdx.x == 0) complain(op.heads.report, there ? Fault::position : Fault::slot, slot);
    return;
  }
  if (blockIdx.y >= H) {
    const int64_t h = blockIdx.y - H;
    T* query = op.query + (b * op.num_query_heads + h) * op.dim;
    T* place = nullptr;
    if (op.ring) {
      const int64_t turn = op.seen[slot] % op.num_queries;
      place = op.ring + ((slot * op.num_query_heads + h) * op.num_queries + turn) * op.dim;
    }
    rotate(op, b, query, query, place);
    return;
  }
  const int64_t h = blockIdx.y, i = slot * H + h, source = (b * H + h) * op.dim;
  const int64_t length = op.lengths[i], at = op.heads.offsets[i] + length;
  if (length < 0 || !inside(op.heads.offsets[i], length + 1, op.capacities[i], op.pool_rows)) {
    const bool full = length >= 0 && length == op.capacities[i];
    if (threadIdx.x == 0) complain(op.heads.report, full ? Fault::full : Fault::run, slot);
    return;
  }
  rotate<T>(op, b, op.key + source, op.key_pool + at * op.dim, nullptr);
  for (int64_t d = threadIdx.x; d < op.dim; d += kAppendThreads) {
    op.value_pool[at * op.dim + d] = stored<P>(op.value[source + d]);
  }
  __syncthreads();  // all threads have read the length
  if (threadIdx.x == 0) {
    op.position_pool[at] = static_cast<int32_t>(op.seen[slot]);
    op.lengths[i] = static_cast<int32_t>(length + 1);
  }
}

struct Kernel : Device {
  template <class T, class P>
  static void run(const Append<T, P>& op, const Tensor& on) {
    launch(append_kernel<T, P>, op.heads.num_rows, op.heads.num_heads + op.num_query_heads, kAppendThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("append", TORCH_BOX(&append<Kernel>)); }

}  // namespace sparse_rl
