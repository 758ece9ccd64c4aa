// draw: the next token of every sequence, by one uniform number and the inverse of the distribution function.
//
// The first kernel reads the logits once: a warp leaves of each chunk its maximum and its sum of exponentials. The
// second has a block per row: it finds the normalizer and the chunk in which the cumulative probability passes the
// number, and reads only that chunk again. Top-k, top-p and min-p first find the worst token that stays: histograms of
// steps below the maximum, then of keys within a step, then of tokens with one key narrow it down, over the chunks that
// can have it. Masses are summed as integers, so that their order does not matter.

#include "draw.h"
#include "ranks.cuh"

namespace sparse_rl {
namespace {

constexpr int kPerLane = static_cast<int>(kChunk) / 32;
constexpr float kWhole = 1099511627776.0f;  // 2^40: the mass of the best token; 64 bits have the sum of any vocabulary
constexpr double kFarthest = 32;               // in units of the temperature: next to no mass is left beyond
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
using Mass = unsigned long long;

// A value of 64 bits from another lane of the warp, word by word.
template <class T, class Move>
SPARSE_RL_DEVICE T moved(T value, Move move) {
  static_assert(sizeof(T) == 8);
  uint32_t words[2];
  memcpy(words, &value, sizeof(value));
  words[0] = move(words[0]), words[1] = move(words[1]);
  memcpy(&value, words, sizeof(value));
  return value;
}

template <class T>
SPARSE_RL_DEVICE T warp_sum_wide(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += moved(x, [=](uint32_t word) { return __shfl_xor_sync(kAll, word, step); });
  return x;
}

SPARSE_RL_DEVICE double from_below(double x, int step) {
  return moved(x, [=](uint32_t word) { return __shfl_up_sync(kAll, word, step); });
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

// The first of neighboring tokens that a lane has in a part of a chunk. It does not depend on how a row is aligned, on
// which the order of sums would depend then.
template <class T>
SPARSE_RL_DEVICE int64_t own_token(int64_t chunk, int part) {
  return chunk * kChunk + (part * 32 + static_cast<int>(threadIdx.x) % 32) * kWidth<T>;
}

// Their logits, in one load of 16 bytes where it is aligned.
template <class T>
SPARSE_RL_DEVICE void load_logits(const Source<T>& source, int64_t token, int64_t vocabulary, float (&x)[kWidth<T>]) {
  constexpr int Width = kWidth<T>;
  const T* from = source.logits + token;
  if (token + Width <= vocabulary && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    unpack<T>(load16(from), x);
#pragma unroll
    for (int i = 0; i < Width; ++i) x[i] = source.allowed(x[i], token + i);
    return;
  }
#pragma unroll
  for (int i = 0; i < Width; ++i) x[i] = token + i < vocabulary ? source.at(token + i) : kNegInf;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) draw_sums_kernel(Draw<T> all) {
  await_previous();
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const auto parts = static_cast<unsigned>(all.num_parts);
  const Draw<T> op = all.at(blockIdx.y / parts);
  if (chunk >= op.num_chunks || (blockIdx.y % parts && !op.differs(blockIdx.y / parts))) return;
  const Source<T> source(op, blockIdx.y / parts, blockIdx.y % parts);
  float x[kPerLane], top = kNegInf;
  bool fine = true;
  constexpr int Width = kWidth<T>;
#pragma unroll
  for (int part = 0; part < kPerLane / Width; ++part) {
    float some[Width];
    load_logits(source, own_token<T>(chunk, part), op.vocabulary, some);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      x[part * Width + i] = some[i];
      top = fmaxf(top, some[i]);
      fine = fine && some[i] < -kNegInf;  // neither NaN nor +inf
    }
  }
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
  double totals[kWarps], rest;
  float ends[2 * kWarps];
  unsigned low[kThreads], high[kThreads];  // words of the masses in bins
  Mass sums[kWarps], left, mass;
  int per_warp[kWarps], bin, count, place;
  int64_t token;
};

// The bin in which a sum of masses reaches a target, what is left of the target there, and the mass of the bin.
struct Reached {
  int bin;
  Mass left, mass;
};

// Where a cumulative sum of weights passes a target, the same in all threads: the place, -1 if no weight is above 0,
// what is left of the target there, and the sum of all.
struct Passed {
  int place;
  double left, all;
};

// One row as a distribution over the tokens within a limit. The same in all threads of a block.
template <class T>
struct Row {
  const Draw<T>& op;
  Source<T> source;
  ChunkSum* chunks;
  Shared& shared;
  Limit least;
  float maximum = kNegInf, lowest = -kNegInf;  // of the maxima of chunks
  double total = 0;
  int stay = 0;  // tokens within the limit, once they are counted

