// append: rotate (optionally) and write one token's K and V at each slot's length, push its query into the ring.

#include "backend.h"
#include "append.h"

namespace sparse_rl {
namespace {

struct Angles {
  const float *cos, *sin;  // one row each
  int64_t width;           // rotated elements, 0 for no rotation; the rest of the head stays
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
  if (in == out) return;
  std::memcpy(static_cast<void*>(out + angles.width), in + angles.width, (dim - angles.width) * sizeof(T));
}

template <class T>
void append_row(const Append<T>& op, int64_t b) {
  const int64_t slot = op.heads.slots[b];
  if (slot < 0) return;
  const size_t bytes = op.dim * sizeof(T);
  const int64_t seen = op.seen[slot], width = op.cos ? op.width : 0;
  const Angles angles{op.cos + b * width, op.sin + b * width, width};
  for (int64_t h = 0; h < op.num_query_heads; ++h) {
    T* q = op.query + (b * op.num_query_heads + h) * op.dim;
    rotate(q, q, angles, op.dim);
    if (!op.ring) continue;
    T* place = op.ring + ((slot * op.num_query_heads + h) * op.num_queries + seen % op.num_queries) * op.dim;
    std::memcpy(static_cast<void*>(place), q, bytes);
  }
  for (int64_t h = 0; h < op.heads.num_heads; ++h) {
    const int64_t i = op.heads.index(b, h), source = (b * op.heads.num_heads + h) * op.dim;
    if (op.lengths[i] >= op.capacities[i]) continue;  // a slot listed twice: checked before, full by now
    const int64_t at = op.heads.offsets[i] + op.lengths[i]++;
    rotate(op.key + source, op.key_pool + at * op.dim, angles, op.dim);
    std::memcpy(static_cast<void*>(op.value_pool + at * op.dim), op.value + source, bytes);
    op.position_pool[at] = static_cast<int32_t>(seen);
  }
}

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

struct Kernel : Cpu {
  template <class T>
  static void run(const Append<T>& op, const Tensor&) {
    check_room(op);
    const int64_t grain = 1 + 32768 / ((op.num_query_heads + 2 * op.heads.num_heads) * op.dim + 1);
    torch::stable::parallel_for(0, op.heads.num_rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) append_row(op, b);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("append", TORCH_BOX(&append<Kernel>)); }

}  // namespace sparse_rl
