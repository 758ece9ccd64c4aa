// key_redundancy: R-KV's mean cosine to the other keys, without the last similar neighbor of every key.
//
// All but the entries set to zero are linear in the keys: sum_i cos(i, j) = k_j . (sum_i k_i - k_j) for unit keys. Only
// the search for each row's last similar column is pairwise. It goes over blocks of columns from the last one on; a row
// leaves the list of pending rows at its first hit, and the search ends with the list.

#include "backend.h"
#include "dots.h"
#include "key_redundancy.h"

#include <algorithm>
#include <cmath>

namespace sparse_rl {
namespace {

constexpr int kColumns = 32;  // columns per block, two vectors

template <class T>
SPARSE_RL_CLONES void inverse_norms(const T* keys, int64_t count, int64_t dim, float* out) {
  for (int64_t j = 0; j < count; ++j) out[j] = 1 / (std::sqrt(square_sum(keys + j * dim, dim)) + 1e-8f);
}

// out = sum_j keys[j] * norm[j], then out_j = sum of cosines = (keys[j] . sum) * norm[j] - |keys[j]|^2 norm[j]^2
template <class T>
SPARSE_RL_CLONES void linear_part(const T* keys, int64_t count, int64_t dim, const float* norm, float* out) {
  alignas(64) float sum[kMaxHeadDim];
  sum_rows(keys, count, dim, norm, sum);
  for (int64_t j = 0; j < count; ++j) {
    Vec with_all{};
    for (int64_t at = 0; at < dim; at += kBlock) {
      Vec a, b;
      load_part(keys + j * dim, at, dim, a, b);
      a *= norm[j];
      b *= norm[j];
      with_all += a * (load(sum + at) - a);
      with_all += b * (load(sum + at + kLanes) - b);
    }
    out[j] = sum_lanes(with_all);
  }
}

// columns[d][c] = unit key c, element d in block order; missing columns are zeros.
template <class T>
SPARSE_RL_CLONES void pack_columns(const T* keys, int64_t count, int64_t dim, const float* norm, float* columns) {
  alignas(64) float row[kMaxHeadDim];
  const int64_t width = padded(dim);
  for (int64_t c = 0; c < kColumns; ++c) {
    if (c < count) {
      unpack_row(keys + c * dim, dim, row);
    } else {
      std::memset(row, 0, width * sizeof(float));
    }
    const float factor = c < count ? norm[c] : 0.0f;
    for (int64_t d = 0; d < width; ++d) columns[d * kColumns + c] = row[d] * factor;
  }
}

// cosines[r][c] of up to four rows with half a block of columns.
template <int Rows>
SPARSE_RL_INLINE void multiply_columns(
    const float* rows, int64_t width, const float* norms, const float* columns, float* cosines) {
  Vec sum[Rows] = {};
  for (int64_t d = 0; d < width; ++d) {
    const Vec own = load(columns + d * kColumns);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sum[r] += own * rows[r * width + d];
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) store(cosines + r * kColumns, sum[r] * norms[r]);
}

// cosines[r][c] of up to eight pending rows with a block of columns.
template <class T, int Rows>
SPARSE_RL_CLONES void cosines_of(
    const T* keys, const int32_t* pending, int64_t dim, const float* norm, const float* columns, float* cosines) {
  alignas(64) float rows[Rows * kMaxHeadDim];
  float norms[Rows];
  const int64_t width = padded(dim);
  for (int r = 0; r < Rows; ++r) unpack_row(keys + pending[r] * dim, dim, rows + r * width), norms[r] = norm[pending[r]];
  for (int c = 0; c < kColumns; c += kLanes) {
    multiply_columns<Rows < 4 ? Rows : 4>(rows, width, norms, columns + c, cosines + c);
    if constexpr (Rows > 4) {
      multiply_columns<Rows - 4>(rows + 4 * width, width, norms + 4, columns + c, cosines + c + 4 * kColumns);
    }
  }
}

// out = mix * importance - (1 - mix) * softmax(out)
void mix_with(const float* importance, float mix, int64_t count, float* out) {
  const float largest = *std::max_element(out, out + count);
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += out[j] = std::exp(out[j] - largest);
  for (int64_t j = 0; j < count; ++j) {
    out[j] = mix * importance[j] - (1 - mix) * (out[j] / static_cast<float>(sum));
  }
}

template <class T>
struct Unit {
  const Redundancy<T>& op;
  int64_t dim;

  void run(int64_t u, int64_t place) const {
    const Span span = op.entries.span(u);
    const int64_t num_entries = op.entries.num_entries, length = span.length;
    float* row = op.out + u * num_entries;
    std::fill(row, row + num_entries, 0.0f);
    if (span.slot < 0 || length == 0) return;
    const T* keys = op.keys + span.start * dim;
    float* norm = op.scratch + place * 3 * num_entries;
    auto* pending = reinterpret_cast<int32_t*>(norm + num_entries);
    inverse_norms(keys, length, dim, norm);
    linear_part(keys, length, dim, norm, row);
    spare_last(keys, length, norm, pending, row);
    for (int64_t j = 0; j < length; ++j) row[j] /= static_cast<float>(length);
    if (op.importance) mix_with(op.importance + u * num_entries, op.mix, length, row);
  }

  // Subtract from each column the cosines of the rows whose last similar column it is.
  void spare_last(const T* keys, int64_t length, const float* norm, int32_t* pending, float* row) const {
    alignas(64) float columns[kMaxHeadDim * kColumns], cosines[kRows * kColumns];
    int64_t left = length;
    for (int64_t r = 0; r < length; ++r) pending[r] = static_cast<int32_t>(r);
    const int64_t last_block = (length - 1) / kColumns * kColumns;
    for (int64_t start = last_block; left > 0 && start >= 0; start -= kColumns) {
      const int64_t count = std::min<int64_t>(kColumns, length - start);
      pack_columns(keys + start * dim, count, dim, norm + start, columns);
      int64_t kept = 0;
      for (int64_t r = 0; r < left; r += kRows) {
        const int64_t some = std::min<int64_t>(kRows, left - r);
        if (some == kRows) {
          cosines_of<T, kRows>(keys, pending + r, dim, norm, columns, cosines);
        } else {
          for (int64_t k = 0; k < some; ++k) {
            cosines_of<T, 1>(keys, pending + r + k, dim, norm, columns, cosines + k * kColumns);
          }
        }
        for (int64_t k = 0; k < some; ++k) {
          const int32_t own = pending[r + k];
          float* mine = cosines + k * kColumns;
          if (own >= start && own < start + count) mine[own - start] = 0;  // the diagonal counts as 0
          int64_t c = count - 1;
          while (c >= 0 && !(mine[c] > op.threshold)) --c;
          if (c >= 0) {
            row[start + c] -= mine[c];
          } else if (start == 0) {
            row[0] -= mine[0];  // as in the published code, a row without a similar column sets its first entry to zero
          } else {
            pending[kept++] = own;
          }
        }
      }
      left = kept;
    }
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const Redundancy<T>& op, const Tensor&) {
    check_spans(op.entries);
    for_spans(op.entries, op.at_a_time, [&](int64_t u, int64_t place) { Unit<T>{op, op.entries.dim}.run(u, place); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("key_redundancy", TORCH_BOX(&key_redundancy<Kernel>)); }

}  // namespace sparse_rl