  SPARSE_RL_DEVICE Row(const Draw<T>& op, int64_t b, int64_t part, Shared& shared)
      : op(op), source(op, b, part), chunks(op.chunks + (b * op.num_parts + part) * op.num_chunks), shared(shared) {
    bool broken = false;
    for (int64_t c = threadIdx.x; c < op.num_chunks; c += kThreads) {
      const float own = static_cast<float>(chunks[c].maximum);
      broken = broken || own != own;
      maximum = fmaxf(maximum, own);  // drops NaN
      lowest = fminf(lowest, own);
    }
    maximum = warp_max(maximum), lowest = -warp_max(-lowest);
    broken = count_block(broken, shared.per_warp).all > 0;
    float(&ends)[2 * kWarps] = shared.ends;
    if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = maximum, ends[kWarps + threadIdx.x / 32] = lowest;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, ends[w]), lowest = fminf(lowest, ends[kWarps + w]);
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
  SPARSE_RL_DEVICE float relative(int64_t c, float logit, int64_t token) const {
    const float factor = static_cast<float>(1 / op.temperature);
    const bool stays = least.stays(logit, token) && logit > kNegInf;
    return stays ? expf((logit - static_cast<float>(chunks[c].maximum)) * factor) : 0.0f;
  }

  // Call visit(logit, token) for a lane's tokens of a chunk that stay so far.
  template <class Visit>
  SPARSE_RL_DEVICE void visit_chunk(int64_t c, Visit visit) const {
    constexpr int Width = kWidth<T>;
#pragma unroll 1
    for (int part = 0; part < kPerLane / Width; ++part) {
      const int64_t token = own_token<T>(c, part);
      float some[Width];
      load_logits(source, token, op.vocabulary, some);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        if (token + i < op.vocabulary && least.stays(some[i], token + i)) visit(some[i], token + i);
      }
    }
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
      if (top_key(c) >= least.key) {
        visit_chunk(c, [&](float logit, int64_t token) { sum += relative(c, logit, token); });
      }
      sum = warp_sum_wide(sum);
      if (threadIdx.x % 32 == 0) chunks[c].sum = sum;
    }
    __syncthreads();
    add_up();
  }

  // Call visit(logit, token) for a warp's tokens that stay so far, of the chunks that reach into ranks.
  template <class Visit>
  SPARSE_RL_DEVICE void visit_from(uint64_t low, uint64_t high, Visit visit) const {
    const bool one_key = key_of(low) == key_of(high);
    const uint32_t key = key_of(low) > least.key ? key_of(low) : least.key;
    const int64_t first = one_key ? token_of(high) : 0, last = one_key ? token_of(low) : op.vocabulary - 1;
    for (int64_t c = first / kChunk + threadIdx.x / 32; c < op.num_chunks && c <= last / kChunk; c += kWarps) {
      if (top_key(c) >= key) visit_chunk(c, visit);
    }
  }

  SPARSE_RL_DEVICE Mass mass(float logit) const {
    return static_cast<Mass>(expf((logit - maximum) * static_cast<float>(1 / op.temperature)) * kWhole);
  }

  // Add to a bin. Shared memory adds words of 32 bits; for 64 bits at once it would wait for itself in a loop.
  template <bool Counts>
  SPARSE_RL_DEVICE void add(int bin, float logit) {
    if constexpr (Counts) {
      atomicAdd(&shared.low[bin], 1u);
    } else {
      const Mass own = mass(logit);
      if (own == 0) return;
      const auto low = static_cast<unsigned>(own);
      const unsigned sum = atomicAdd(&shared.low[bin], low) + low;
      const unsigned high = static_cast<unsigned>(own >> 32) + (sum < low ? 1 : 0);  // with the carry
      if (high) atomicAdd(&shared.high[bin], high);
    }
  }

  SPARSE_RL_DEVICE Mass in_bin(int bin) const { return Mass{shared.high[bin]} << 32 | shared.low[bin]; }

