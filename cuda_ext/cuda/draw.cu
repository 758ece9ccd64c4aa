// draw: the next token of every sequence, by one uniform number and the inverse of the distribution function.
//
// The first kernel reads the logits once: a warp leaves of each chunk its maximum and its sum of exponentials. The
// second has a block per row: it finds the normalizer and the chunk in which the cumulative probability passes the
// number, and reads only that chunk again. Top-k, top-p and min-p first find the worst token that stays, by a radix
// selection over the chunks that can have it; masses are summed as integers, so that their order does not matter.

#include "choice.cuh"
#include "draw.h"

namespace sparse_rl {
namespace {

constexpr int kPerLane = static_cast<int>(kChunk) / 32;
constexpr double kWhole = 17592186044416.0;  // 2^44: probability 1 as a mass; the masses of a row fit into 64 bits
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
using Mass = unsigned long long;

template <int Words, class T>
SPARSE_RL_DEVICE T shuffle_xor(T value, int step) {
  static_assert(sizeof(T) == 4 * Words);
  uint32_t words[Words];
  memcpy(words, &value, sizeof(value));
#pragma unroll
  for (int i = 0; i < Words; ++i) words[i] = __shfl_xor_sync(kAll, words[i], step);
  memcpy(&value, words, sizeof(value));
  return value;
}

SPARSE_RL_DEVICE double warp_sum_wide(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += shuffle_xor<2>(x, step);
  return x;
}

// The logits of one row: the policy's (part 0), or those to draw from.
template <class T>
struct Source {
  const T* logits;
  const int64_t* forbidden;
  int64_t num_forbidden;

  SPARSE_RL_DEVICE Source(const Draw<T>& op, int64_t b, int64_t part)
      : logits((part && op.drawn_from ? op.drawn_from : op.logits) + b * op.vocabulary), forbidden(op.end_ids),
        num_forbidden(part && op.masks(b) ? op.num_ends : 0) {}

  SPARSE_RL_DEVICE float allowed(float logit, int64_t token) const {
    for (int64_t e = 0; e < num_forbidden; ++e) logit = forbidden[e] == token ? kNegInf : logit;
    return logit;
  }

