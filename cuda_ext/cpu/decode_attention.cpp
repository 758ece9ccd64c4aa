// decode_attention: one query token per slot over its live entries, softmax kept online, everything summed in float32.

#include "attend.h"
#include "heads.h"

namespace sparse_rl {
namespace {

template <class T>
struct Attention {
  const T *query, *key_pool, *value_pool;
  T* out;
  float *lse, *probs;  // null where not wanted
  int64_t group, dim, num_entries;
  float scale;
  Heads heads;

  // Up to eight query heads of one KV head.
  template <int Rows>
  void rows(const T* keys, const T* values, int64_t length, int64_t first) const {
    const int64_t width = padded(dim);
    float queries[kRows * kMaxHeadDim], sums[Rows * kMaxHeadDim], logits[kTile * key_stride(Rows)], rescale[Rows];
    for (int r = 0; r < Rows; ++r) pack_query(query + (first + r) * dim, r, dim, queries);
    std::memset(sums, 0, Rows * width * sizeof(float));
    Softmax softmax;
    for (int64_t start = 0; start < length; start += kTile) {
      const int64_t count = std::min<int64_t>(kTile, length - start);
      dot_tile<T, Rows>(keys + start * dim, count, dim, queries, scale, logits, values + start * dim);
      for (int r = 0; probs && r < Rows; ++r) {
        float* row = probs + (first + r) * num_entries + start;
        for (int64_t j = 0; j < count; ++j) row[j] = logits[j * key_stride(Rows) + r];
      }
      add_tile<Rows>(logits, count, softmax, rescale);
      add_values<T, Rows>(values + start * dim, count, dim, logits, rescale, sums);
    }
    for (int r = 0; r < Rows; ++r) finish(first + r, length, softmax.largest[r], softmax.sum[r], sums + r * width);
  }

  void finish(int64_t head, int64_t length, float largest, float sum, const float* sums) const {
    const float total = finish_row(largest, sum, sums, dim, out + head * dim);
    if (lse) lse[head] = total;
    if (!probs) return;
    float* row = probs + head * num_entries;
    for (int64_t j = 0; j < length; ++j) row[j] = total == kNothing ? 0.0f : std::exp(row[j] - total);
    std::fill(row + length, row + num_entries, 0.0f);
  }

  void unit(int64_t b, int64_t h) const {
    const bool used = heads.slots[b] >= 0;
    const int64_t i = used ? heads.index(b, h) : 0, length = used ? heads.lengths[i] : 0;
    const int64_t start = used ? heads.offsets[i] * dim : 0;
    const T *keys = key_pool + start, *values = value_pool + start;
    for (int64_t g = 0; g < group; g += kRows) {
      const int64_t first = (b * heads.num_heads + h) * group + g;
      with_rows(std::min<int64_t>(kRows, group - g), [&](auto r) {
        this->template rows<decltype(r)::value>(keys, values, length, first);
      });
    }
  }
};

void decode_attention(
    const Tensor& query, const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& offsets,
    const Tensor& lengths, double scale, int64_t max_length, const Tensor& out, const std::optional<Tensor>& lse,
    const std::optional<Tensor>& probs, const std::optional<Tensor>& errors) {
  const PoolShape pool = check_key_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::decode_attention);
  const int64_t B = heads.num_rows, H = heads.num_heads, D = pool.dim;
  const int64_t Hq = query.dim() == 3 ? query.size(1) : 0;
  const int64_t M = probs.has_value() && probs->dim() == 3 ? probs->size(2) : max_length;
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "query has ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  check_tensor("query", query, key_pool, pool.dtype, {B, Hq, D});
  check_tensor("value_pool", value_pool, key_pool, pool.dtype, {pool.rows, D});
  check_tensor("out", out, key_pool, pool.dtype, {B, Hq, D});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, Hq});
  check_tensor("probs", probs, key_pool, ScalarType::Float, {B, Hq, M});
  STD_TORCH_CHECK(M >= max_length, "probs has room for ", M, " entries, max_length is ", max_length);
  check_runs(heads, max_length, "max_length", pool.rows);

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Attention<T> op{
        data<T>(query), data<T>(key_pool), data<T>(value_pool), data<T>(out), lse ? data<float>(*lse) : nullptr,
        probs ? data<float>(*probs) : nullptr, Hq / H, D, M, static_cast<float>(scale), heads};
    const int64_t grain = 1 + 65536 / ((max_length + 1) * D);
    torch::stable::parallel_for(0, B * H, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) op.unit(i / H, i % H);
    });
  };
  SPARSE_RL_DISPATCH(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention)); }

}  // namespace sparse_rl