  // Sort the tokens that stay so far into bins, and find the one in which their number reaches `target` or, not for
  // Counts, their masses do. The first target of masses is top-p of all there are.
  template <bool Counts>
  SPARSE_RL_DEVICE Reached reach(Mass target, const Search& search) {
    shared.low[threadIdx.x] = shared.high[threadIdx.x] = 0;
    __syncthreads();
    visit_from(search.low, search.high, [&](float logit, int64_t token) {
      const int bin = search.bin(logit, token, maximum);
      if (bin >= 0) add<Counts>(bin, logit);
    });
    __syncthreads();
    const Mass sum = warp_sum_wide(in_bin(threadIdx.x));
    if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) find_bin(Counts || search.shift != kBySteps ? target : share());
    __syncthreads();
    const Reached reached{shared.bin, shared.left, shared.mass};
    __syncthreads();
    return reached;
  }

  SPARSE_RL_DEVICE Mass share() const {
    Mass all = 0;
    for (int w = 0; w < kWarps; ++w) all += shared.sums[w];
    return static_cast<Mass>(ceil(op.top_p * static_cast<double>(all)));
  }

  SPARSE_RL_DEVICE void find_bin(Mass target) {
    int warp = 0;
    for (; warp + 1 < kWarps && shared.sums[warp] < target; ++warp) target -= shared.sums[warp];
    int bin = 32 * warp;
    for (; bin + 1 < kThreads && in_bin(bin) < target; ++bin) target -= in_bin(bin);
    shared.bin = bin, shared.left = target, shared.mass = in_bin(bin);
  }

  // So that most logits lie within as many steps as there are bins.
  SPARSE_RL_DEVICE float steps_per_unit() const {
    const double farthest = kFarthest * op.temperature, spread = 4 * (static_cast<double>(maximum) - lowest);
    return static_cast<float>(fmin(kThreads / (spread > 0 ? fmin(spread, farthest) : farthest), 1e30));
  }

  // The worst of the `count` best tokens or, not for Counts, of the fewest with top-p of the mass; with it perhaps all
  // that tie with it.
  template <bool Counts>
  SPARSE_RL_DEVICE Limit end_of(int64_t count, bool with_ties) {
    const int64_t end = op.vocabulary - 1;
    Search search{rank_of(rank_key(kNegInf), end), rank_of(rank_key(maximum), 0), kBySteps, steps_per_unit()};
    Mass target = count;
    for (int finest = 32 + kIdle<T>;; search.sort_by_bits(finest)) {
      const Reached at = reach<Counts>(target, search);
      target = at.left;
      search.narrow(at.bin, maximum);
      if (search.shift > finest) continue;
      // the idle bits of positive numbers are 0, of others 1
      const uint32_t key = key_of(search.low) & 0x80000000u ? key_of(search.low) : key_of(search.high);
      if (finest == 0) return {key, token_of(search.low)};
      if (with_ties || target > at.mass - (Counts ? 1 : mass(rank_value(key)))) return {key, kTies};
      search.low = rank_of(key, end), search.high = rank_of(key, 0), finest = 0;
    }
  }

  SPARSE_RL_DEVICE void truncate() {
    if (op.top_k > 0 && op.top_k < op.vocabulary) limit(end_of<true>(op.top_k, true));
    if (op.top_p < 1) limit(end_of<false>(0, false));
    if (op.min_p > 0) {
      const double exact = maximum + op.temperature * log(op.min_p);
      float least_logit = static_cast<float>(exact);
      if (least_logit < exact) least_logit = nextafterf(least_logit, -kNegInf);
      const uint32_t key = rank_key(least_logit);
      if (key > least.key) limit({key, kTies});
    }
  }

  // Count the tokens within the limit that have a probability.
  SPARSE_RL_DEVICE void count() {
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    int seen = 0;
    visit_from(rank_of(least.key, op.vocabulary - 1), ~uint64_t{0}, [&](float logit, int64_t) { seen += logit > kNegInf; });
    if (seen) atomicAdd(&shared.count, seen);
    __syncthreads();
    stay = shared.count;
    __syncthreads();
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

  // Find the place at which the cumulative sum of the weights, `Each` neighbors in each thread, passes `target`. By
  // rounding there may be none: then it is the last one with a weight, and infinity is left.
  template <int Each>
  SPARSE_RL_DEVICE Passed pass(const double (&weights)[Each], double target) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double own = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) own += weights[i];
    double sum = own;  // of the lanes up to here
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double below = from_below(sum, step);
      if (lane >= step) sum += below;
    }
    const double below = from_below(sum, 1);
    if (lane == 31) shared.totals[warp] = sum;
    if (threadIdx.x == 0) shared.place = -1;
    double before = lane ? below : 0, all = 0;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before += all;
      all += shared.totals[w];
    }
    const bool passes = own > 0 && target < before + own;
    const Count passing = count_block(passes, shared.per_warp), positive = count_block(own > 0, shared.per_warp);
    if (passing.all ? passes && passing.before == 0 : own > 0 && positive.before == positive.all - 1) {
      double left = passing.all ? target - before : kInfinity;
      for (int i = 0; i < Each; ++i) {
        if (!(weights[i] > 0)) continue;
        shared.place = Each * static_cast<int>(threadIdx.x) + i;
        if (left < weights[i]) break;
        left -= weights[i];
      }
      shared.rest = left;
    }
    __syncthreads();
    const Passed passed{shared.place, shared.rest, all};
    __syncthreads();
    return passed;
  }

  // The token at which the cumulative sum passes `target`, which is below `total`.
  SPARSE_RL_DEVICE int64_t find(double target) {
    int64_t c = 0;
    double left = kInfinity;
    for (int64_t first = 0; first < op.num_chunks && !(left < kInfinity); first += kThreads) {
      const int64_t own = first + threadIdx.x;
      const double weights[1] = {own < op.num_chunks ? weight(own) : 0.0};
      const Passed at = pass(weights, target);
      if (at.place >= 0) c = first + at.place, left = at.left;
      target -= at.all;
    }
    double weights[kChunk / kThreads];
#pragma unroll
    for (int i = 0; i < kChunk / kThreads; ++i) {
      const int64_t place = kChunk / kThreads * threadIdx.x + i, token = c * kChunk + place;
      weights[i] = place < size(c) ? relative(c, source.at(token), token) : 0.0f;
    }
    const int place = pass(weights, left / exponential(chunks[c].maximum)).place;
    return c * kChunk + (place < 0 ? 0 : place);  // -1 at temperatures whose inverse is infinite
  }

  // The most likely tokens, the best first. They fit into one block of threads.
  SPARSE_RL_DEVICE void write_top(int64_t b) {
    const int64_t wanted = op.wanted_top;
    for (int64_t k = wanted + threadIdx.x; k < op.num_top; k += kThreads) {
      op.top_ids[b * op.num_top + k] = 0, op.top_logprobs[b * op.num_top + k] = kNegInf;
    }
    if (!wanted) return;
    const Limit worst = end_of<true>(wanted, false);
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    int32_t* ids = op.top_ids + b * op.num_top;
    visit_from(rank_of(worst.key, op.vocabulary - 1), ~uint64_t{0}, [&](float logit, int64_t token) {
      if (worst.stays(logit, token)) ids[atomicAdd(&shared.count, 1)] = static_cast<int32_t>(token);
    });
    __syncthreads();
    const int own = threadIdx.x;
    int64_t token = 0;
    int rank = 0;
    if (own < wanted) {
      token = ids[own];
      const Limit here{rank_key(source.at(token)), token - 1};
      for (int64_t k = 0; k < wanted; ++k) rank += here.stays(source.at(ids[k]), ids[k]);
    }
    __syncthreads();
    if (own < wanted) {
      ids[rank] = static_cast<int32_t>(token);
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
    if (op.support) op.support[b] = 0;
  }
  for (int64_t k = threadIdx.x; k < op.num_top; k += kThreads) {
    op.top_ids[b * op.num_top + k] = 0, op.top_logprobs[b * op.num_top + k] = kNan;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) draw_token_kernel(Draw<T> all) {
  await_previous();
  __shared__ Shared shared;
  const int64_t b = blockIdx.x;
  const Draw<T> op = all.at(b);
  Row<T> policy(op, b, 0, shared);
  if (!policy.is_fine()) return write_broken(op, b);
  if (op.num_top) policy.write_top(b);
  Row<T> from(op, b, op.differs(b) ? 1 : 0, shared);
  if (!from.is_fine()) return write_broken(op, b);
  int64_t token;
  if (op.greedy) {
    token = from.best();
  } else {
    from.truncate();
    if (op.support && op.truncates()) from.count();
    token = from.find(keyed_uniform(op.keys[b], op.steps[b]) * from.total);
  }
  if (threadIdx.x) return;
  if (op.support) op.support[b] = op.greedy ? 1 : op.truncates() ? from.stay : 0;
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
