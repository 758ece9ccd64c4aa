// window_importance: attention of the most recent queries to the entries before the observation window, pooled.
//
// Order of the operations: logits; maximum over the query heads of a group ("max"); softmax over the keys; mean or sum
// over the queries; pooling; mean over the heads of the group ("mean").

#include "backend.h"
#include "dots.h"
#include "window_importance.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparse_rl {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// total[j] += softmax(logits)[j] over `count` logits, which it overwrites; a query that sees nothing adds nothing.
SPARSE_RL_CLONES void add_softmax(float* logits, int64_t count, float* total) {
  float largest = kNothing;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) largest = logits[j] > largest ? logits[j] : largest;
  if (largest == kNothing) return;
  Vec sums{};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    Vec p = exp_negative(load(logits + j) - largest);
    store(logits + j, p);
    sums += p;
  }
  float sum = sum_lanes(sums);
  for (; j < count; ++j) sum += logits[j] = std::exp(logits[j] - largest);
  const float share = 1 / sum;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) total[i] += logits[i] * share;
}

template <class T>
struct Unit {
  const Importance<T, T>& op;
  Span span;
  float* rows;  // scratch: logits (A, N), then the sum over the queries (N)

  // Logits of the queries present, rows (query, head), against `count` keys; several heads of a query share the row of
  // their maximum.
  void fill_logits(const T* keys, int64_t count, int first_head, int heads_per_row) const {
    const int64_t dim = op.entries.dim, num_entries = op.entries.num_entries;
    float packed[kRows * kMaxHeadDim], tile[kRows * kTile];
    int64_t row_of[kRows];
    int used = 0;
    auto flush = [&]() {
      for (int64_t start = 0; used && start < count; start += kTile) {
        const int64_t some = std::min<int64_t>(kTile, count - start);
        dots(keys + start * dim, some, dim, packed, used, op.scale, tile);
        for (int r = 0; r < used; ++r) {
          float* row = rows + row_of[r] * num_entries + start;
          for (int64_t j = 0; j < some; ++j) row[j] = std::max(row[j], tile[r * kTile + j]);
        }
      }
      used = 0;
    };
    for (int a = 0; a < op.num_queries; ++a) {
      std::fill(rows + a * num_entries, rows + (a + 1) * num_entries, kNothing);
      const bool present = op.position(span.slot, a) >= 0;
      for (int g = 0; g < heads_per_row && present; ++g) {
        pack_query(op.query(span, first_head + g, a), used, dim, packed);
        row_of[used++] = a;
        if (used == kRows) flush();
      }
    }
    flush();
  }

  void run(float* out) const {
    const int64_t num_entries = op.entries.num_entries;
    std::fill(out, out + num_entries, 0.0f);
    if (span.slot < 0) return;
    const int length = span.length, before = std::max(0, length - op.window);
    const int count = op.exclude_window ? before : length;
    const T* keys = op.keys + span.start * op.entries.dim;
    const int32_t* positions = op.positions + span.start;
    float* total = rows + static_cast<int64_t>(op.num_queries) * num_entries;
    int present = 0;
    for (int a = 0; a < op.num_queries; ++a) present += op.position(span.slot, a) >= 0;
    const float share = op.query_mean && present > 0 ? 1 / static_cast<float>(present) : 1.0f;
    const int passes = op.group_max ? 1 : op.group;
    for (int g = 0; g < passes; ++g) {
      fill_logits(keys, count, g, op.group_max ? op.group : 1);
      std::fill(total, total + num_entries, 0.0f);
      for (int a = 0; a < op.num_queries; ++a) {
        const int64_t visible = std::upper_bound(positions, positions + count, op.position(span.slot, a)) - positions;
        add_softmax(rows + a * num_entries, visible, total);
      }
      for (int j = 0; j < before; ++j) total[j] *= share;
      for (int j = 0; j < before; ++j) out[j] += op.pooling.at(total, before, j) / static_cast<float>(passes);
    }
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const Importance<T, T>& op, const Tensor&) {
    check_spans(op.entries);
    const int64_t num_entries = op.entries.num_entries;
    for_spans(op.entries, op.at_a_time, [&](int64_t u, int64_t place) {
      float* rows = op.scratch + place * (op.num_queries + 1) * num_entries;
      Unit<T>{op, op.entries.span(u), rows}.run(op.scores + u * num_entries);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("window_importance", TORCH_BOX(&window_importance<Kernel>)); }

}  // namespace sparse_rl
