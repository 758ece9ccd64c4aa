// prefill_mass: add up the attention every key receives from a chunk of a prompt's queries (H2O).
//
// Two kernels, so that no matrix of probabilities is stored: blocks of 64 queries find the log-sum-exp of each of their
// rows, then blocks of 64 keys add up what they get from all rows, in the order of the rows.

#include "tile.cuh"

namespace sparse_rl {
namespace {

using Square = Product<64, 64>;

template <class T>
struct Mass {
  const T *queries, *key_pool;  // queries (B, Hq, C, D)
  const int64_t* query_start;
  float *mass, *lse;
  int group, chunk, num_entries, dim;
  int64_t pool_rows;
  float scale;
  Heads heads;
};

// A block's (row b, KV head); its rows r are (query c, head of the group g) = (r / group, r % group).
template <class T>
struct Unit {
  const Mass<T>& op;
  int64_t first;  // of the query heads, over all rows b
  int64_t start;  // position of the first query
  const T* keys;
  Run run;

  SPARSE_RL_DEVICE explicit Unit(const Mass<T>& op_) : op(op_) {
    const auto heads = static_cast<unsigned>(op.heads.num_heads);
    const unsigned b = blockIdx.x / heads;
    run = find_run(op.heads, b, blockIdx.x % heads, op.num_entries, op.pool_rows);
    first = static_cast<int64_t>(blockIdx.x) * op.group;
    start = op.query_start[b];
    keys = op.key_pool + run.start * op.dim;
  }

  SPARSE_RL_DEVICE int num_rows() const { return op.chunk * op.group; }
  // Number of keys that row r sees, 0 for padding.
  SPARSE_RL_DEVICE int visible(int r) const {
    const int64_t at = start + r / op.group;
    return r < num_rows() && start >= 0 && at < run.length ? static_cast<int>(at + 1) : 0;
  }
  SPARSE_RL_DEVICE int64_t index(int r) const { return (first + r % op.group) * op.chunk + r / op.group; }
  SPARSE_RL_DEVICE const T* query(int r) const { return visible(r) ? op.queries + index(r) * op.dim : nullptr; }
  SPARSE_RL_DEVICE const T* key(int j) const { return j < run.length ? keys + static_cast<int64_t>(j) * op.dim : nullptr; }
};

template <class T>
__global__ void __launch_bounds__(kThreads) lse_kernel(Mass<T> op) {
  __shared__ Square square;
  const Unit<T> unit(op);
  const int base = blockIdx.y * 64, last = base + 63 < unit.num_rows() ? base + 63 : unit.num_rows() - 1;
  const int end = unit.visible(last) ? unit.visible(last) : unit.run.length;  // padding follows what sees all keys
  float largest[4], sum[4] = {};
  int visible[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) largest[i] = kNothing, visible[i] = unit.visible(base + Square::row() + i);
  for (int start = 0; start < end && unit.visible(base); start += 64) {
    float c[4][4];
    square.compute<T>(
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
    if (Square::column() == 0 && r < unit.num_rows()) op.lse[unit.index(r)] = top == kNothing ? kNothing : top + logf(all);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) mass_kernel(Mass<T> op) {
  __shared__ Square square;
  __shared__ float parts[16][64];
  const Unit<T> unit(op);
  const int start = blockIdx.y * 64;
  if (start >= unit.run.length) return;
  float total[4] = {};
  for (int base = 0; base < unit.num_rows() && unit.visible(base); base += 64) {
    const int last = base + 63 < unit.num_rows() ? base + 63 : unit.num_rows() - 1;
    if (unit.visible(last) && unit.visible(last) <= start) continue;  // these rows see only keys before the block's
    float c[4][4];
    square.compute<T>(
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

void prefill_mass(
    const Tensor& queries, const Tensor& query_start, const Tensor& key_pool, const Tensor& slots,
    const Tensor& offsets, const Tensor& lengths, double scale, const Tensor& mass, const Tensor& lse) {
  const PoolShape pool = check_device_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool);
  const int64_t B = heads.num_rows, H = heads.num_heads;
  const int64_t Hq = queries.dim() == 4 ? queries.size(1) : 0, C = queries.dim() == 4 ? queries.size(2) : 0;
  const int64_t N = mass.dim() == 3 ? mass.size(2) : 0;
  STD_TORCH_CHECK(H > 0 && Hq % H == 0, "queries have ", Hq, " heads, expected a multiple of the ", H, " KV heads");
  check_tensor("queries", queries, key_pool, pool.dtype, {B, Hq, C, pool.dim});
  check_tensor("query_start", query_start, key_pool, ScalarType::Long, {B});
  check_tensor("mass", mass, key_pool, ScalarType::Float, {B, H, N});
  check_tensor("lse", lse, key_pool, ScalarType::Float, {B, Hq, C});
  check_aligned("queries", queries);

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Mass<T> op{
        data<T>(queries), data<T>(key_pool), data<int64_t>(query_start), data<float>(mass), data<float>(lse),
        static_cast<int>(Hq / H), static_cast<int>(C), static_cast<int>(N), static_cast<int>(pool.dim), pool.rows,
        static_cast<float>(scale), heads};
    launch(lse_kernel<T>, B * H, (C * (Hq / H) + 63) / 64, kThreads, key_pool, op);
    launch(mass_kernel<T>, B * H, (N + 63) / 64, kThreads, key_pool, op);
  };
  SPARSE_RL_DISPATCH_DEVICE(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("prefill_mass", TORCH_BOX(&prefill_mass)); }

}  // namespace sparse_rl
