// decode_attention: one query token per slot over its live entries, softmax kept online, everything summed in float32.
//
// One block per (row, KV head) takes up to eight query heads of the group at once, so that K and V are read once. Its
// warps share out the entries by fixed rules and merge in a fixed order: a row's bits depend on nothing but its slot.
// 16-bit types run on tensor cores, straight from 16-byte loads: see attend_tensor. float32 runs on plain FMAs.

#include "device.cuh"

namespace sparse_rl {
namespace {

constexpr int kHeads = 8;  // query heads per pass over the entries

template <class T>
struct Attention {
  const T *query, *key_pool, *value_pool;
  T* out;
  float *lse, *probs;  // null where not wanted
  int64_t group, dim, max_length, num_probs, pool_rows;
  float scale;
  Heads heads;
};

// Running softmax of one query head: the largest logit so far and the sum of exp(logit - largest).
struct Softmax {
  float largest, sum;

  // Turn logits into exp(logit - largest so far); returns what earlier sums must be multiplied by.
  template <int Count, class Spread>
  SPARSE_RL_DEVICE float add(float (&logits)[Count], Spread spread) {
    float top = logits[0];
#pragma unroll
    for (int i = 1; i < Count; ++i) top = fmaxf(top, logits[i]);
    top = fmaxf(largest, spread(top));
    const float base = top == kNothing ? 0.0f : top, factor = rescale(largest, top);
    sum *= factor;
#pragma unroll
    for (int i = 0; i < Count; ++i) sum += logits[i] = expf(logits[i] - base);
    largest = top;
    return factor;
  }
};

// What the parts of a block (warps, or halves of warps) know about the heads, and the sums they add up in turn.
template <int Parts, int Width>
struct Merge {
  Softmax softmax[Parts][kHeads];
  float sums[kHeads][Width];

  // The largest logit and the sum of exponentials of a head over all parts.
  SPARSE_RL_DEVICE Softmax total(int head) const {
    Softmax all{kNothing, 0};
    for (int p = 0; p < Parts; ++p) all.largest = fmaxf(all.largest, softmax[p][head].largest);
    for (int p = 0; p < Parts; ++p) all.sum += softmax[p][head].sum * rescale(softmax[p][head].largest, all.largest);
    return all;
  }

  // Results of up to eight heads, once the sums are complete.
  template <class T>
  SPARSE_RL_DEVICE void finish(const Attention<T>& op, int64_t first, int count, int length) const {
    const int dim = static_cast<int>(op.dim);
    for (int i = threadIdx.x; i < count * dim; i += kThreads) {
      const int head = i / dim, d = i % dim;
      const float sum = total(head).sum;
      op.out[(first + head) * op.dim + d] = narrow<T>(sums[head][d] * (sum > 0 ? 1 / sum : sum));
    }
    for (int head = threadIdx.x; op.lse && head < count; head += kThreads) op.lse[first + head] = log_sum(head);
    if (!op.probs) return;
    for (int head = 0; head < count; ++head) {
      float* row = op.probs + (first + head) * op.num_probs;
      const float log = log_sum(head);
      for (int64_t j = threadIdx.x; j < op.num_probs; j += kThreads) {
        row[j] = j < length && log != kNothing ? expf(row[j] - log) : 0.0f;
      }
    }
  }