  SPARSE_RL_DEVICE float at(int64_t token) const { return allowed(static_cast<float>(logits[token]), token); }
};

// Call visit(i, logit) for a lane's logits of a chunk, 16 bytes at a time where they are aligned.
template <class T, class Visit>
SPARSE_RL_DEVICE void load_chunk(const Source<T>& source, int64_t first, int64_t vocabulary, Visit visit) {
  constexpr int Width = kWidth<T>;
  const int lane = threadIdx.x % 32;
  const T* row = source.logits + first;
  if (first + kChunk <= vocabulary && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
#pragma unroll
    for (int part = 0; part < kPerLane / Width; ++part) {
      const int at = (part * 32 + lane) * Width;
      float some[Width];
      unpack<T>(load16(row + at), some);
#pragma unroll
      for (int i = 0; i < Width; ++i) visit(part * Width + i, source.allowed(some[i], first + at + i));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t token = first + i * 32 + lane;
    visit(i, token < vocabulary ? source.at(token) : kNegInf);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) draw_sums_kernel(Draw<T> op) {
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const auto parts = static_cast<unsigned>(op.num_parts);
  if (chunk >= op.num_chunks) return;
  const Source<T> source(op, blockIdx.y / parts, blockIdx.y % parts);
  float x[kPerLane], top = kNegInf;
  bool fine = true;
  load_chunk(source, chunk * kChunk, op.vocabulary, [&](int i, float logit) {
    x[i] = logit;
    top = fmaxf(top, logit);
    fine = fine && logit < -kNegInf;  // neither NaN nor +inf
  });
  top = warp_max(top);
  const bool all_fine = __ballot_sync(kAll, !fine) == 0;
  const float factor = static_cast<float>(1 / op.temperature);
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += top == kNegInf ? 0.0f : expf((x[i] - top) * factor);
  sum = warp_sum_wide(sum);
  if (threadIdx.x % 32 == 0) {
    op.chunks[blockIdx.y * op.num_chunks + chunk] = all_fine ? ChunkSum{top, sum} : ChunkSum{kNan, kNan};
  }
}

struct Shared {
  double totals[kWarps];
  float exponentials[kChunk];
  Mass bins[kThreads], left;
  int tops[kWarps], per_warp[kWarps], bin, count;
  int64_t token;
};

// The worst token that stays: logits as rank keys, among equal ones the lowest tokens.
struct Limit {
  uint32_t key = 0;
  int64_t token = -1;

  SPARSE_RL_DEVICE bool stays(float logit, int64_t at) const {
    const uint32_t own = rank_key(logit);
    return own > key || (own == key && at <= token);
  }
};

constexpr int64_t kTies = std::numeric_limits<int64_t>::max();  // as the token of a limit: all with its logit stay

// One row as a distribution over the tokens within a limit. The same in all threads of a block.
template <class T>
struct Row {
  const Draw<T>& op;
  Source<T> source;
  ChunkSum* chunks;
  Shared& shared;
  Limit least;
  float maximum = kNegInf;
  double total = 0;

  SPARSE_RL_DEVICE Row(const Draw<T>& op, int64_t b, int64_t part, Shared& shared)
      : op(op), source(op, b, part), chunks(op.chunks + (b * op.num_parts + part) * op.num_chunks), shared(shared) {
    bool broken = false;
    for (int64_t c = threadIdx.x; c < op.num_chunks; c += kThreads) {
      const float own = static_cast<float>(chunks[c].maximum);
      broken = broken || own != own;
      maximum = fmaxf(maximum, own);  // drops NaN
    }
    maximum = warp_max(maximum);
    broken = count_block(broken, shared.per_warp).all > 0;
    if (threadIdx.x % 32 == 0) shared.exponentials[threadIdx.x / 32] = maximum;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.exponentials[w]);
    if (broken) maximum = kNan;
    __syncthreads();
    if (is_fine()) add_up();
  }

  SPARSE_RL_DEVICE bool is_fine() const { return maximum > kNegInf; }
  SPARSE_RL_DEVICE double exponential(double logit) const { return exp((logit - maximum) / op.temperature); }
  SPARSE_RL_DEVICE double logprob(double logit) const { return (logit - maximum) / op.temperature - log(total); }
  SPARSE_RL_DEVICE int64_t size(int64_t c) const {
    return op.vocabulary - c * kChunk < kChunk ? op.vocabulary - c * kChunk : kChunk;
  }
  SPARSE_RL_DEVICE double weight(int64_t c) const {
    return chunks[c].sum > 0 ? chunks[c].sum * exponential(chunks[c].maximum) : 0.0;
  }
  SPARSE_RL_DEVICE uint32_t top_key(int64_t c) const { return rank_key(static_cast<float>(chunks[c].maximum)); }

  // exp((logit - maximum of the chunk) / temperature), or 0 outside the limit.
  SPARSE_RL_DEVICE float relative(int64_t c, int64_t token) const {
    const float logit = source.at(token), factor = static_cast<float>(1 / op.temperature);
    const bool stays = least.stays(logit, token) && logit > kNegInf;
    return stays ? expf((logit - static_cast<float>(chunks[c].maximum)) * factor) : 0.0f;
  }

  SPARSE_RL_DEVICE void add_up() {
    double sum = 0;
    for (int64_t c = threadIdx.x; c < op.num_chunks; c += kThreads) sum += weight(c);
    sum = warp_sum_wide(sum);
    if (threadIdx.x % 32 == 0) shared.totals[threadIdx.x / 32] = sum;
    __syncthreads();
    total = 0;
    for (int w = 0; w < kWarps; ++w) total += shared.totals[w];
    __syncthreads();
  }

  // Leave out all tokens outside `limit`.
  SPARSE_RL_DEVICE void limit(Limit limit) {
    least = limit;
    for (int64_t c = threadIdx.x / 32; c < op.num_chunks; c += kWarps) {
      double sum = 0;
      for (int64_t i = threadIdx.x % 32; top_key(c) >= least.key && i < size(c); i += 32) {
        sum += relative(c, c * kChunk + i);
      }
      sum = warp_sum_wide(sum);
      if (threadIdx.x % 32 == 0) chunks[c].sum = sum;
    }
    __syncthreads();
    add_up();
  }

  // Call visit(logit, token) for the tokens of a warp whose keys may reach `key`, and that stay so far.
  template <class Visit>
  SPARSE_RL_DEVICE void visit_from(uint32_t key, Visit visit) const {
    for (int64_t c = threadIdx.x / 32; c < op.num_chunks; c += kWarps) {
      if (top_key(c) < key) continue;
      for (int64_t token = c * kChunk + threadIdx.x % 32; token < c * kChunk + size(c); token += 32) {
        const float logit = source.at(token);
        if (least.stays(logit, token)) visit(logit, token);
      }
    }
  }

  SPARSE_RL_DEVICE Mass mass(float logit) const { return static_cast<Mass>(exponential(logit) / total * kWhole); }

  // The worst of the fewest best tokens whose masses (or numbers) reach `target`; four rounds of 256 bins find its key.
  template <bool Counts>
  SPARSE_RL_DEVICE Limit end_of(Mass target) {
    const auto mass_of = [&](float logit) { return Counts ? Mass{1} : mass(logit); };
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      shared.bins[threadIdx.x] = 0;
      __syncthreads();
      visit_from(prefix, [&](float logit, int64_t) {
        const uint32_t key = rank_key(logit);
        if ((key & mask) == prefix) atomicAdd(&shared.bins[key >> shift & 255], mass_of(logit));
      });
      __syncthreads();
      if (threadIdx.x == 0) {
        int bin = 255, last = -1;
        for (; bin >= 0; --bin) {
          if (!shared.bins[bin]) continue;
          last = bin;
          if (shared.bins[bin] >= target) break;
          target -= shared.bins[bin];
        }
        // by rounding the target may exceed all there is: then everything stays
        shared.bin = last < 0 ? 0 : last, shared.left = bin < 0 ? ~Mass{0} : target;
      }
      __syncthreads();
      target = shared.left;
      prefix |= static_cast<uint32_t>(shared.bin) << shift;
      mask |= 255u << shift;
      __syncthreads();
    }
    return {prefix, end_of_ties(prefix, target, mass_of)};
  }

  // The last token that stays of those with this key.
  template <class MassOf>
  SPARSE_RL_DEVICE int64_t end_of_ties(uint32_t key, Mass target, MassOf mass_of) {
    if (threadIdx.x == 0) shared.token = kTies;
    __syncthreads();
    Mass so_far = 0;
    for (int64_t c = 0; c < op.num_chunks; ++c) {
      if (top_key(c) < key) continue;
      for (int64_t first = c * kChunk; first < c * kChunk + size(c); first += kThreads) {
        const int64_t token = first + threadIdx.x;
        const float logit = token < op.vocabulary ? source.at(token) : kNegInf;
        const bool tied = token < op.vocabulary && rank_key(logit) == key && least.stays(logit, token);
        const Count count = count_block(tied, shared.per_warp);
        const Mass before = so_far + count.before * mass_of(logit);
        if (tied && before < target && before + mass_of(logit) >= target) shared.token = token;
        if (tied) shared.left = mass_of(logit);
        __syncthreads();
        if (count.all) so_far += count.all * shared.left;
        if (shared.token != kTies) return shared.token;
        __syncthreads();
      }
    }
    return kTies;
  }

  SPARSE_RL_DEVICE void truncate() {
    if (op.top_k > 0 && op.top_k < op.vocabulary) limit({end_of<true>(op.top_k).key, kTies});
    if (op.top_p < 1) limit(end_of<false>(static_cast<Mass>(op.top_p * kWhole)));
    if (op.min_p > 0) {
      const double exact = maximum + op.temperature * log(op.min_p);
      float least_logit = static_cast<float>(exact);
      if (least_logit < exact) least_logit = nextafterf(least_logit, -kNegInf);
      const uint32_t key = rank_key(least_logit);
      if (key > least.key) limit({key, kTies});
    }
  }

  // The first token whose logit is the largest.
  SPARSE_RL_DEVICE int64_t best() {
    int64_t c = 0;
    while (static_cast<float>(chunks[c].maximum) < maximum) ++c;
    for (int64_t first = c * kChunk;; first += kThreads) {
      const int64_t token = first + threadIdx.x;
      const bool found = token < op.vocabulary && source.at(token) == maximum;
      const Count count = count_block(found, shared.per_warp);
      if (found && count.before == 0) shared.token = token;
      __syncthreads();
      if (count.all) return shared.token;
    }
  }

  // The token at which the cumulative sum passes `target`, which is below `total`.
  SPARSE_RL_DEVICE int64_t find(double target) {
    __shared__ double left;
    if (threadIdx.x == 0) {
      int64_t c = 0;
      for (; c + 1 < op.num_chunks && weight(c) <= target; ++c) target -= weight(c);
      while (!(weight(c) > 0)) --c;  // by rounding nothing was left for the last chunks
      shared.token = c, left = target / exponential(chunks[c].maximum);
    }
    __syncthreads();
    const int64_t c = shared.token;
    for (int64_t i = threadIdx.x; i < size(c); i += kThreads) shared.exponentials[i] = relative(c, c * kChunk + i);
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t last = 0;
      for (int64_t i = 0; i < size(c) && left >= 0; ++i) {
        if (!(shared.exponentials[i] > 0)) continue;
        last = i, left -= shared.exponentials[i];
      }
      shared.token = c * kChunk + last;
    }
    __syncthreads();
    return shared.token;
  }

