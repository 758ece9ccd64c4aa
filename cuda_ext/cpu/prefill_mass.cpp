// prefill_mass: add up the attention every key receives from a chunk of a prompt's queries (H2O).
//
// Two passes over the keys, the first for the softmax denominators, so that no row of probabilities is ever stored.

#include "backend.h"
#include "dots.h"
#include "op_mass.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparse_rl {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

SPARSE_RL_CLONES float row_max(const float* row, int64_t count, float largest) {
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) largest = row[j] > largest ? row[j] : largest;
  return largest;
}

// Sum of exp(row - base); with `mass` also adds each of the terms to it.
SPARSE_RL_CLONES float row_exp(const float* row, int64_t count, float base, float* mass) {
  Vec sums{};
  for (int64_t j = 0; j < count; j += kLanes) {
    alignas(64) float part[kLanes];
    const int64_t some = count - j < kLanes ? count - j : kLanes;
    for (int64_t i = 0; i < kLanes; ++i) part[i] = i < some ? row[j + i] - base : kNothing;
    Vec p = exp_negative(load(part));
    sums += p;
    store(part, p);
    for (int64_t i = 0; mass && i < some; ++i) mass[j + i] += part[i];
  }
  return sum_lanes(sums);
}

template <class T>
struct Unit {
  const Mass<T>& op;

  // Up to eight rows (query, head), in the order of their positions.
  struct Rows {
    int count = 0;
    float packed[kRows * kMaxHeadDim];
    int64_t visible[kRows];  // keys each row sees
    float* lse[kRows];
  };

  void add(const T* keys, Rows& rows, float* out) const {
    float tile[kRows * kTile], largest[kRows], sum[kRows] = {};
    std::fill(largest, largest + kRows, kNothing);
    const int64_t end = rows.count ? *std::max_element(rows.visible, rows.visible + rows.count) : 0;
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t start = 0; start < end; start += kTile) {
        const int64_t some = std::min<int64_t>(kTile, end - start);
        dots(keys + start * op.dim, some, op.dim, rows.packed, rows.count, op.scale, tile);
        for (int r = 0; r < rows.count; ++r) {
          const int64_t count = std::min(some, rows.visible[r] - start);
          if (count <= 0) continue;
          const float* row = tile + r * kTile;
          if (pass == 1) {
            if (*rows.lse[r] != kNothing) row_exp(row, count, *rows.lse[r], out + start);
            continue;
          }
          const float before = largest[r], base = largest[r] = row_max(row, count, before);
          if (base == kNothing) continue;
          sum[r] = sum[r] * std::exp(before - base) + row_exp(row, count, base, nullptr);
        }
      }
      for (int r = 0; pass == 0 && r < rows.count; ++r) {
        *rows.lse[r] = largest[r] == kNothing ? kNothing : largest[r] + std::log(sum[r]);
      }
    }
    rows.count = 0;
  }

  void run(int64_t b, int64_t h) const {
    const int64_t head = b * op.heads.num_heads + h, first = head * op.group;
    std::fill(op.lse + first * op.chunk, op.lse + (first + op.group) * op.chunk, kNothing);
    if (op.heads.slots[b] < 0) return;
    const int64_t i = op.heads.index(b, h), start = op.query_start[b], length = op.heads.lengths[i];
    const T* keys = op.key_pool + op.heads.offsets[i] * op.dim;
    float* out = op.mass + head * op.num_entries;
    Rows rows;
    for (int64_t c = 0; c < op.chunk && start + c < length; ++c) {
      for (int64_t g = 0; g < op.group; ++g) {
        const int64_t row = (first + g) * op.chunk + c;
        pack_query(op.queries + row * op.dim, rows.count, op.dim, rows.packed);
        rows.visible[rows.count] = start + c + 1;
        rows.lse[rows.count++] = op.lse + row;
        if (rows.count == kRows) add(keys, rows, out);
      }
    }
    add(keys, rows, out);
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const Mass<T>& op, const Tensor&) {
    check_runs(op.heads, op.num_entries, "the entries of mass", op.pool_rows);
    for (int64_t b = 0; b < op.heads.num_rows; ++b) {
      const int64_t start = op.query_start[b];
      STD_TORCH_CHECK(start >= 0, "query_start[", b, "] is ", start, ", a position cannot be negative");
    }
    for_heads(op.heads, [&](int64_t b, int64_t h) { Unit<T>{op}.run(b, h); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("prefill_mass", TORCH_BOX(&prefill_mass<Kernel>)); }

}  // namespace sparse_rl
