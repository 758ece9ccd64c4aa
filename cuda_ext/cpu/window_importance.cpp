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
  const Importance<T>& op;

  // Logits of the queries present, rows (query, head), against `count` keys; several heads of a query share the row of
  // their maximum.
  void fill_logits(const T* keys, int64_t count, int64_t slot, int64_t first_head, int64_t heads_per_row, float* rows)
      const {
    const int64_t* at = op.query_positions + slot * op.num_queries;
    float packed[kRows * kMaxHeadDim], tile[kRows * kTile];
    int64_t row_of[kRows];
    int used = 0;
    auto flush = [&]() {
      for (int64_t start = 0; used && start < count; start += kTile) {
        const int64_t some = std::min<int64_t>(kTile, count - start);
        dots(keys + start * op.dim, some, op.dim, packed, used, op.scale, tile);
        for (int r = 0; r < used; ++r) {
          float* row = rows + row_of[r] * op.num_entries + start;
          for (int64_t j = 0; j < some; ++j) row[j] = std::max(row[j], tile[r * kTile + j]);
        }
      }
      used = 0;
    };
    for (int64_t a = 0; a < op.num_queries; ++a) {
      std::fill(rows + a * op.num_entries, rows + (a + 1) * op.num_entries, kNothing);
      for (int64_t g = 0; g < heads_per_row && at[a] >= 0; ++g) {
        const int64_t head = slot * op.num_heads * op.group + first_head + g;
        pack_query(op.queries + (head * op.num_queries + a) * op.dim, used, op.dim, packed);
        row_of[used++] = a;
        if (used == kRows) flush();
      }
    }
    flush();
  }

  void run(int64_t slot, int64_t h) const {
    const int64_t head = slot * op.num_heads + h, length = op.lengths[head];
    float* out = op.scores + head * op.num_entries;
    std::fill(out, out + op.num_entries, 0.0f);
    const int before = static_cast<int>(std::max<int64_t>(0, length - op.window));
    const int64_t count = op.exclude_window ? before : length;
    const T* keys = op.keys.at(slot, h);
    const int64_t* positions = op.positions.at(slot, h);
    const int64_t* at = op.query_positions + slot * op.num_queries;
    float* rows = op.scratch + head * (op.num_queries + 1) * op.num_entries;
    float* total = rows + static_cast<int64_t>(op.num_queries) * op.num_entries;
    int64_t present = 0;
    for (int64_t a = 0; a < op.num_queries; ++a) present += at[a] >= 0;
    const float share = op.query_mean && present > 0 ? 1 / static_cast<float>(present) : 1.0f;
    const int passes = op.group_max ? 1 : op.group;
    for (int g = 0; g < passes; ++g) {
      fill_logits(keys, count, slot, h * op.group + g, op.group_max ? op.group : 1, rows);
      std::fill(total, total + op.num_entries, 0.0f);
      for (int64_t a = 0; a < op.num_queries; ++a) {
        const int64_t visible = std::upper_bound(positions, positions + count, at[a]) - positions;
        add_softmax(rows + a * op.num_entries, visible, total);
      }
      for (int j = 0; j < before; ++j) total[j] *= share;
      for (int j = 0; j < before; ++j) out[j] += op.pooling.at(total, before, j) / static_cast<float>(passes);
    }
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const Importance<T>& op, const Tensor&) {
    check_lengths(op.lengths, op.num_slots * op.num_heads, op.num_entries);
    for_heads(op.num_slots, op.num_heads, [&](int64_t s, int64_t h) { Unit<T>{op}.run(s, h); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("window_importance", TORCH_BOX(&window_importance<Kernel>)); }

}  // namespace sparse_rl