  // The most likely tokens, the best first. They fit into one block of threads.
  SPARSE_RL_DEVICE void write_top(int64_t b) {
    const Limit worst = end_of<true>(op.num_top);
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    int64_t* ids = op.top_ids + b * op.num_top;
    visit_from(worst.key, [&](float logit, int64_t token) {
      if (worst.stays(logit, token)) ids[atomicAdd(&shared.count, 1)] = token;
    });
    __syncthreads();
    const int own = threadIdx.x;
    int64_t token = 0;
    int rank = 0;
    if (own < op.num_top) {
      token = ids[own];
      const Limit here{rank_key(source.at(token)), token - 1};
      for (int64_t k = 0; k < op.num_top; ++k) rank += here.stays(source.at(ids[k]), ids[k]);
    }
    __syncthreads();
    if (own < op.num_top) {
      ids[rank] = token;
      op.top_logprobs[b * op.num_top + rank] = static_cast<float>(logprob(source.at(token)));
    }
    __syncthreads();
  }
};

// Logits that are NaN or +inf, or all -inf: token 0, and log-probabilities of NaN, by which the scheduler knows.
template <class T>
SPARSE_RL_DEVICE void write_broken(const Draw<T>& op, int64_t b) {
  if (threadIdx.x == 0) {
    op.tokens[b] = 0, op.logprobs[b] = kNan;
    if (op.behavior) op.behavior[b] = kNan;
  }
  for (int64_t k = threadIdx.x; k < op.num_top; k += kThreads) {
    op.top_ids[b * op.num_top + k] = 0, op.top_logprobs[b * op.num_top + k] = kNan;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) draw_token_kernel(Draw<T> op) {
  __shared__ Shared shared;
  const int64_t b = blockIdx.x;
  Row<T> policy(op, b, 0, shared);
  if (!policy.is_fine()) return write_broken(op, b);
  if (op.num_top) policy.write_top(b);
  Row<T> from(op, b, op.num_parts - 1, shared);
  if (!from.is_fine()) return write_broken(op, b);
  int64_t token;
  if (op.greedy) {
    token = from.best();
  } else {
    from.truncate();
    token = from.find(keyed_uniform(op.keys[b], op.steps[b]) * from.total);
  }
  if (threadIdx.x) return;
  op.tokens[b] = token;
  op.logprobs[b] = static_cast<float>(policy.logprob(policy.source.at(token)));
  if (op.behavior) op.behavior[b] = static_cast<float>(from.logprob(from.source.at(token)));
}

struct Kernel : Device {
  template <class T>
  static void run(const Draw<T>& op, const Tensor& on) {
    STD_TORCH_CHECK(op.num_top <= kThreads, "top_ids has room for ", op.num_top, " tokens, at most 256 on a GPU");
    launch(draw_sums_kernel<T>, (op.num_chunks + kWarps - 1) / kWarps, op.num_rows * op.num_parts, kThreads, on, op);
    launch(draw_token_kernel<T>, op.num_rows, 1, kThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("draw", TORCH_BOX(&draw<Kernel>)); }

}  // namespace sparse_rl
