// prefill_mass: add up the attention every key receives from a chunk of a prompt's queries (H2O).
//
// Two kernels, so that no matrix of probabilities is stored: blocks of 64 queries find the log-sum-exp of each of their
// rows, then blocks of 64 keys add up what they get from all rows, in the order of the rows.

#include "op_mass.h"
#include "tile.cuh"

namespace sparse_rl {
namespace {

using Square = Product<64, 64>;

// A block's (row b, KV head); its rows r are (query c, head of the group g) = (r / group, r % group).
template <class T, class P>
struct Unit {
  const Mass<T, P>& op;
  int64_t first;  // of the query heads, over all rows b
  int64_t start;  // position of the first query
  const P* keys;
  Run run;

  SPARSE_RL_DEVICE explicit Unit(const Mass<T, P>& op_) : op(op_) {
    const auto heads = static_cast<unsigned>(op.heads.num_heads);
    const unsigned b = blockIdx.x / heads;
    run = find_run(op.heads, b, blockIdx.x % heads, op.num_entries, op.pool_rows);
    first = static_cast<int64_t>(blockIdx.x) * op.group;
    start = op.query_start[b];
    keys = op.key_pool + run.start * op.dim;
    if (threadIdx.x == 0 && run.slot >= 0 && start < 0) complain(op.heads.report, Fault::position, run.slot);
  }

  SPARSE_RL_DEVICE int num_rows() const { return op.chunk * op.group; }
  // Number of keys that row r sees, 0 for padding.
  SPARSE_RL_DEVICE int visible(int r) const {
    const int64_t at = start + r / op.group;
    return r < num_rows() && start >= 0 && at < run.length ? static_cast<int>(at + 1) : 0;
  }
  SPARSE_RL_DEVICE int64_t index(int r) const { return (first + r % op.group) * op.chunk + r / op.group; }
  SPARSE_RL_DEVICE const T* query(int r) const { return visible(r) ? op.queries + index(r) * op.dim : nullptr; }
  SPARSE_RL_DEVICE const P* key(int64_t j) const { return j < run.length ? keys + j * op.dim : nullptr; }
};

template <class T, class P>
__global__ void __launch_bounds__(kThreads) lse_kernel(Mass<T, P> op) {
  __shared__ Square square;
  const Unit<T, P> unit(op);
  const int base = blockIdx.y * 64, last = base + 63 < unit.num_rows() ? base + 63 : unit.num_rows() - 1;
  const int end = unit.visible(last) ? unit.visible(last) : unit.run.length;  // padding follows what sees all keys
  float largest[4], sum[4] = {};
  int visible[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) largest[i] = kNothing, visible[i] = unit.visible(base + Square::row() + i);
  for (int start = 0; start < end && unit.visible(base); start += 64) {
    float c[4][4];
    square.compute<T, P>(
        op.dim, [&](int r) { return unit.query(base + r); }, [&](int j) { return unit.key(start + j); }, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float top = largest[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        c[i][j] = start + Square::column() + j < visible[i] ? c[i][j] * op.scale : kNothing;
        top = fmaxf(top, c[i][j]);
      }
      sum[i] *= rescale(largest[i], top);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i] += c[i][j] == kNothing ? 0.0f : expf(c[i][j] - top);
      largest[i] = top;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // a row is spread over 16 lanes
    const float top = warp_max<16>(largest[i]), all = warp_sum<16>(sum[i] * rescale(largest[i], top));
    const int r = base + Square::row() + i;
    if (Square::column() != 0 || r >= unit.num_rows()) continue;
    op.lse[unit.index(r)] = top == kNothing ? kNothing : top + logf(all);
  }
}

template <class T, class P>
__global__ void __launch_bounds__(kThreads) mass_kernel(Mass<T, P> op) {
  __shared__ Square square;
  __shared__ float parts[16][64];
  const Unit<T, P> unit(op);
  const int start = blockIdx.y * 64;
  if (start >= unit.run.length) return;
  float total[4] = {};
  for (int base = 0; base < unit.num_rows() && unit.visible(base); base += 64) {
    const int last = base + 63 < unit.num_rows() ? base + 63 : unit.num_rows() - 1;
    if (unit.visible(last) && unit.visible(last) <= start) continue;  // these rows see only keys before the block's
    float c[4][4];
    square.compute<T, P>(
        op.dim, [&](int r) { return unit.query(base + r); }, [&](int j) { return unit.key(start + j); }, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = base + Square::row() + i, visible = unit.visible(r);
      const float lse = visible ? op.lse[unit.index(r)] : kNothing;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool sees = start + Square::column() + j < visible && lse != kNothing;
        total[j] += sees ? expf(c[i][j] * op.scale - lse) : 0.0f;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) parts[Square::row() / 4][Square::column() + j] = total[j];
  __syncthreads();
  const int j = start + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= 64 || j >= unit.run.length) return;
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += parts[i][threadIdx.x];
  op.mass[static_cast<int64_t>(blockIdx.x) * op.num_entries + j] += sum;
}

struct Kernel : Device {
  template <class T, class P>
  static void run(const Mass<T, P>& op, const Tensor& on) {
    check_aligned("queries", op.queries);
    const int64_t heads = op.heads.num_rows * op.heads.num_heads, rows = static_cast<int64_t>(op.chunk) * op.group;
    launch(lse_kernel<T, P>, heads, (rows + 63) / 64, kThreads, on, op);
    launch(mass_kernel<T, P>, heads, (op.num_entries + 63) / 64, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("prefill_mass", TORCH_BOX(&prefill_mass<Kernel>)); }

}  // namespace sparse_rl
