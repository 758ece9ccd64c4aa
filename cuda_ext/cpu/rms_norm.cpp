// rms_norm: add to the hidden states, and divide each row by the root of its mean square.

#include "backend.h"
#include "lanes.h"
#include "rms_norm.h"

namespace sparse_rl {
namespace {

// Rounds where transformers rounds: the sum, the quotient and the product with the weight to T, at last to P.
template <class T, class P>
SPARSE_RL_CLONES void norm_row(T* hidden, const P* addend, const float* weight, P* normed, int64_t width, float epsilon) {
  for (int64_t i = 0; addend && i < width; i += kEight) {
    const int64_t left = width - i;
    store8(hidden + i, left, load8(hidden + i, left) + load8(addend + i, left));
  }
  const float factor = inverse_rms(hidden, width, epsilon);
  for (int64_t i = 0; i < width; i += kEight) {
    const int64_t left = width - i;
    const Vec8 quotient = rounded<T>(load8(hidden + i, left) * factor);
    store8(normed + i, left, rounded<T>(quotient * load8(weight + i, left)));
  }
}

struct Kernel : Cpu {
  template <class T, class P>
  static void run(const RmsNorm<T, P>& op, const Tensor&) {
    const int64_t grain = 1 + 32768 / op.width;
    torch::stable::parallel_for(0, op.num_rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t at = b * op.width;
        norm_row(op.hidden + at, op.addend ? op.addend + at : nullptr, op.weight, op.normed + at, op.width, op.epsilon);
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("rms_norm", TORCH_BOX(&rms_norm<Kernel>)); }

}  // namespace sparse_rl
