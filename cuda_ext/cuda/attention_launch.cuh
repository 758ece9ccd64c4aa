// Choice of the kernel: tensor cores for 16-bit queries, plain FMAs for float32 and for heads too large for registers.
#pragma once

#include "attention_plain.cuh"
#include "attention_tensor.cuh"

namespace sparse_rl {

template <class T, class P>
struct Variant {
  void (*kernel)(Attention<T, P>);
  int heads, threads;  // query heads and threads of a block
};

// The head sizes of most models have kernels of their own, others run with room for more.
template <class T, class P, bool kPaged>
Variant<T, P> tensor_variant(int64_t dim) {
  constexpr int kHeads = kHeadsPerBlock;
  if (dim == 64) return {attend_tensor<T, P, 64, false, kPaged>, kHeads, kAttendThreads};
  if (dim == 128) return {attend_tensor<T, P, 128, false, kPaged>, kHeads, kAttendThreads};
  if (dim < 128) return {attend_tensor<T, P, 128, true, kPaged>, kHeads, kAttendThreads};
  if (dim <= 256) return {attend_wide<T, P, kPaged>, kHeads, kWideAttendThreads};
  return {attend_plain<T, P, 32, 2, 4, kPaged>, 4, kAttendThreads};
}

template <class P, bool kPaged>
Variant<float, P> plain_variant(int64_t dim, int64_t group) {
  const bool few = group <= 4;
  const auto pick = [&](auto four, auto eight) {
    return few ? Variant<float, P>{four, 4, kAttendThreads} : Variant<float, P>{eight, 8, kAttendThreads};
  };
  if (dim <= 64) return pick(attend_plain<float, P, 16, 1, 4, kPaged>, attend_plain<float, P, 16, 1, 8, kPaged>);
  if (dim <= 128) return pick(attend_plain<float, P, 32, 1, 4, kPaged>, attend_plain<float, P, 32, 1, 8, kPaged>);
  if constexpr (!kPaged) {  // eight such heads and a list of pages are more than there are registers
    if (dim <= 256 && !few) return {attend_plain<float, P, 32, 2, 8, kPaged>, 8, kAttendThreads};
  }
  if (dim <= 256) return {attend_plain<float, P, 32, 2, 4, kPaged>, 4, kAttendThreads};
  return {attend_plain<float, P, 32, 4, 4, kPaged>, 4, kAttendThreads};
}

// The splits of the longest head that there can be, which the host knows without a wait.
template <bool kPaged, class T, class P>
int64_t checked_splits(const Attention<T, P>& op) {
  check_aligned("query", op.query);
  check_aligned("value_pool", op.value_pool);
  const int64_t most = kPaged ? int64_t{op.width} * op.page_size : op.max_length, splits = count_splits(most);
  STD_TORCH_CHECK(
      splits == 1 || (op.partials && op.max_splits >= splits), "partials has room for ",
      op.partials ? op.max_splits : 0, " splits of a head, ", most, " entries are up to ", splits);
  return splits;
}

// A block per (row, KV head), some of its query heads and a split of its entries; blocks without entries end at once.
template <bool kPaged, class T, class P>
void launch_attention(const Attention<T, P>& op, const Tensor& on) {
  const int64_t splits = checked_splits<kPaged>(op);
  Variant<T, P> variant;
  if constexpr (sizeof(T) == 4) {
    variant = plain_variant<P, kPaged>(op.dim, op.group);
  } else {
    variant = tensor_variant<T, P, kPaged>(op.dim);
  }
  const int64_t units = op.heads.num_rows * op.heads.num_heads;
  const int64_t passes = (op.group + variant.heads - 1) / variant.heads;
  prefer_shared(variant.kernel, on);
  launch(variant.kernel, units, passes * splits, variant.threads, on, op);
  if (splits > 1) launch(combine_splits_kernel<T, P, kPaged>, units, 1, kCombineThreads, on, op);
}

}  // namespace sparse_rl
