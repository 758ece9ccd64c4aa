// draw as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "keyed_random.h"

#include <cmath>

namespace sparse_rl {

inline constexpr int64_t kRowParams = 6;  // temperature, top_k, top_p, min_p, min_length, number of top log-probs
inline constexpr int64_t kChunk = 512;  // logits whose maximum and sum are kept; as CHUNK in ops/draw.py

// Maximum of a chunk of logits, and the sum of exp((logit - maximum) / temperature) over it; NaN if a logit is NaN or
// +inf.
struct ChunkSum {
  double maximum, sum;
};

template <class T>
struct Draw {
  const T* logits;         // (B, V)
  const T* drawn_from;     // (B, V) or null: the logits to draw from, if they are others
  const int64_t* keys;     // (B)
  const int64_t* steps;    // (B)
  const int64_t* end_ids;  // (E)
  int64_t* tokens;         // (B)
  float* logprobs;         // (B)
  float* behavior;         // (B) or null
  int32_t* top_ids;        // (B, K) or null
  float* top_logprobs;     // (B, K) or null
  int32_t* support;        // (B) or null: tokens that top-k, top-p and min-p leave, 0 where they leave all
  ChunkSum* chunks;        // (B, G, C): of the policy and, with G = 2, of what is drawn from if that differs
  const double* row_params;  // (B, kRowParams) or null: what a row has in place of the numbers below
  const int64_t* row_ends;   // (B, E) or null, padded with -1
  int64_t num_rows, vocabulary, num_parts, num_chunks, num_ends, min_length, top_k, num_top, wanted_top;
  double temperature, top_p, min_p;
  bool greedy;

  // The same draw with the numbers of one row.
  SPARSE_RL_DEVICE Draw at(int64_t b) const {
    Draw row = *this;
    if (!row_params) return row;
    const double* p = row_params + kRowParams * b;
    row.greedy = p[0] == 0, row.temperature = row.greedy ? 1.0 : p[0];
    row.top_k = static_cast<int64_t>(p[1]), row.top_p = p[2], row.min_p = p[3];
    row.min_length = static_cast<int64_t>(p[4]);
    row.wanted_top = p[5] > 0 ? (p[5] < num_top ? static_cast<int64_t>(p[5]) : num_top) : 0;
    if (row_ends) row.end_ids = row_ends + num_ends * b;
    return row;
  }

  // Whether the end tokens of a row are forbidden.
  SPARSE_RL_DEVICE bool masks(int64_t b) const { return num_ends && steps[b] < min_length; }

  // Whether a row is drawn from other logits than the policy's.
  SPARSE_RL_DEVICE bool differs(int64_t b) const { return drawn_from || masks(b); }

  SPARSE_RL_DEVICE bool truncates() const { return top_p < 1 || min_p > 0 || (top_k > 0 && top_k < vocabulary); }
};

template <class Backend>
void draw(
    const Tensor& logits, const std::optional<Tensor>& drawn_from, const Tensor& sequence_keys, const Tensor& steps,
    const Tensor& end_ids, int64_t min_length, double temperature, int64_t top_k, double top_p, double min_p,
    const Tensor& tokens, const Tensor& token_logprobs, const std::optional<Tensor>& behavior,
    const std::optional<Tensor>& top_ids, const std::optional<Tensor>& top_logprobs, const Tensor& chunks,
    const std::optional<Tensor>& row_params, const std::optional<Tensor>& row_ends, const std::optional<Tensor>& support,
    const std::optional<Tensor>& masses) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be (rows, vocabulary), got ", logits.dim(), " dimensions");
  const ScalarType dtype = logits.scalar_type();
  const int64_t B = logits.size(0), V = logits.size(1), C = (V + kChunk - 1) / kChunk;
  const bool by_row = row_ends.has_value() && row_ends->dim() == 2;
  const int64_t E = by_row ? row_ends->size(1) : end_ids.dim() == 1 ? end_ids.size(0) : 0;
  const int64_t G = min_length > 0 || row_params.has_value() || drawn_from.has_value() ? 2 : 1;
  const int64_t K = top_ids.has_value() && top_ids->dim() == 2 ? top_ids->size(1) : 0;
  STD_TORCH_CHECK(V > 0, "logits are of an empty vocabulary");
  STD_TORCH_CHECK(temperature >= 0 && std::isfinite(temperature), "temperature is ", temperature, ", expected 0 or more");
  STD_TORCH_CHECK(top_k >= 0 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1, "top_k, top_p or min_p is out of range");
  STD_TORCH_CHECK(K <= V, "top_ids has room for ", K, " tokens, the vocabulary has ", V);
  check_tensor("logits", logits, logits, dtype, {B, V});
  check_tensor("drawn_from", drawn_from, logits, dtype, {B, V});
  check_tensor("sequence_keys", sequence_keys, logits, ScalarType::Long, {B});
  check_tensor("steps", steps, logits, ScalarType::Long, {B});
  check_tensor("end_ids", end_ids, logits, ScalarType::Long, {by_row ? 0 : E});
  STD_TORCH_CHECK(row_params.has_value() || !row_ends.has_value(), "row_ends needs row_params");
  STD_TORCH_CHECK(!masses.has_value(), "masses are of no use to this kernel: leave them out");
  check_tensor("row_params", row_params, logits, ScalarType::Double, {B, kRowParams});
  check_tensor("row_ends", row_ends, logits, ScalarType::Long, {B, E});
  check_tensor("support", support, logits, ScalarType::Int, {B});
  check_tensor("tokens", tokens, logits, ScalarType::Long, {B});
  check_tensor("token_logprobs", token_logprobs, logits, ScalarType::Float, {B});
  check_tensor("behavior", behavior, logits, ScalarType::Float, {B});
  check_tensor("top_ids", top_ids, logits, ScalarType::Int, {B, K});
  check_tensor("top_logprobs", top_logprobs, logits, ScalarType::Float, {B, K});
  check_tensor("chunks", chunks, logits, ScalarType::Double, {B, G, C, 2});
  Backend::dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Draw<T> op{
        pointer<T>(logits), pointer<T>(drawn_from), pointer<int64_t>(sequence_keys), pointer<int64_t>(steps),
        pointer<int64_t>(end_ids), pointer<int64_t>(tokens), pointer<float>(token_logprobs), pointer<float>(behavior),
        pointer<int32_t>(top_ids), pointer<float>(top_logprobs), pointer<int32_t>(support),
        static_cast<ChunkSum*>(chunks.mutable_data_ptr()), pointer<double>(row_params), pointer<int64_t>(row_ends), B, V, G, C,
        E, min_length, top_k, K, K, temperature > 0 ? temperature : 1.0, top_p, min_p, temperature == 0};
    Backend::run(op, logits);
  });
}

}  // namespace sparse_rl
