// select_pages: the choice of the pages that a new token reads.
//
// One block per (row, KV head) scores the pages that compete, a group of lanes per page, and selects by radix selection
// as in eviction.

#include "choice.cuh"
#include "select_pages.h"

namespace sparse_rl {
namespace {

// Factors of the first and the second vector of a page: the query, or its positive and its negative elements. One query
// head, or the mean over all heads of the group.
template <class T>
SPARSE_RL_DEVICE void fill_wanted(
    const Selection<T>& op, const T* query, int64_t num_heads, float (&wanted)[2][kMaxHeadDim]) {
  const float share = 1 / static_cast<float>(num_heads);
  for (int64_t d = threadIdx.x; d < op.kept.dim; d += kThreads) {
    float first = 0, second = 0;
    for (int64_t g = 0; g < num_heads; ++g) {
      const float q = static_cast<float>(query[g * op.kept.dim + d]);
      first += op.kept.num_vectors == 1 || q > 0 ? q : 0.0f;
      second += op.kept.num_vectors == 2 && q < 0 ? q : 0.0f;
    }
    wanted[0][d] = first * share, wanted[1][d] = second * share;
  }
}

// Lanes lanes score a page together, eight elements at a time.
template <class T, int Lanes>
SPARSE_RL_DEVICE float product(
    const Selection<T>& op, int64_t head, int64_t page, const float (&wanted)[2][kMaxHeadDim]) {
  float sum = 0;
  for (int64_t c = 0; c < op.kept.num_vectors; ++c) {
    const T* vector = op.kept.at(head, c, page);
    for (int d = static_cast<int>(threadIdx.x % Lanes) * 8; d < op.kept.dim; d += Lanes * 8) {
      float x[8];
      load8(vector + d, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[i] * wanted[c][d + i];
    }
  }
  return sum;
}

template <class T, int Lanes>
__global__ void __launch_bounds__(kThreads, 1) select_pages_kernel(Selection<T> op) {
  await_previous();
  __shared__ float wanted[2][kMaxHeadDim];
  __shared__ Choice::Shared shared;
  const auto heads = static_cast<unsigned>(op.heads.num_heads);
  const int64_t unit = blockIdx.x, b = blockIdx.x / heads, slot = op.heads.slots[b];
  float* scores = op.scores + unit * op.kept.num_pages;
  int32_t* pages = op.pages + unit * op.width;
  for (int64_t i = threadIdx.x; i < op.kept.num_pages; i += kThreads) scores[i] = 0;
  for (int64_t i = threadIdx.x; i < op.width; i += kThreads) pages[i] = -1;
  const Report& report = op.heads.report;
  const bool one = threadIdx.x == 0;  // reports errors
  if (slot == -1) return;
  if (slot < 0 || slot >= op.heads.num_slots) {
    if (one) complain(report, Fault::slot, slot);
    return;
  }
  const int64_t head = slot * op.heads.num_heads + blockIdx.x % heads, length = op.heads.lengths[head];
  const int64_t count = (length + op.page_size - 1) / op.page_size, limit = op.limits[b] < 0 ? 0 : op.limits[b];
  if (one && length < 0) complain(report, Fault::run, slot);
  if (one && (count > op.kept.num_pages || op.limits[b] < 0)) complain(report, Fault::pages, slot);
  if (length <= 0 || count > op.kept.num_pages) return;
  const int64_t first = op.num_first, last = count - op.num_last;
  const T* query = op.query + unit * op.group * op.kept.dim;
  const int64_t passes = count <= limit ? 0 : op.group_max ? op.group : 1;
  for (int64_t g = 0; g < passes; ++g) {
    __syncthreads();  // the last query has been used, and the zeros are there
    fill_wanted(op, query + g * op.kept.dim, op.group_max ? 1 : op.group, wanted);
    __syncthreads();
    for (int64_t base = first; base < last; base += kThreads / Lanes) {  // the same for all lanes, which shuffle
      const int64_t page = base + threadIdx.x / Lanes;
      const float sum = warp_sum<Lanes>(page < last ? product<T, Lanes>(op, head, page, wanted) : 0.0f);
      if (page < last && threadIdx.x % Lanes == 0) scores[page] = g == 0 ? sum : fmaxf(scores[page], sum);
    }
  }
  __syncthreads();
  Choice choice{
      scores, nullptr, static_cast<int>(count), static_cast<int>(limit < count ? limit : count), op.num_first,
      op.num_last};
  if (count > limit) choice.settle(shared);
  int64_t listed = 0;
  int ties_seen = 0;
  for (int start = 0; start < count; start += kThreads) {
    const int j = start + static_cast<int>(threadIdx.x);
    const bool stays = count > limit ? choice.stays(j, ties_seen, shared) : j < count;
    const Count kept = count_block(stays, shared.per_warp);
    if (stays && listed + kept.before < op.width) pages[listed + kept.before] = j;
    listed += kept.all;
  }
  if (one && listed > op.width) complain(report, Fault::pages, slot);
}

struct Kernel : Device {
  template <class T>
  static void run(const Selection<T>& op, const Tensor& on) {
    const int64_t blocks = op.heads.num_rows * op.heads.num_heads, dim = op.kept.dim;
    if (dim <= 64) return launch(select_pages_kernel<T, 8>, blocks, 1, kThreads, on, op);
    if (dim <= 128) return launch(select_pages_kernel<T, 16>, blocks, 1, kThreads, on, op);
    launch(select_pages_kernel<T, 32>, blocks, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("select_pages", TORCH_BOX(&select_pages<Kernel>)); }

}  // namespace sparse_rl
