// select_pages: the choice of the pages that a new token reads.

#include "backend.h"
#include "choice.h"
#include "dots.h"
#include "select_pages.h"

#include <algorithm>

namespace sparse_rl {
namespace {

// Query heads of a group as rows for dots, split into the factors of the first and the second vector of a page.
struct Wanted {
  alignas(64) float first[kRows * kMaxHeadDim] = {}, second[kRows * kMaxHeadDim] = {};
  int rows = 0;
};

template <class T>
struct Unit {
  const Selection<T>& op;

  void take(const T* query, Wanted& wanted) const {
    pack_query(query, wanted.rows++, op.kept.dim, wanted.first);
  }

  // Positive elements are multiplied by the largest key elements, negative ones by the smallest.
  void split(Wanted& wanted) const {
    const int64_t end = padded(op.kept.dim) * kRows;
    for (int64_t i = 0; op.kept.num_vectors == 2 && i < end; ++i) {
      wanted.second[i] = std::min(wanted.first[i], 0.0f);
      wanted.first[i] = std::max(wanted.first[i], 0.0f);
    }
  }

  // scores[page] = the largest product of the rows, or the maximum of that and the previous value.
  void score(int64_t i, int64_t first, int64_t last, const Wanted& wanted, float factor, bool fresh, float* scores)
      const {
    float tile[kRows * kTile], other[kRows * kTile];
    const int64_t dim = op.kept.dim;
    for (int64_t start = first; start < last; start += kTile) {
      const int64_t some = std::min<int64_t>(kTile, last - start);
      dots(op.kept.at(i, 0, start), some, dim, wanted.first, wanted.rows, factor, tile);
      if (op.kept.num_vectors == 2) {
        dots(op.kept.at(i, 1, start), some, dim, wanted.second, wanted.rows, factor, other);
        for (int64_t k = 0; k < wanted.rows * int64_t{kTile}; ++k) tile[k] += k % kTile < some ? other[k] : 0.0f;
      }
      for (int64_t j = 0; j < some; ++j) {
        float best = fresh ? tile[j] : std::max(scores[start + j], tile[j]);
        for (int r = 1; r < wanted.rows; ++r) best = std::max(best, tile[r * kTile + j]);
        scores[start + j] = best;
      }
    }
  }

  void score_group(int64_t b, int64_t h, int64_t first, int64_t last, float* scores) const {
    const int64_t i = op.heads.index(b, h), dim = op.kept.dim;
    const T* query = op.query + (b * op.heads.num_heads + h) * op.group * dim;
    if (op.group_max) {
      for (int64_t g = 0; g < op.group; g += kRows) {
        Wanted wanted;
        for (int64_t r = g; r < std::min(op.group, g + kRows); ++r) take(query + r * dim, wanted);
        split(wanted);
        score(i, first, last, wanted, 1.0f, g == 0, scores);
      }
      return;
    }
    Wanted mean;  // of one row; products with it are the means of the products
    for (int64_t g = 0; g < op.group; ++g) {
      Wanted one;
      take(query + g * dim, one);
      split(one);
      for (int64_t k = 0; k < padded(dim) * kRows; ++k) mean.first[k] += one.first[k], mean.second[k] += one.second[k];
    }
    mean.rows = 1;
    score(i, first, last, mean, 1 / static_cast<float>(op.group), true, scores);
  }

  void run(int64_t b, int64_t h) const {
    const int64_t unit = b * op.heads.num_heads + h, P = op.kept.num_pages;
    float* scores = op.scores + unit * P;
    int32_t* pages = op.pages + unit * op.width;
    std::fill(scores, scores + P, 0.0f);
    std::fill(pages, pages + op.width, -1);
    if (op.heads.slots[b] < 0) return;
    const int64_t length = op.heads.lengths[op.heads.index(b, h)], limit = op.limits[b];
    const int64_t count = (length + op.page_size - 1) / op.page_size;
    if (count > limit) score_group(b, h, op.num_first, count - op.num_last, scores);
    Choice choice{scores, nullptr, count, limit, op.num_first, op.num_last};
    choice.settle();
    for (int64_t p = 0; p < count; ++p) {
      if (choice.stays(p)) *pages++ = static_cast<int32_t>(p);
    }
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const Selection<T>& op, const Tensor&) {
    const int64_t room = op.kept.num_pages * op.page_size;
    for (int64_t b = 0; b < op.heads.num_rows; ++b) {
      check_slot(op.heads.slots[b], op.heads.num_slots);
      STD_TORCH_CHECK(op.limits[b] >= 0, "limits[", b, "] is ", op.limits[b], " pages, which cannot be negative");
      for (int64_t h = 0; h < op.heads.num_heads && op.heads.slots[b] >= 0; ++h) {
        const int64_t length = op.heads.lengths[op.heads.index(b, h)];
        check_run(0, length, room, "those of the pages of summaries", room);
        const int64_t count = std::min<int64_t>((length + op.page_size - 1) / op.page_size, op.limits[b]);
        STD_TORCH_CHECK(
            count <= op.width, "a row reads ", count, " pages, more than the ", op.width, " that there is room for");
      }
    }
    for_heads(op.heads.num_rows, op.heads.num_heads, [&](int64_t b, int64_t h) { Unit<T>{op}.run(b, h); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("select_pages", TORCH_BOX(&select_pages<Kernel>)); }

}  // namespace sparse_rl
