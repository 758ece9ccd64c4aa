// page_attention: one query token per slot over the entries of some pages, given by the lists of select_pages.
//
// Tiles are as large as those of decode_attention, so that with all pages listed the bits are the same.

#include "attend.h"
#include "backend.h"
#include "page_attention.h"

namespace sparse_rl {
namespace {

// Neighboring entries of a head.
struct Piece {
  int64_t start, count;
};

// The entries of a list of pages, in pieces.
struct Pages {
  const int32_t* list;
  int64_t width, page_size, length;
  int64_t page = 0, taken = 0;  // in the list, in that page

  bool done() const { return page == width || list[page] < 0; }
  int64_t next() const { return list[page] * page_size + taken; }

  // At most `room` entries; those of adjacent pages together.
  Piece take(int64_t room) {
    Piece piece{next(), 0};
    while (piece.count < room && !done() && next() == piece.start + piece.count) {
      const int64_t end = std::min((list[page] + int64_t{1}) * page_size, length);
      const int64_t some = std::min(end - next(), room - piece.count);
      piece.count += some;
      taken += some;
      if (next() == end) ++page, taken = 0;
    }
    return piece;
  }
};

template <class T>
struct Unit {
  const Attention<T>& op;

  // Up to eight query heads of one KV head.
  template <int Rows>
  void rows(const T* keys, const T* values, Pages pages, int64_t first) const {
    constexpr int Stride = key_stride(Rows);
    const int64_t dim = op.dim, width = padded(dim);
    float queries[kRows * kMaxHeadDim], sums[Rows * kMaxHeadDim], logits[kTile * Stride], rescale[Rows], ones[Rows];
    for (int r = 0; r < Rows; ++r) pack_query(op.query + (first + r) * dim, r, dim, queries);
    std::memset(sums, 0, Rows * width * sizeof(float));
    std::fill(ones, ones + Rows, 1.0f);
    Softmax softmax;
    while (!pages.done()) {
      Piece pieces[kTile];
      int count = 0;
      int64_t filled = 0;
      while (filled < kTile && !pages.done()) {
        pieces[count] = pages.take(kTile - filled);
        filled += pieces[count++].count;
      }
      int64_t at = 0;
      for (int i = 0; i < count; ++i) {
        const Piece piece = pieces[i];
        const int64_t following = i + 1 < count ? pieces[i + 1].start : pages.done() ? piece.start : pages.next();
        const T* own = keys + piece.start * dim;
        const T* after = piece.count > kAhead ? nullptr : keys + following * dim;
        dot_tile<T, Rows>(
            own, piece.count, dim, queries, op.scale, logits + at * Stride, values + piece.start * dim, after);
        at += piece.count;
      }
      add_tile<Rows>(logits, filled, softmax, rescale);
      at = 0;
      for (int i = 0; i < count; ++i) {
        const T* own = values + pieces[i].start * dim;
        add_values<T, Rows>(own, pieces[i].count, dim, logits + at * Stride, i == 0 ? rescale : ones, sums);
        at += pieces[i].count;
      }
    }
    for (int r = 0; r < Rows; ++r) {
      T* out = op.out + (first + r) * dim;
      const float total = finish_row(softmax.largest[r], softmax.sum[r], sums + r * width, dim, out);
      if (op.lse) op.lse[first + r] = total;
    }
  }

  void run(int64_t b, int64_t h) const {
    const bool used = op.heads.slots[b] >= 0;
    const int64_t i = used ? op.heads.index(b, h) : 0, unit = b * op.heads.num_heads + h;
    const int64_t start = used ? op.heads.offsets[i] * op.dim : 0;
    const Pages pages{op.pages + unit * op.width, used ? op.width : 0, op.page_size, op.heads.lengths[i]};
    for (int64_t g = 0; g < op.group; g += kRows) {
      with_rows(std::min<int64_t>(kRows, op.group - g), [&](auto r) {
        rows<decltype(r)::value>(op.key_pool + start, op.value_pool + start, pages, unit * op.group + g);
      });
    }
  }
};

template <class T>
void check_lists(const Attention<T>& op) {
  for (int64_t unit = 0; unit < op.heads.num_rows * op.heads.num_heads; ++unit) {
    const int64_t b = unit / op.heads.num_heads;
    if (op.heads.slots[b] < 0) continue;
    const int64_t length = op.heads.lengths[op.heads.index(b, unit % op.heads.num_heads)];
    const int32_t* list = op.pages + unit * op.width;
    for (int64_t k = 0; k < op.width && list[k] >= 0; ++k) {
      STD_TORCH_CHECK(
          list[k] * op.page_size < length && (k == 0 || list[k] > list[k - 1]), "page ", list[k],
          " of a list does not ascend, or lies behind the ", length, " entries of its head");
    }
  }
}

struct Kernel : Cpu {
  template <class T>
  static void run(const Attention<T>& op, const Tensor&) {
    check_runs(op.heads, op.pool_rows, "the rows of the pool", op.pool_rows);
    check_lists(op);
    for_heads(op.heads.num_rows, op.heads.num_heads, [&](int64_t b, int64_t h) { Unit<T>{op}.run(b, h); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("page_attention", TORCH_BOX(&page_attention<Kernel>)); }

}  // namespace sparse_rl
