// summarize_pages: vectors that summarize every page of a slot. Blocks of a (row, KV head) divide its pages.

#include "device.cuh"
#include "summarize_pages.h"

namespace sparse_rl {
namespace {

constexpr int kPageBlocks = 64;  // blocks of a head when all of its pages are summarized

template <class T>
__global__ void __launch_bounds__(kThreads, 1) summarize_kernel(Summary<T> op) {
  await_previous();
  const auto heads = static_cast<unsigned>(op.heads.num_heads);
  const int64_t room = op.kept.num_pages * op.page_size;
  const SlotSpan span = find_slot_span(op.heads, blockIdx.x / heads, blockIdx.x % heads, room, op.pool_rows);
  if (span.slot < 0) return;
  const int64_t dim = op.kept.dim;
  const T* keys = op.key_pool + span.start * dim;
  for (int64_t p = op.begin(span.length) + blockIdx.y; p < op.end(span.length); p += gridDim.y) {
    const T* page = keys + p * op.page_size * dim;
    for (int64_t d = threadIdx.x; d < dim; d += kThreads) {
      float sum = 0, top = kNegInf, bottom = -kNegInf;
      for (int64_t j = 0; j < op.page_size; ++j) {
        const float x = static_cast<float>(page[j * dim + d]);
        sum += x;
        top = fmaxf(top, x), bottom = fminf(bottom, x);
      }
      if (op.kept.num_vectors == 1) {
        op.kept.at(span.head, 0, p)[d] = narrow<T>(sum / static_cast<float>(op.page_size));
      } else {
        op.kept.at(span.head, 0, p)[d] = narrow<T>(top);
        op.kept.at(span.head, 1, p)[d] = narrow<T>(bottom);
      }
    }
  }
}

struct Kernel : Device {
  template <class T>
  static void run(const Summary<T>& op, const Tensor& on) {
    const int64_t many = op.kept.num_pages < kPageBlocks ? op.kept.num_pages : kPageBlocks;
    launch(summarize_kernel<T>, op.heads.num_rows * op.heads.num_heads, op.newest_only ? 1 : many, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("summarize_pages", TORCH_BOX(&summarize_pages<Kernel>)); }

}  // namespace sparse_rl
