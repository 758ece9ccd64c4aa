// draw: the next token of every sequence, by one uniform number and the inverse of the distribution function.
//
// A row of logits is read once, in chunks that stay in the cache: each leaves its maximum and its sum of exponentials.
// From these follow the normalizer and the chunk in which the cumulative probability passes the uniform number; only
// that chunk is read again. Sums are float64: a token as rare as 1e-12 is drawn as often as it should be.
//
// With top-k, top-p or min-p the maxima of the chunks bound what can stay, so that few logits are looked at twice.

#include "backend.h"
#include "draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace sparse_rl {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Candidate {
  float logit;
  int64_t token;
};

// The order of all rules: larger logits first, of equal ones the lower token.
bool better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

constexpr int64_t kTies = std::numeric_limits<int64_t>::max();  // as the token of a limit: all with its logit stay
constexpr Candidate kAnything{kNegInf, kTies};

typedef float Vec4 __attribute__((vector_size(16)));
typedef double Double4 __attribute__((vector_size(32)));

// Add all lanes to two sums in float64.
SPARSE_RL_INLINE void add_lanes(Vec8 x, Double4* sums) {
  Vec4 quarters[2];
  std::memcpy(quarters, &x, sizeof(x));
  for (int i = 0; i < 2; ++i) sums[i] += __builtin_convertvector(quarters[i], Double4);
}

// The largest of logits (a multiple of kBlock), NaN if one is NaN.
SPARSE_RL_INLINE float largest(const float* logits, int64_t count) {
  constexpr int Parts = kBlock / kEight;
  Vec8 tops[Parts], numbers[Parts];
  for (int i = 0; i < Parts; ++i) tops[i] = splat8(kNegInf), numbers[i] = Vec8{};
  for (int64_t at = 0; at < count; at += kBlock) {
    for (int i = 0; i < Parts; ++i) {
      const Vec8 x = load8(logits + at + i * kEight);
      tops[i] = x > tops[i] ? x : tops[i];
      numbers[i] += x * 0.0f;  // NaN from a NaN, and from an infinity, which is looked at below
    }
  }
  const Vec8 half = tops[0] > tops[1] ? tops[0] : tops[1], other = tops[2] > tops[3] ? tops[2] : tops[3];
  const Vec8 top = half > other ? half : other, number = (numbers[0] + numbers[1]) + (numbers[2] + numbers[3]);
  float most = kNegInf, sum = 0;
  for (int i = 0; i < kEight; ++i) most = std::max(most, top[i]), sum += number[i];
  if (sum == 0) return most;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(logits[i])) return kNan;
  }
  return most;
}