  SPARSE_RL_DEVICE float log_sum(int head) const {
    const Softmax all = total(head);
    return all.largest == kNothing ? kNothing : all.largest + logf(all.sum);
  }
};

// c += a b on tensor cores: a (16, 16) rows of T, b (16, 8), c (16, 8) float32. In lane 4r + q the registers hold
// a: rows r and r + 8 at columns 2q, 2q + 1, then the same rows at 2q + 8, 2q + 9; b: column r at rows 2q, 2q + 1, then
// 2q + 8, 2q + 9; c: row r at columns 2q, 2q + 1, then row r + 8.
template <class T>
SPARSE_RL_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef SPARSE_RL_EMULATE
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  emulation::exchange(own, 6, [&](const uint32_t* mail) {
    auto half = [](uint32_t word, int high) { return element<T>(high ? word >> 16 : word & 0xFFFFu); };
    for (int i = 0; i < 4; ++i) {
      const int r = row + i / 2 * 8, n = column + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint32_t* left = mail + (r % 8 * 4 + k % 8 / 2) * 16;
        const uint32_t* right = mail + (n * 4 + k % 8 / 2) * 16;
        c[i] += half(left[k / 8 * 2 + r / 8], k % 2) * half(right[4 + k / 8], k % 2);
      }
    }
    return 0;
  });
#else
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

template <class T>
SPARSE_RL_DEVICE uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(narrow<T>(low).x) | static_cast<uint32_t>(narrow<T>(high).x) << 16;
}

// A row's 16 bytes at element `at`, zeros where there is nothing.
template <class T>
SPARSE_RL_DEVICE uint4 load_if(bool there, const T* row, int at) {
  return there ? load16(row + at) : make_uint4(0, 0, 0, 0);
}

// Tensor cores without shared memory. Products may take the elements of a head, and the entries, in any order as long
// as both factors agree, so every lane simply loads 16 neighbouring bytes and feeds them wherever its registers stand.
// A warp takes 16 entries at a time:
// logits (8 heads, 16 entries) = Q (8 heads, D) K^T: lane 4r + q loads elements 32i + 8q.. of query r and of entry r;
// sums^T (D, 8 heads) += V^T (D, 16 entries) P^T: lane 4r + q loads elements 64i + 8r.. of entries 2q, 2q + 1 (+ 8) and
// pairs them up; the logits of these entries are just those the first product left in this lane.
template <class T, int Chunks>
struct Tile {
  uint4 query[2 * Chunks];
  float sums[Chunks][4][4];  // [64 elements][pair of elements][element * 2 + head]
  Softmax softmax;           // of query head r, the sum still spread over the lanes q

  SPARSE_RL_DEVICE void begin(const T* query_row, bool there, int dim) {
    const int column = threadIdx.x % 4 * 8;
    softmax = {kNothing, 0};
#pragma unroll
    for (int i = 0; i < 2 * Chunks; ++i) {
      query[i] = load_if(there && 32 * i + column < dim, query_row, 32 * i + column);
    }
#pragma unroll
    for (int i = 0; i < 16 * Chunks; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0;
  }

  // logits[n * 2 + k]: query head r with entry 8n + 2q + k of the tile.
  SPARSE_RL_DEVICE void dots(const T* keys, int count, int dim, float (&logits)[4]) const {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 8;
    uint4 key[2][2 * Chunks];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = 8 * n + row;
#pragma unroll
      for (int i = 0; i < 2 * Chunks; ++i) {
        key[n][i] = load_if(j < count && 32 * i + column < dim, keys + static_cast<int64_t>(j) * dim, 32 * i + column);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < 2 * Chunks; ++i) {
        const uint32_t first[4] = {query[i].x, 0, query[i].y, 0}, second[4] = {query[i].z, 0, query[i].w, 0};
        multiply<T>(c, first, key[n][i].x, key[n][i].y);
        multiply<T>(c, second, key[n][i].z, key[n][i].w);
      }
      logits[2 * n] = c[0], logits[2 * n + 1] = c[1];
    }
  }

