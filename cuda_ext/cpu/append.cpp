// append: normalize and rotate (both optional) and write one token's K and V at each slot's length, push its query into
// the ring.

#include "backend.h"
#include "kernels.h"
#include "lanes.h"

namespace sparse_rl {
namespace {

struct Angles {
  const float *cos, *sin;  // one row each
  int64_t width;           // rotated elements, 0 for no rotation; the rest of the head stays
};

// Normalize a head, if there is a weight, and rotate it by transformers' convention: element i pairs with i + width / 2.
// Rounds to T where transformers rounds before it rotates.
template <class T>
SPARSE_RL_CLONES void turn_head(const T* in, const float* weight, float epsilon, Angles angles, int64_t dim, T* out) {
  alignas(32) float x[kMaxHeadDim + kEight];
  const int64_t half = angles.width / 2;
  const float *cos = angles.cos, *sin = angles.sin, factor = weight ? inverse_rms(in, dim, epsilon) : 1.0f;
  for (int64_t i = 0; i < dim; i += kEight) {
    const Vec8 own = load8(in + i, dim - i);
    store8(x + i, weight ? rounded<T>(rounded<T>(own * factor) * load8(weight + i, dim - i)) : own);
  }
  for (int64_t i = 0; i < half; i += kEight) {
    const int64_t left = half - i;
    const Vec8 first = load8(x + i), last = load8(x + half + i);
    store8(out + i, left, first * load8(cos + i, left) - last * load8(sin + i, left));
    store8(out + half + i, left, last * load8(cos + half + i, left) + first * load8(sin + half + i, left));
  }
  for (int64_t i = angles.width; i < dim; i += kEight) store8(out + i, dim - i, load8(x + i));
}

template <class T>
void append_row(const Append<T>& op, int64_t b) {
  const int64_t slot = op.heads.slots[b], Hq = op.num_query_heads, H = op.heads.num_heads;
  const size_t bytes = op.dim * sizeof(T);
  if (slot < 0) {
    std::memset(static_cast<void*>(op.query + b * Hq * op.dim), 0, Hq * bytes);
    return;
  }
  const int64_t seen = op.seen[slot], width = op.cos ? op.width : 0;
  const Angles angles{op.cos + b * width, op.sin + b * width, width};
  for (int64_t h = 0; h < Hq; ++h) {
    T* q = op.query + (b * Hq + h) * op.dim;
    turn_head(op.head(b, h), op.query_norm, op.epsilon, angles, op.dim, q);
    if (!op.ring) continue;
    T* place = op.ring + ((slot * Hq + h) * op.num_queries + seen % op.num_queries) * op.dim;
    std::memcpy(static_cast<void*>(place), q, bytes);
  }
  for (int64_t h = 0; h < H; ++h) {
    const int64_t i = op.heads.index(b, h);
    if (op.lengths[i] >= op.capacities[i]) continue;  // a slot listed twice: checked before, full by now
    const int64_t at = op.heads.offsets[i] + op.lengths[i]++;
    turn_head(op.head(b, Hq + h), op.key_norm, op.epsilon, angles, op.dim, op.key_pool + at * op.dim);
    std::memcpy(static_cast<void*>(op.value_pool + at * op.dim), op.head(b, Hq + H + h), bytes);
    op.position_pool[at] = static_cast<int32_t>(seen);
  }
}

struct Kernel : Cpu {
  template <class T>
  static void run(const Append<T>& op, const Tensor&) {
    check_room(op);
    append_rows(op);
  }
};

}  // namespace

template <class T>
void check_room(const Append<T>& op) {
  const Heads& heads = op.heads;
  for (int64_t b = 0; b < heads.num_rows; ++b) {
    const int64_t slot = heads.slots[b];
    check_slot(slot, heads.num_slots);
    if (slot < 0) continue;
    STD_TORCH_CHECK(op.seen[slot] >= 0, "seen[", slot, "] is ", op.seen[slot], ", a position cannot be negative");
    for (int64_t h = 0; h < heads.num_heads; ++h) {
      const int64_t i = heads.index(b, h), length = heads.lengths[i], capacity = op.capacities[i];
      check_run(heads.offsets[i], length, capacity, "its capacity", op.pool_rows);
      STD_TORCH_CHECK(
          length < capacity, "slot ", slot, ", KV head ", h, " is full: ", length, " of ", capacity,
          " entries. Compress it before the next token");
      check_run(heads.offsets[i], length + 1, capacity, "its capacity", op.pool_rows);
    }
  }
}

template <class T>
void append_rows(const Append<T>& op) {
  const int64_t grain = 1 + 32768 / ((op.num_query_heads + 2 * op.heads.num_heads) * op.dim + 1);
  torch::stable::parallel_for(0, op.heads.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) append_row(op, b);
  });
}

template void check_room(const Append<float>&);
template void check_room(const Append<BFloat16>&);
template void append_rows(const Append<float>&);
template void append_rows(const Append<BFloat16>&);

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("append", TORCH_BOX(&append<Kernel>)); }

}  // namespace sparse_rl