// One chunk of logits; `out` (kChunk) becomes exp((logit - maximum) * factor), or 0 where the logit is below `least`.
template <class T>
SPARSE_RL_CLONES ChunkSum sum_chunk(const T* logits, int64_t count, float factor, float least, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(logits[i]);
  const int64_t end = padded(count);
  std::fill(out + count, out + end, kNegInf);
  const float maximum = largest(out, end);
  if (!(maximum < -kNegInf)) return {kNan, kNan};
  if (maximum == kNegInf) return {kNegInf, 0.0};
  Double4 sums[4]{};
  for (int64_t at = 0; at < end; at += kLanes) {
    for (int half = 0; half < 2; ++half) {
      const Vec8 x = load8(out + at + half * kEight);
      const Int8 below = same_bits<Int8>((x + 0.0f) - least) >> 31;  // the sign of the difference; -0 is no less than 0
      const Vec8 e = select(below, Vec8{}, exp_negative((x - maximum) * factor));
      store8(out + at + half * kEight, e);
      add_lanes(e, sums + 2 * half);
    }
  }
  const Double4 sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return {maximum, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

// softmax(logits / temperature) by the largest logit and the sum of exp((logit - maximum) / temperature).
struct Softmax {
  double temperature, maximum = kNegInf, total = 0;

  double exponential(double logit) const { return std::exp((logit - maximum) / temperature); }
  double logprob(double logit) const { return (logit - maximum) / temperature - std::log(total); }
  bool is_fine() const { return maximum > kNegInf; }  // NaN is not
};

// The distribution of one row of logits, of all its tokens or of those that are no worse than `least`.
template <class T>
struct Row : Softmax {
  const T* logits;
  ChunkSum* chunks;
  int64_t vocabulary, num_chunks;
  Candidate least = kAnything;

  Row(const T* logits, ChunkSum* chunks, int64_t vocabulary, double temperature)
      : Softmax{temperature}, logits(logits), chunks(chunks), vocabulary(vocabulary),
        num_chunks((vocabulary + kChunk - 1) / kChunk) {
    alignas(64) float buffer[kChunk];
    for (int64_t c = 0; c < num_chunks; ++c) {
      chunks[c] = sum(c, buffer);
      maximum = chunks[c].maximum <= maximum ? maximum : chunks[c].maximum;  // also if it is NaN
      if (std::isnan(maximum)) return;
    }
    for (int64_t c = 0; c < num_chunks && is_fine(); ++c) total += weight(c);
  }

  float at(int64_t token) const { return static_cast<float>(logits[token]); }
  int64_t first(int64_t chunk) const { return chunk * kChunk; }
  int64_t size(int64_t chunk) const { return std::min(kChunk, vocabulary - first(chunk)); }

  // Exponentials of a chunk, relative to its maximum, and their sum; 0 for tokens worse than `least`.
  ChunkSum sum(int64_t chunk, float* exponentials) const {
    const float factor = static_cast<float>(1 / temperature);
    ChunkSum found = sum_chunk(logits + first(chunk), size(chunk), factor, least.logit, exponentials);
    // of the tokens with the least logit only the first ones stay
    const int64_t worse = least.token == kTies ? size(chunk) : std::max<int64_t>(0, least.token + 1 - first(chunk));
    for (int64_t i = worse; i < size(chunk); ++i) {
      if (at(first(chunk) + i) == least.logit) found.sum -= exponentials[i], exponentials[i] = 0;
    }
    return found;
  }

  double weight(int64_t chunk) const {
    return chunks[chunk].sum > 0 ? chunks[chunk].sum * exponential(chunks[chunk].maximum) : 0.0;
  }

  // Leave out all tokens that are worse than `worst`.
  void limit(Candidate worst) {
    if (!better(worst, least)) return;
    least = worst, total = 0;
    alignas(64) float buffer[kChunk];
    for (int64_t c = 0; c < num_chunks; ++c) {
      chunks[c].sum = chunks[c].maximum < least.logit ? 0.0 : sum(c, buffer).sum;
      total += weight(c);
    }
  }

  int64_t best() const {
    int64_t token = 0;
    while (chunks[token / kChunk].maximum < maximum) token += kChunk;
    while (at(token) < maximum) ++token;
    return token;
  }

  // The token at which the cumulative sum passes `target`, which is below `total`.
  int64_t find(double target) const {
    int64_t c = 0;
    for (; c + 1 < num_chunks && weight(c) <= target; ++c) target -= weight(c);
    while (!(weight(c) > 0)) --c;  // by rounding nothing was left for the last chunks
    alignas(64) float buffer[kChunk];
    sum(c, buffer);
    target /= exponential(chunks[c].maximum);
    int64_t last = 0;
    for (int64_t i = 0; i < size(c); ++i) {
      if (!(buffer[i] > 0)) continue;
      last = i, target -= buffer[i];
      if (target < 0) break;
    }
    return first(c) + last;
  }

  // The tokens with logits in [low, high].
  std::vector<Candidate> between(double low, double high) const {
    std::vector<Candidate> found;
    for (int64_t c = 0; c < num_chunks; ++c) {
      if (chunks[c].maximum < low) continue;
      for (int64_t i = first(c); i < first(c) + size(c); ++i) {
        if (at(i) >= low && at(i) <= high) found.push_back({at(i), i});
      }
    }
    return found;
  }

  // The number of tokens that are no worse than `least` and have a probability.
  int32_t count() const {
    int32_t stay = 0;
    for (int64_t c = 0; c < num_chunks; ++c) {
      if (chunks[c].maximum < least.logit || chunks[c].maximum == kNegInf) continue;
      for (int64_t i = first(c); i < first(c) + size(c); ++i) {
        stay += at(i) > kNegInf && !better(least, Candidate{at(i), i});
      }
    }
    return stay;
  }

  // At least `wanted` maxima: of the chunks, or of their parts; none where the parts are too few.
  std::vector<double> maxima(int64_t wanted) const {
    constexpr int64_t Part = 32;
    std::vector<double> tops;
    if (wanted <= num_chunks) {
      for (int64_t c = 0; c < num_chunks; ++c) tops.push_back(chunks[c].maximum);
      return tops;
    }
    if (wanted * Part > vocabulary) return tops;
    for (int64_t begin = 0; begin < vocabulary; begin += Part) {
      float most = kNegInf;
      for (int64_t i = begin; i < std::min(begin + Part, vocabulary); ++i) most = std::max(most, at(i));
      tops.push_back(most);
    }
    return tops;
  }

  // The best `count` tokens, the worst of them last; among the maxima is a bound that so many reach.
  std::vector<Candidate> top(int64_t count) const {
    double bound = kNegInf;
    std::vector<double> tops = maxima(count);
    if (!tops.empty()) {
      std::nth_element(tops.begin(), tops.begin() + (count - 1), tops.end(), std::greater<double>());
      bound = tops[count - 1];
    }
    std::vector<Candidate> found = between(bound, maximum);
    std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), better);
    found.resize(count);
    return found;
  }
};