  SPARSE_RL_DEVICE void add_values(const T* values, int count, int dim, const float (&shares)[4], float factor) {
    const int lane = threadIdx.x % 32, row = lane / 4 * 8, entry = lane % 4 * 2;
    const float factors[2] = {__shfl_sync(kAll, factor, entry * 4), __shfl_sync(kAll, factor, entry * 4 + 4)};
    const uint32_t b0 = pack<T>(shares[0], shares[1]), b1 = pack<T>(shares[2], shares[3]);
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      uint4 value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = entry + k % 2 + k / 2 * 8;
        value[k] = load_if(j < count && 64 * i + row < dim, values + static_cast<int64_t>(j) * dim, 64 * i + row);
      }
      add_pair(sums[i][0], value[0].x, value[1].x, value[2].x, value[3].x, b0, b1, factors);
      add_pair(sums[i][1], value[0].y, value[1].y, value[2].y, value[3].y, b0, b1, factors);
      add_pair(sums[i][2], value[0].z, value[1].z, value[2].z, value[3].z, b0, b1, factors);
      add_pair(sums[i][3], value[0].w, value[1].w, value[2].w, value[3].w, b0, b1, factors);
    }
  }

  // Two elements of four entries: the low and the high halves of the words.
  SPARSE_RL_DEVICE static void add_pair(
      float (&c)[4], uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3, uint32_t b0, uint32_t b1,
      const float (&factors)[2]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) c[k] *= factors[k % 2];
    const uint32_t a[4] = {
        __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
        __byte_perm(v2, v3, 0x7632)};
    multiply<T>(c, a, b0, b1);
  }

  // Add to the block's sums, which are relative to the largest logit of all warps.
  template <int Width>
  SPARSE_RL_DEVICE void merge(Merge<kWarps, Width>& all, int warp) const {
    const int lane = threadIdx.x % 32, head = lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float factor = rescale(all.softmax[warp][head + k].largest, all.total(head + k).largest);
#pragma unroll
      for (int i = 0; i < 8 * Chunks; ++i) {
        const int d = 64 * (i / 8) + lane / 4 * 8 + i % 8;
        all.sums[head + k][d] += factor * sums[i / 8][i % 8 / 2][i % 2 * 2 + k];
      }
    }
  }
};

template <class T, int Chunks>
__global__ void __launch_bounds__(kThreads, 1) attend_tensor(Attention<T> op) {
  __shared__ Merge<kWarps, 64 * Chunks> all;
  const auto heads = static_cast<unsigned>(op.heads.num_heads);
  const Run run = find_run(op.heads, blockIdx.x / heads, blockIdx.x % heads, op.max_length, op.pool_rows);
  const T *keys = op.key_pool + run.start * op.dim, *values = op.value_pool + run.start * op.dim;
  const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, entry = threadIdx.x % 4 * 2;
  const int dim = static_cast<int>(op.dim);
  for (int64_t g = 0; g < op.group; g += kHeads) {
    const int64_t first = blockIdx.x * op.group + g;
    const int count = static_cast<int>(op.group - g < kHeads ? op.group - g : kHeads);
    for (int i = threadIdx.x; i < kHeads * 64 * Chunks; i += kThreads) all.sums[i / (64 * Chunks)][i % (64 * Chunks)] = 0;
    Tile<T, Chunks> tile;
    tile.begin(op.query + (first + row) * op.dim, row < count, dim);
    for (int start = 16 * warp; start < run.length; start += 16 * kWarps) {
      const int left = run.length - start;
      float logits[4];
      tile.dots(keys + static_cast<int64_t>(start) * dim, left, dim, logits);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = entry + i % 2 + i / 2 * 8;
        logits[i] = j < left ? logits[i] * op.scale : kNothing;
        if (op.probs && j < left && row < count) op.probs[(first + row) * op.num_probs + start + j] = logits[i];
      }
      const float factor = tile.softmax.add(logits, [](float x) { return warp_max<4>(x); });
      tile.add_values(values + static_cast<int64_t>(start) * dim, left, dim, logits, factor);
    }
    tile.softmax.sum = warp_sum<4>(tile.softmax.sum);
    if (threadIdx.x % 4 == 0) all.softmax[warp][row] = tile.softmax;
    for (int turn = 0; turn < kWarps; ++turn) {
      __syncthreads();
      if (turn == warp) tile.merge(all, warp);
    }
    __syncthreads();
    all.finish(op, first, count, run.length);
    __syncthreads();
  }
}

