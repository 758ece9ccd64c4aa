// summarize_pages: vectors that summarize every page of a slot.

#include "backend.h"
#include "summarize_pages.h"

namespace sparse_rl {
namespace {

// The mean of some keys, or their largest and smallest elements.
template <class T, bool Bounds>
SPARSE_RL_CLONES void summarize(const T* keys, int64_t count, int64_t dim, T* first, T* second) {
  float top[kMaxHeadDim], bottom[kMaxHeadDim];
  for (int64_t at = 0; at < dim; at += kBlock) {
    Vec a, b;
    load_part(keys, at, dim, a, b);
    Vec x = a, y = b;  // the sums, or the largest and the smallest
    for (int64_t j = 1; j < count; ++j) {
      Vec c, d;
      load_part(keys + j * dim, at, dim, c, d);
      if constexpr (Bounds) {
        a = larger(c, a), b = larger(d, b);
        x = smaller(c, x), y = smaller(d, y);
      } else {
        a += c, b += d;
      }
    }
    store_block(top + at, a, b);
    store_block(bottom + at, x, y);
  }
  pack_row(top, Bounds ? 1.0f : 1 / static_cast<float>(count), dim, first);
  if constexpr (Bounds) pack_row(bottom, 1.0f, dim, second);
}

struct Kernel : Cpu {
  template <class T>
  static void run(const Summary<T>& op, const Tensor&) {
    check_runs(op.heads, op.kept.num_pages * op.page_size, "those of the pages of summaries", op.pool_rows);
    for_heads(op.heads.num_rows, op.heads.num_heads, [&](int64_t b, int64_t h) {
      if (op.heads.slots[b] < 0) return;
      const int64_t i = op.heads.index(b, h), length = op.heads.lengths[i];
      const T* keys = op.key_pool + op.heads.offsets[i] * op.kept.dim;
      for (int64_t p = op.begin(length); p < op.end(length); ++p) {
        const T* page = keys + p * op.page_size * op.kept.dim;
        T* first = op.kept.at(i, 0, p);
        if (op.kept.num_vectors == 2) {
          summarize<T, true>(page, op.page_size, op.kept.dim, first, op.kept.at(i, 1, p));
        } else {
          summarize<T, false>(page, op.page_size, op.kept.dim, first, nullptr);
        }
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("summarize_pages", TORCH_BOX(&summarize_pages<Kernel>)); }

}  // namespace sparse_rl