// The worst of the fewest best candidates whose exponentials sum to `mass`, found by halving.
Candidate end_of_mass(const Softmax& row, double mass, std::vector<Candidate> candidates) {
  auto low = candidates.begin(), high = candidates.end();
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, better);
    double upper = 0;
    for (auto one = low; one < middle; ++one) upper += row.exponential(one->logit);
    if (upper >= mass) {
      high = middle;
    } else {
      low = middle, mass -= upper;
    }
  }
  return *low;
}

constexpr int kPerUnit = 16, kDistances = 512;  // in 16ths of logit / temperature; the last is everything beyond

// The distances of a chunk of logits from the largest of the row.
template <class T>
SPARSE_RL_CLONES void measure(const T* logits, int64_t count, float maximum, float scale, int32_t* distances) {
  for (int64_t i = 0; i < count; ++i) {
    const float distance = (maximum - static_cast<float>(logits[i])) * scale;
    distances[i] = distance < kDistances - 1 ? static_cast<int32_t>(distance) : kDistances - 1;
  }
}

// The worst of the fewest best tokens with at least `top_p` of the probability. The mass of the tokens at each distance
// from the largest logit tells at which distance they end: only the tokens there have to be ordered.
template <class T>
Candidate end_of_top_p(const Row<T>& row, double top_p) {
  const float scale = static_cast<float>(kPerUnit / row.temperature), maximum = static_cast<float>(row.maximum);
  constexpr int Copies = 4;  // neighbors often add to the same mass, and would wait for each other
  std::vector<double> masses(Copies * kDistances, 0.0);
  alignas(64) float exponentials[kChunk];
  alignas(64) int32_t distances[kChunk];
  for (int64_t c = 0; c < row.num_chunks; ++c) {
    if (!(row.weight(c) > 0)) continue;
    const double factor = row.exponential(row.sum(c, exponentials).maximum);
    measure(row.logits + row.first(c), row.size(c), maximum, scale, distances);
    for (int64_t i = 0; i < row.size(c); ++i) masses[Copies * distances[i] + i % Copies] += exponentials[i] * factor;
  }
  const auto mass = [&](int distance) {
    const double* own = &masses[Copies * distance];
    return (own[0] + own[1]) + (own[2] + own[3]);
  };
  int end = 0;
  double left = top_p * row.total;
  while (end + 1 < kDistances && mass(end) < left) left -= mass(end++);
  // no logit at this distance is lower, but for the last distance; one distance more covers the rounding
  const double nearest = end + 1 < kDistances ? maximum - (end + 2) * row.temperature / kPerUnit : kNegInf;
  std::vector<Candidate> there;
  for (int64_t c = 0; c < row.num_chunks; ++c) {
    if (!(row.weight(c) > 0) || row.chunks[c].maximum < nearest) continue;
    measure(row.logits + row.first(c), row.size(c), maximum, scale, distances);
    for (int64_t i = 0; i < row.size(c); ++i) {
      if (distances[i] == end) there.push_back({row.at(row.first(c) + i), row.first(c) + i});
    }
  }
  return end_of_mass(row, left, std::move(there));
}