// Plain FMAs on 16-byte loads: `Lanes` lanes read a row of K or V together, each of them `Parts` words of 16 bytes; the
// groups of lanes take four entries at a time.
template <class T, int Lanes, int Parts, int Heads_>
struct Strip {
  static constexpr int Width = kWidth<T>, Groups = 32 / Lanes, Keys = 4;
  float query[Heads_][Parts][Width], sums[Heads_][Parts][Width];
  Softmax softmax[Heads_];

  SPARSE_RL_DEVICE static int place(int part) { return (part * Lanes + static_cast<int>(threadIdx.x % Lanes)) * Width; }

  SPARSE_RL_DEVICE void begin(const T* rows, int count, int dim) {
#pragma unroll
    for (int r = 0; r < Heads_; ++r) {
      softmax[r] = {kNothing, 0};
#pragma unroll
      for (int p = 0; p < Parts; ++p) {
        unpack<T>(load_if(r < count && place(p) < dim, rows + static_cast<int64_t>(r) * dim, place(p)), query[r][p]);
#pragma unroll
        for (int i = 0; i < Width; ++i) sums[r][p][i] = 0;
      }
    }
  }

  SPARSE_RL_DEVICE void dots(const T* keys, int left, int dim, float (&logits)[Heads_][Keys]) const {
#pragma unroll
    for (int k = 0; k < Keys; ++k) {
      float key[Parts][Width];
#pragma unroll
      for (int p = 0; p < Parts; ++p) {
        const bool there = k * Groups < left && place(p) < dim;
        unpack<T>(load_if(there, keys + static_cast<int64_t>(k * Groups) * dim, place(p)), key[p]);
      }
#pragma unroll
      for (int r = 0; r < Heads_; ++r) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Parts * Width; ++i) sum += query[r][i / Width][i % Width] * key[i / Width][i % Width];
        logits[r][k] = warp_sum<Lanes>(sum);
      }
    }
  }

  SPARSE_RL_DEVICE void add_values(
      const T* values, int left, int dim, const float (&shares)[Heads_][Keys], const float (&factors)[Heads_]) {
#pragma unroll
    for (int r = 0; r < Heads_; ++r) {
#pragma unroll
      for (int i = 0; i < Parts * Width; ++i) sums[r][i / Width][i % Width] *= factors[r];
    }
#pragma unroll
    for (int k = 0; k < Keys; ++k) {
#pragma unroll
      for (int p = 0; p < Parts; ++p) {
        float value[Width];
        const bool there = k * Groups < left && place(p) < dim;
        unpack<T>(load_if(there, values + static_cast<int64_t>(k * Groups) * dim, place(p)), value);
#pragma unroll
        for (int r = 0; r < Heads_; ++r) {
#pragma unroll
          for (int i = 0; i < Width; ++i) sums[r][p][i] += shares[r][k] * value[i];
        }
      }
    }
  }
};

