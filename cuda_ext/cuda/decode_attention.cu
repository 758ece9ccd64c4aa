// decode_attention: one query token per slot over its live entries, softmax kept online, everything summed in float32.
//
// A block takes up to eight query heads that share a KV head, so that K and V are read once, and a split of its entries
// (attention.cuh). Warps and splits divide the entries by fixed rules and merge in a fixed order: a row's bits depend
// only on its slot. 16-bit queries run on tensor cores (attention_tensor.cuh), float32 on plain FMAs
// (attention_plain.cuh).

#include "attention_launch.cuh"
#include "decode_attention.h"

namespace sparse_rl {
namespace {

struct Kernel : Device {
  template <class T, class P>
  static void run(const Attention<T, P>& op, const Tensor& on) {
    launch_attention<false>(op, on);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention<Kernel>)); }

}  // namespace sparse_rl