// Leave the tokens that top-k, then top-p, then min-p leave.
template <class T>
void truncate(Row<T>& row, int64_t top_k, double top_p, double min_p) {
  if (top_k > 0 && top_k < row.vocabulary) row.limit({row.top(top_k).back().logit, kTies});
  if (top_p < 1) row.limit(end_of_top_p(row, top_p));
  if (min_p > 0) {
    // the smallest float32 that is no less: logits are compared with it
    const double least = row.maximum + row.temperature * std::log(min_p);
    const float rounded = static_cast<float>(least);
    row.limit({rounded < least ? std::nextafter(rounded, -kNegInf) : rounded, kTies});
  }
}

template <class T>
struct Unit {
  const Draw<T> op;  // with the numbers of the row

  void run(int64_t b) const {
    const T* logits = op.logits + b * op.vocabulary;
    ChunkSum* chunks = op.chunks + b * op.num_parts * op.num_chunks;
    Row<T> row(logits, chunks, op.vocabulary, op.temperature);
    if (!row.is_fine()) return write_broken(b);
    if (op.num_top) write_top(b, row);
    const bool masks = op.masks(b);
    const Softmax policy = row;
    if (!op.differs(b)) return choose(b, policy, row);
    const T* others = op.drawn_from ? op.drawn_from + b * op.vocabulary : logits;
    std::vector<float> own(others, others + op.vocabulary);
    for (int64_t e = 0; masks && e < op.num_ends; ++e) {
      if (op.end_ids[e] >= 0 && op.end_ids[e] < op.vocabulary) own[op.end_ids[e]] = kNegInf;
    }
    Row<float> from(own.data(), chunks + op.num_chunks, op.vocabulary, op.temperature);
    return from.is_fine() ? choose(b, policy, from) : write_broken(b);
  }

  // Draw a token from a row and write its probability there and under the policy's.
  template <class From>
  void choose(int64_t b, const Softmax& policy, Row<From>& from) const {
    int64_t token;
    if (op.greedy) {
      token = from.best();
    } else {
      truncate(from, op.top_k, op.top_p, op.min_p);
      token = from.find(keyed_uniform(op.keys[b], op.steps[b]) * from.total);
    }
    op.tokens[b] = token;
    op.logprobs[b] = static_cast<float>(policy.logprob(static_cast<float>(op.logits[b * op.vocabulary + token])));
    if (op.behavior) op.behavior[b] = static_cast<float>(from.logprob(from.at(token)));
    if (op.support) op.support[b] = op.greedy ? 1 : op.truncates() ? from.count() : 0;
  }

  void write_top(int64_t b, const Row<T>& row) const {
    const int64_t wanted = op.wanted_top;
    std::vector<Candidate> found = wanted ? row.top(wanted) : std::vector<Candidate>{};
    std::sort(found.begin(), found.end(), better);
    for (int64_t k = 0; k < op.num_top; ++k) {
      if (k >= wanted) {
        op.top_ids[b * op.num_top + k] = 0, op.top_logprobs[b * op.num_top + k] = kNegInf;
        continue;
      }
      op.top_ids[b * op.num_top + k] = static_cast<int32_t>(found[k].token);
      op.top_logprobs[b * op.num_top + k] = static_cast<float>(row.logprob(found[k].logit));
    }
  }

  // Logits that are NaN or +inf, or all -inf: token 0, and log-probabilities of NaN, by which the scheduler knows.
  void write_broken(int64_t b) const {
    op.tokens[b] = 0;
    op.logprobs[b] = kNan;
    if (op.support) op.support[b] = 0;
    if (op.behavior) op.behavior[b] = kNan;
    for (int64_t k = b * op.num_top; k < (b + 1) * op.num_top; ++k) op.top_ids[k] = 0, op.top_logprobs[k] = kNan;
  }
};

struct Kernel : Cpu {
  template <class T>
  static void run(const Draw<T>& op, const Tensor&) {
    torch::stable::parallel_for(0, op.num_rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) Unit<T>{op.at(b)}.run(b);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("draw", TORCH_BOX(&draw<Kernel>)); }

}  // namespace sparse_rl
