// page_attention: one query token per slot over the entries of some pages, given by the lists of select_pages.
//
// The kernels are those of decode_attention; only the index of the j-th entry is looked up in the list.

#include "attention_launch.cuh"
#include "page_attention.h"

namespace sparse_rl {
namespace {

struct Kernel : Device {
  template <class T>
  static void run(const Attention<T>& op, const Tensor& on) {
    launch_attention<true>(op, on);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("page_attention", TORCH_BOX(&page_attention<Kernel>)); }

}  // namespace sparse_rl
