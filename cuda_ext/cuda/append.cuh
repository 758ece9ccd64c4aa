// What a warp does for a head of a new token: normalize and rotate (both optional), and write it where it belongs.
#pragma once

#include "append.h"
#include "float8.cuh"

namespace sparse_rl {

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

// Store a query head for attention and, if wanted, in the ring; zeros for rows to skip, and for those that cannot be.
template <class T, class P>
SPARSE_RL_DEVICE void append_query(const Append<T, P>& op, int64_t b, int64_t h, int64_t slot, bool to_ring = true) {
  T* query = op.query + (b * op.num_query_heads + h) * op.dim;
  if (slot < 0) {
    for (int64_t i = threadIdx.x % 32; i < op.dim; i += 32) query[i] = narrow<T>(0.0f);
    return;
  }
  T* place = nullptr;
  if (op.ring && to_ring) {
    // positions are stored in 32 bits, whose division is much shorter
    const unsigned turn = static_cast<unsigned>(op.seen[slot]) % static_cast<unsigned>(op.num_queries);
    place = op.ring + ((slot * op.num_query_heads + h) * op.num_queries + turn) * op.dim;
  }
  rotate(op, b, normed_head(op.head(b, h), op.query_norm, op.epsilon, op.dim), query, place);
}

// The slot that row b appends to: -1 for rows to skip, and for those that cannot be, which are reported.
template <class T, class P>
SPARSE_RL_DEVICE int64_t appended_slot(const Append<T, P>& op, int64_t b) {
  const int64_t slot = op.heads.slots[b];
  const bool there = slot >= 0 && slot < op.heads.num_slots;
  if (slot == -1 || (there && op.seen[slot] >= 0)) return slot;
  if (threadIdx.x % 32 == 0) complain(op.heads.report, there ? Fault::position : Fault::slot, slot);
  return -1;
}

// The place of one more entry in a head, -1 if there is no room, which is reported.
template <class T, class P>
SPARSE_RL_DEVICE int free_place(const Append<T, P>& op, int64_t slot, int64_t h) {
  const int64_t i = slot * op.heads.num_heads + h;
  const int length = op.lengths[i];  // read once: a slot that is listed twice must not pass its capacity
  if (length >= 0 && inside(op.heads.offsets[i], int64_t{length} + 1, op.capacities[i], op.pool_rows)) return length;
  const bool full = length >= 0 && length == op.capacities[i];
  if (threadIdx.x % 32 == 0) complain(op.heads.report, full ? Fault::full : Fault::run, slot);
  return -1;
}

// Write key, value and position at a place of a head; its length stays.
template <class T, class P>
SPARSE_RL_DEVICE void write_entry(const Append<T, P>& op, int64_t b, int64_t h, int64_t slot, int place) {
  const int64_t H = op.heads.num_heads, lane = threadIdx.x % 32, at = op.heads.offsets[slot * H + h] + place;
  const T *key = op.head(b, op.num_query_heads + h), *value = op.head(b, op.num_query_heads + H + h);
  rotate<T, P, P>(op, b, normed_head(key, op.key_norm, op.epsilon, op.dim), op.key_pool + at * op.dim, nullptr);
  for (int64_t d = lane; d < op.dim; d += 32) op.value_pool[at * op.dim + d] = stored<P>(value[d]);
  if (lane == 0) op.position_pool[at] = static_cast<int32_t>(op.seen[slot]);
}

constexpr int kAppendThreads = 128, kAppendWarps = kAppendThreads / 32;

template <class T, class P>
__global__ void __launch_bounds__(kAppendThreads, 6) append_kernel(Append<T, P> op) {
  await_previous();
  const int64_t b = blockIdx.x, h = blockIdx.y * kAppendWarps + threadIdx.x / 32, H = op.heads.num_heads;
  if (h >= H + op.num_query_heads) return;
  const int64_t slot = appended_slot(op, b);
  if (h >= H) return append_query(op, b, h - H, slot);
  const int place = slot < 0 ? -1 : free_place(op, slot, h);
  if (place < 0) return;
  write_entry(op, b, h, slot, place);
  __syncwarp();  // all lanes have read the length
  if (threadIdx.x % 32 == 0) op.lengths[slot * H + h] = place + 1;
}

template <class T, class P>
void launch_append(const Append<T, P>& op, const Tensor& on) {
  const int64_t units = op.heads.num_heads + op.num_query_heads;
  launch(append_kernel<T, P>, op.heads.num_rows, (units + kAppendWarps - 1) / kAppendWarps, kAppendThreads, on, op);
}

}  // namespace sparse_rl
