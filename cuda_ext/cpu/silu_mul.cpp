// silu_mul: x * sigmoid(x) of the first half of each row, times the second half.

#include "backend.h"
#include "lanes.h"
#include "silu_mul.h"

namespace sparse_rl {
namespace {

// Rounds where transformers rounds.
template <class T>
SPARSE_RL_CLONES void gate_row(const T* gate, const T* up, T* gated, int64_t width) {
  for (int64_t i = 0; i < width; i += kEight) {
    const int64_t left = width - i;
    const Vec8 x = load8(gate + i, left);
    store8(gated + i, left, rounded<T>(x / (1.0f + exp_clamped(-x))) * load8(up + i, left));
  }
}

struct Kernel : Cpu {
  template <class T>
  static void run(const SiluMul<T>& op, const Tensor&) {
    const int64_t grain = 1 + 8192 / (op.width + 1);
    torch::stable::parallel_for(0, op.num_rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const T* row = op.gate_and_up + 2 * b * op.width;
        gate_row(row, row + op.width, op.gated + b * op.width, op.width);
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("silu_mul", TORCH_BOX(&silu_mul<Kernel>)); }

}  // namespace sparse_rl
