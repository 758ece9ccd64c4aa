// decode_attention: one query token per slot over its live entries, softmax kept online, everything summed in float32.

#include "attend.h"
#include "backend.h"
#include "kernels.h"

namespace sparse_rl {
namespace {

template <class T>
struct Unit {
  const Attention<T>& op;

  // Up to eight query heads of one KV head.
  template <int Rows>
  void rows(const T* keys, const T* values, int64_t length, int64_t first) const {
    const int64_t dim = op.dim, width = padded(dim);
    float queries[kRows * kMaxHeadDim], sums[Rows * kMaxHeadDim], logits[kTile * key_stride(Rows)], rescale[Rows];
    for (int r = 0; r < Rows; ++r) pack_query(op.query + (first + r) * dim, r, dim, queries);
    std::memset(sums, 0, Rows * width * sizeof(float));
    Softmax softmax;
    for (int64_t start = 0; start < length; start += kTile) {
      const int64_t count = std::min<int64_t>(kTile, length - start);
      dot_tile<T, Rows>(keys + start * dim, count, dim, queries, op.scale, logits, values + start * dim);
      for (int r = 0; op.probs && r < Rows; ++r) {
        float* row = op.probs + (first + r) * op.num_probs + start;
        for (int64_t j = 0; j < count; ++j) row[j] = logits[j * key_stride(Rows) + r];
      }
      add_tile<Rows>(logits, count, softmax, rescale);
      add_values<T, Rows>(values + start * dim, count, dim, logits, rescale, sums);
    }
    for (int r = 0; r < Rows; ++r) finish(first + r, length, softmax.largest[r], softmax.sum[r], sums + r * width);
  }

  void finish(int64_t head, int64_t length, float largest, float sum, const float* sums) const {
    const float total = finish_row(largest, sum, sums, op.dim, op.out + head * op.dim);
    if (op.lse) op.lse[head] = total;
    if (!op.probs) return;
    float* row = op.probs + head * op.num_probs;
    for (int64_t j = 0; j < length; ++j) row[j] = total == kNothing ? 0.0f : std::exp(row[j] - total);
    std::fill(row + length, row + op.num_probs, 0.0f);
  }

  void run(int64_t b, int64_t h) const {
    const bool used = op.heads.slots[b] >= 0;
    const int64_t i = used ? op.heads.index(b, h) : 0, length = used ? op.heads.lengths[i] : 0;
    const int64_t start = used ? op.heads.offsets[i] * op.dim : 0;
    const T *keys = op.key_pool + start, *values = op.value_pool + start;
    for (int64_t g = 0; g < op.group; g += kRows) {
      const int64_t first = (b * op.heads.num_heads + h) * op.group + g;
      with_rows(std::min<int64_t>(kRows, op.group - g), [&](auto r) {
        rows<decltype(r)::value>(keys, values, length, first);
      });
    }
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const Attention<T>& op, const Tensor&) {
    check_runs(op.heads, op.max_length, "max_length", op.pool_rows);
    attend(op);
  }
};

}  // namespace

template <class T>
void attend(const Attention<T>& op) {
  const int64_t grain = 1 + 65536 / ((op.max_length + 1) * op.dim);
  for_heads(op.heads.num_rows, op.heads.num_heads, [&](int64_t b, int64_t h) { Unit<T>{op}.run(b, h); }, grain);
}

template void attend(const Attention<float>&);
template void attend(const Attention<BFloat16>&);

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention<Kernel>)); }

}  // namespace sparse_rl