template <class T, int Lanes, int Parts, int Heads_>
__global__ void __launch_bounds__(kThreads, 1) attend_plain(Attention<T> op) {
  using Rows = Strip<T, Lanes, Parts, Heads_>;
  constexpr int Groups = Rows::Groups, Keys = Rows::Keys, Width = Lanes * Parts * Rows::Width;
  __shared__ Merge<kWarps * Groups, Width> all;
  const auto heads = static_cast<unsigned>(op.heads.num_heads);
  const Run run = find_run(op.heads, blockIdx.x / heads, blockIdx.x % heads, op.max_length, op.pool_rows);
  const T *keys = op.key_pool + run.start * op.dim, *values = op.value_pool + run.start * op.dim;
  const int part = threadIdx.x / Lanes, dim = static_cast<int>(op.dim);
  for (int64_t g = 0; g < op.group; g += Heads_) {
    const int64_t first = blockIdx.x * op.group + g;
    const int count = static_cast<int>(op.group - g < Heads_ ? op.group - g : Heads_);
    for (int i = threadIdx.x; i < Heads_ * Width; i += kThreads) all.sums[i / Width][i % Width] = 0;
    Rows rows;
    rows.begin(op.query + first * op.dim, count, dim);
    // the loop is the same for all lanes of a warp, which shuffle; entry k of a group is start + k * Groups
    for (int base = part / Groups * Groups * Keys; base < run.length; base += kWarps * Groups * Keys) {
      const int start = base + part % Groups, left = run.length - start;
      const int64_t at = left > 0 ? start : 0;
      float logits[Heads_][Keys], factors[Heads_];
      rows.dots(keys + at * dim, left, dim, logits);
#pragma unroll
      for (int r = 0; r < Heads_; ++r) {
#pragma unroll
        for (int k = 0; k < Keys; ++k) {
          const bool there = k * Groups < left;
          logits[r][k] = there ? logits[r][k] * op.scale : kNothing;
          if (op.probs && there && r < count && threadIdx.x % Lanes == 0) {
            op.probs[(first + r) * op.num_probs + start + k * Groups] = logits[r][k];
          }
        }
        factors[r] = rows.softmax[r].add(logits[r], [](float x) { return x; });
      }
      rows.add_values(values + at * dim, left, dim, logits, factors);
    }
    if (threadIdx.x % Lanes == 0) {
#pragma unroll
      for (int r = 0; r < Heads_; ++r) all.softmax[part][r] = rows.softmax[r];
    }
    for (int turn = 0; turn < kWarps * Groups; ++turn) {
      __syncthreads();
      if (turn != part) continue;
#pragma unroll
      for (int r = 0; r < Heads_; ++r) {
        const float factor = rescale(rows.softmax[r].largest, all.total(r).largest);
#pragma unroll
        for (int i = 0; i < Parts * Rows::Width; ++i) {
          all.sums[r][Rows::place(i / Rows::Width) + i % Rows::Width] += factor * rows.sums[r][i / Rows::Width][i % Rows::Width];
        }
      }
    }
    __syncthreads();
    all.finish(op, first, count, run.length);
    __syncthreads();
  }
}

template <class T>
auto tensor_kernel(int64_t dim) {
  if (dim <= 64) return attend_tensor<T, 1>;
  if (dim <= 128) return attend_tensor<T, 2>;
  return dim <= 256 ? attend_tensor<T, 4> : attend_plain<T, 32, 2, 4>;  // more would not fit into registers
}

auto plain_kernel(int64_t dim, int64_t group) {
  const bool few = group <= 4;
  if (dim <= 64) return few ? attend_plain<float, 16, 1, 4> : attend_plain<float, 16, 1, 8>;
  if (dim <= 128) return few ? attend_plain<float, 32, 1, 4> : attend_plain<float, 32, 1, 8>;
  if (dim <= 256) return few ? attend_plain<float, 32, 2, 4> : attend_plain<float, 32, 2, 8>;
  return attend_plain<float, 32, 4, 4>;
}

void decode_attention(
    const Tensor& query, const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& offsets,
    const Tensor& lengths, double scale, int64_t max_length, const Tensor& out, const std::optional<Tensor>& lse,
    const std::optional<Tensor>& probs) {
  const PoolShape pool = check_device_pool(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool);
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
  check_aligned("query", query);
  check_aligned("value_pool", value_pool);

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Attention<T> op{
        data<T>(query), data<T>(key_pool), data<T>(value_pool), data<T>(out), lse ? data<float>(*lse) : nullptr,
        probs ? data<float>(*probs) : nullptr, Hq / H, D, max_length, M, pool.rows, static_cast<float>(scale), heads};
    if constexpr (sizeof(T) == 4) {
      launch(plain_kernel(D, op.group), B * H, 1, kThreads, key_pool, op);
    } else {
      launch(tensor_kernel<T>(D), B * H, 1, kThreads, key_pool, op);
    }
  };
  SPARSE_RL_DISPATCH_DEVICE(pool.dtype, run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention)); }

}  // namespace sparse_rl
