// page_attention: one query token per slot over the entries of some pages, page lists as select_pages makes them.
//
// The kernels are those of decode_attention; only where the j-th entry stands is looked up in the list.

#include "attention_launch.cuh"
#include "op_pages.h"

namespace sparse_rl {
namespace {

struct Kernel : Device {
  template <class T>
  static void run(const PageReading<T>& op, const Tensor& on) {
    check_aligned("query", op.query);
    check_aligned("value_pool", op.value_pool);
    const Attention<T> all{
        op.query, op.key_pool, op.value_pool, op.out, op.lse, nullptr, op.group, op.dim, op.pool_rows, 0, op.pool_rows,
        op.scale, op.heads, op.pages, static_cast<int>(op.width), static_cast<int>(op.page_size)};
    launch_attention<true>(all, on);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) {
  m.impl("page_attention", TORCH_BOX(&page_attention<Kernel>));
}

}  // namespace sparse_rl
