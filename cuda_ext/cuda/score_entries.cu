// score_entries: scores that one look at an entry tells. One block per (layer, row, KV head).

#include "rows.cuh"
#include "score_entries.h"

namespace sparse_rl {
namespace {

template <class P>
struct Unit {
  const EntryScores<P>& op;
  Span span;
  float* out;

  SPARSE_RL_DEVICE const P* row(const P* pool, int j) const { return pool + (span.start + j) * op.entries.dim; }

  // The length of a row of a pool, in all lanes of a warp.
  SPARSE_RL_DEVICE float norm(const P* pool, int j) const { return sqrtf(square_sum(row(pool, j), op.entries.dim)); }

  // What needs a row of keys or values, a warp for each entry.
  SPARSE_RL_DEVICE void by_row() const {
    for (int j = threadIdx.x / 32; j < span.length; j += kWarps) {
      const float length = norm(op.method == Method::mass ? op.values : op.keys, j);
      if (threadIdx.x % 32 != 0) continue;
      out[j] = op.method == Method::mass ? op.mass(span, span.start + j) * length : -length;
    }
  }

  SPARSE_RL_DEVICE void by_entry(int64_t u) const {
    for (int j = threadIdx.x; j < span.length; j += kThreads) {
      const int position = op.positions[span.start + j];
      out[j] = op.method == Method::position ? static_cast<float>(position)
               : op.method == Method::random ? op.random(span, position)
               : op.method == Method::mass   ? op.mass(span, span.start + j)
                                             : op.shared(span, u, position);
    }
  }

  // out[j] = -unit key j . the direction of the sum of all unit keys, which each warp adds up from every eighth key.
  SPARSE_RL_DEVICE void differences(float (&parts)[kWarps][kMaxHeadDim], float& length) const {
    constexpr float kLeast = 1e-12f;  // as in torch's normalize
    const int warp = threadIdx.x / 32;
    for (int j = warp; j < span.length; j += kWarps) {
      const float own = norm(op.keys, j);
      if (threadIdx.x % 32 == 0) out[j] = 1 / fmaxf(own, kLeast);
    }
    __syncthreads();
    sum_rows(row(op.keys, 0), span.length, op.entries.dim, out, parts);
    float squares = 0;
    for (int d = threadIdx.x; d < op.entries.dim && threadIdx.x < 32; d += 32) squares += parts[0][d] * parts[0][d];
    squares = warp_sum(squares);
    if (threadIdx.x == 0) length = fmaxf(sqrtf(squares), kLeast);
    __syncthreads();
    for (int j = warp; j < span.length; j += kWarps) {
      float product = 0;
      each_part(row(op.keys, j), op.entries.dim, [&](int d, const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) product += x[i] * parts[0][d + i];
      });
      product = warp_sum(product);
      if (threadIdx.x % 32 == 0) out[j] = -product * out[j] / length;
    }
  }
};

template <class P>
__global__ void __launch_bounds__(kThreads, sizeof(P) == 4 ? 2 : 3) entry_scores_kernel(EntryScores<P> op) {
  await_previous();
  __shared__ float parts[kWarps][kMaxHeadDim], length;
  const Span span = find_span(op.entries, blockIdx.x);
  const Unit<P> unit{op, span, op.out + static_cast<int64_t>(blockIdx.x) * op.entries.num_entries};
  for (int j = span.length + static_cast<int>(threadIdx.x); j < op.entries.num_entries; j += kThreads) unit.out[j] = 0;
  if (span.length == 0) return;
  if (op.method == Method::key_difference) {
    unit.differences(parts, length);
  } else if (op.method == Method::key_norm || (op.method == Method::mass && op.by_value)) {
    unit.by_row();
  } else {
    unit.by_entry(blockIdx.x);
  }
}

struct Kernel : Device {
  template <class P>
  static void run(const EntryScores<P>& op, const Tensor& on) {
    check_aligned("value_pool", op.values);
    launch(entry_scores_kernel<P>, op.entries.count, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("score_entries", TORCH_BOX(&score_entries<Kernel>)); }

}  // namespace sparse_rl
