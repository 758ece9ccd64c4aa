// score_entries: scores that one look at an entry tells.

#include "backend.h"
#include "dots.h"
#include "score_entries.h"

#include <algorithm>
#include <cmath>

namespace sparse_rl {
namespace {

template <class T>
SPARSE_RL_CLONES float norm_of(const T* row, int64_t dim) {
  return std::sqrt(square_sum(row, dim));
}

// out[j] = -unit key j . the direction of the sum of all unit keys
template <class T>
SPARSE_RL_CLONES void differences(const T* keys, int64_t count, int64_t dim, float* out) {
  constexpr float kLeast = 1e-12f;  // as in torch's normalize
  alignas(64) float mean[kMaxHeadDim];
  for (int64_t j = 0; j < count; ++j) out[j] = 1 / std::max(norm_of(keys + j * dim, dim), kLeast);
  sum_rows(keys, count, dim, out, mean);
  const float length = std::max(std::sqrt(square_sum(mean, padded(dim))), kLeast);
  for (int64_t j = 0; j < count; ++j) {
    Vec product{};
    for (int64_t at = 0; at < dim; at += kBlock) {
      Vec a, b;
      load_part(keys + j * dim, at, dim, a, b);
      product += a * load(mean + at);
      product += b * load(mean + at + kLanes);
    }
    out[j] = -sum_lanes(product) * out[j] / length;
  }
}

template <class T>
struct Unit {
  const EntryScores<T>& op;
  Span span;

  float score(int64_t u, int j) const {
    const int64_t at = span.start + j, dim = op.entries.dim;
    switch (op.method) {
      case Method::position: return static_cast<float>(op.positions[at]);
      case Method::random: return op.random(span, op.positions[at]);
      case Method::key_norm: return -norm_of(op.keys + at * dim, dim);
      case Method::mass: return op.mass(span, at) * (op.by_value ? norm_of(op.values + at * dim, dim) : 1.0f);
      default: return op.shared(span, u, op.positions[at]);
    }
  }

  void run(int64_t u) const {
    float* out = op.out + u * op.entries.num_entries;
    std::fill(out, out + op.entries.num_entries, 0.0f);
    if (span.slot < 0) return;
    if (op.method == Method::key_difference) {
      differences(op.keys + span.start * op.entries.dim, span.length, op.entries.dim, out);
      return;
    }
    for (int j = 0; j < span.length; ++j) out[j] = score(u, j);
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const EntryScores<T>& op, const Tensor&) {
    check_spans(op.entries);
    for_spans(op.entries, op.entries.count, [&](int64_t u, int64_t) { Unit<T>{op, op.entries.span(u)}.run(u); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("score_entries", TORCH_BOX(&score_entries<Kernel>)); }

}  // namespace sparse_rl
