// append: normalize and rotate (both optional) and write one token's K and V at each slot's length, push its query into
// the ring.
//
// A warp per (row, query head) and per (row, KV head). Only the warp of a KV head touches that head's length.

#include "append.cuh"

namespace sparse_rl {
namespace {

struct Kernel : Device {
  template <class T, class P>
  static void run(const Append<T, P>& op, const Tensor& on) {
    launch_append(op, on);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("append", TORCH_BOX(&append<Kernel>)); }

}  // namespace sparse_rl
