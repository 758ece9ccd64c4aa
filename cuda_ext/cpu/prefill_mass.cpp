// prefill_mass: add up the attention every key receives from a chunk of a prompt's queries (H2O).
//
// Two passes over the keys, the first for the softmax denominators, so that no row of probabilities is ever stored.

#include "dots.h"
#include "heads.h"

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
struct Mass {
  const T *queries, *key_pool;
  const int64_t* query_start;
  float *mass, *lse;
  int64_t group, chunk, num_entries, dim;
  float scale;
  Heads heads;

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
        dots(keys + start * dim, some, dim, rows.packed, rows.count, scale, tile);
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

  void unit(int64_t b, int64_t h) const {
    const int64_t slot = heads.slots[b], first = (b * heads.num_heads + h) * group;
    std::fill(lse + first * chunk, lse + (first + group) * chunk, kNothing);
    if (slot < 0) return;
    const int64_t i = heads.index(b, h), length = heads.lengths[i];
    const T* keys = key_pool + heads.offsets[i] * dim;
    Rows rows;
    for (int64_t c = 0; c < chunk && query_start[b] + c < length; ++c) {
      for (int64_t g = 0; g < group; ++g) {
        const int64_t row = (first + g) * chunk + c;
        pack_query(queries + row * dim, rows.count, dim, rows.packed);
        rows.visible[rows.count] = query_start[b] + c + 1;
        rows.lse[rows.count++] = lse + row;
        if (rows.count == kRows) add(keys, rows, mass + (b * heads.num_heads + h) * num_entries);
      }
    }
    add(keys, rows, mass + (b * heads.num_heads + h) * num_entries);
  }
};

void prefill_mass(
    const Tensor& queries, const Tensor& query_start, const Tensor& key_pool, const Tensor& slots,
    const Tensor& offsets, const Tensor& lengths, double scale, const Tensor& mass, const Tensor& lse) {
  const PoolShape pool = check_key_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool);
  const int64_t B = heads.num_rows, H = heads.num_heads;
  const int64_t Hq = queries.dim() == 4 ? queries.size(1) : 0, C = queries.dim() == 4 ? queries.size(2) : 0;
  const int64_t N = mass.dim() == 3 ? mass.size(2) : 0;
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "queries have ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  check_tensor("queries", queries, key_pool, pool.dtype, {B, Hq, C, pool.dim});
  check_tensor("query_start", query_start, key_pool, ScalarType::Long, {B});
  check_tensor("mass", mass, key_pool, ScalarType::Float, {B, H, N});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, Hq, C});
  check_runs(heads, N, "the entries of mass", pool.rows);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t start = query_start.const_data_ptr<int64_t>()[b];
    STD_TORCH_CHECK(start >= 0, "query_start[", b, "] is ", start, ", a position cannot be negative");
  }

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Mass<T> op{
        data<T>(queries), data<T>(key_pool), data<int64_t>(query_start), data<float>(mass), data<float>(lse), Hq / H,
        C, N, pool.dim, static_cast<float>(scale), heads};
    torch::stable::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) op.unit(i / H, i % H);
    });
  };
  SPARSE_RL_DISPATCH(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("prefill_mass", TORCH_BOX(&prefill_mass)); }

}  // namespace sparse_rl
