#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "filters.h"
#include "philox.h"
#include "vectors.h"

namespace motet {
namespace {

constexpr int kBlock = 16 * kLanes;  // tokens

// Returns the first index at which the cumulative weights exceed `fraction` of their last value. `fraction` becomes the
// remaining fraction of the weight at this index.
int invert(const double* cumulated, int size, double& fraction) {
  const double total = cumulated[size - 1];
  // The remaining fraction of a block can be rounded up to 1, which would be after the last index.
  const double target = std::min(fraction * total, std::nextafter(total, 0.0));
  const int index = std::min(int(std::upper_bound(cumulated, cumulated + size, target) - cumulated), size - 1);
  const double before = index ? cumulated[index - 1] : 0.0;
  fraction = std::max(0.0, (target - before) / (cumulated[index] - before));
  return index;
}

// Sampling parameters of a choice.
struct Parameters {
  float temperature;
  std::int64_t top_k;
  double top_p;
  float log_min_p;

  Parameters(const SamplingArguments& args, int choice)
      : temperature(args.temperature[choice]),
        top_k(args.top_k[choice]),
        top_p(args.top_p[choice]),
        log_min_p(args.log_min_p[choice]) {}
  bool operator==(const Parameters&) const = default;
};

double uniform_of(const SamplingArguments& args, int choice) {
  return args.uniform ? args.uniform[choice] : uniform_at(args.seeds[choice], args.positions[choice]);
}

bool have_equal_parameters(const SamplingArguments& args, int a, int b) {
  return args.rows[a] == args.rows[b] && Parameters(args, a) == Parameters(args, b);
}

}  // namespace

// Samples from one row of logits after the other. The memory is reused.
class RowSampler {
 public:
  explicit RowSampler(int vocab)
      : vocab_(vocab),
        blocks_((vocab + kBlock - 1) / kBlock),
        padded_(vocab % kBlock ? blocks_ * kBlock : 0, -kInfinity),
        weights_(blocks_ * kBlock),
        maxima_(blocks_),
        masses_(blocks_),
        filter_(vocab, blocks_ * kBlock) {}

  // Samples for choices [begin, end), which have the same row and parameters.
  void run(const SamplingArguments& args, int begin, int end);

 private:
  void read(const float* logits);
  bool finite() const { return has_no_nan_ && std::isfinite(best_); }
  std::int64_t greedy_token() const;
  std::int64_t token_of(const SamplingArguments& args, int choice, bool greedy) const;
  OrderedToken prepare(const Parameters& parameters);
  std::int64_t sample(double uniform) const;
  void score(const SamplingArguments& args, int choice);
  template <bool Temperate, class Keep>
  double compute_weights(float temperature, Keep keep);
  double compute_weights(float temperature, float log_min_p);
  double logprob(std::int64_t id) const { return float(double(logits_[id]) - best_ - log_total_); }
  std::int64_t rank(float logit) const;
  void list_top(int count);

  const int vocab_, blocks_;
  std::vector<float> padded_;   // a copy of the row, up to the end of its last block, if that is incomplete
  std::vector<float> weights_;  // relative to the weight of the top token, at the temperature of the parameters
  std::vector<float> maxima_, bounds_;
  std::vector<double> masses_;     // cumulative over the blocks
  std::vector<std::int64_t> ids_;  // the top tokens
  Filter filter_;
  const float* logits_;
  float best_;
  double log_total_;  // logarithm of the sum of the weights at temperature 1; NaN if not known yet
  bool has_no_nan_;
  bool filtered_;  // samples use the filter
};

void RowSampler::read(const float* logits) {
  logits_ = logits;
  log_total_ = NAN;
  if (!padded_.empty()) logits_ = padded_.data(), std::copy_n(logits, vocab_, padded_.data());
  has_no_nan_ = true;
  for (int block = 0; block < blocks_; ++block) {
    const float* x = logits_ + block * kBlock;
    Floats maxima = all(-kInfinity);
    bool no_nan = true;
    for (int at = 0; at < kBlock; at += kLanes) {
      const Floats v = load(x + at);
      no_nan &= every(numbers(v));
      maxima = max(v, maxima);
    }
    has_no_nan_ &= no_nan;
    maxima_[block] = reduce_max(maxima);
  }
  best_ = *std::max_element(maxima_.begin(), maxima_.end());
}

std::int64_t RowSampler::greedy_token() const {
  const int block = int(std::find(maxima_.begin(), maxima_.end(), best_) - maxima_.begin());
  return std::find(logits_ + block * kBlock, logits_ + vocab_, best_) - logits_;
}

std::int64_t RowSampler::token_of(const SamplingArguments& args, int choice, bool greedy) const {
  if (args.given) return args.given[choice];
  if (!finite()) return 0;
  return greedy ? greedy_token() : sample(uniform_of(args, choice));
}

// Writes weights and masses. `keep(x, weight)` returns the weight of a logit, or 0; x is the logit minus the maximum,
// divided by the temperature. Returns the sum of the weights.
template <bool Temperate, class Keep>
double RowSampler::compute_weights(float temperature, Keep keep) {
  double total = 0.0;
  for (int block = 0; block < blocks_; ++block) {
    Floats mass = all(0.0f);
    for (int at = block * kBlock; at < (block + 1) * kBlock; at += kLanes) {
      Floats x = load(logits_ + at) - all(best_);  // subtracted before the division, so that no temperature overflows
      if (Temperate) x = x / all(temperature);
      const Floats weight = keep(x, exp2_of_negative(x * all(kLog2E)));
      store(weights_.data() + at, weight);
      mass = mass + weight;
    }
    masses_[block] = total += sum(mass);
  }
  return total;
}

double RowSampler::compute_weights(float temperature, float log_min_p) {
  const auto keep = [&](Floats x, Floats weight) { return choose(at_least(x, all(log_min_p)), weight, all(0.0f)); };
  const auto keep_all = [](Floats, Floats weight) { return weight; };
  if (log_min_p != -kInfinity) return compute_weights<true>(temperature, keep);
  if (temperature != 1.0f) return compute_weights<true>(temperature, keep_all);
  const double total = compute_weights<false>(temperature, keep_all);
  log_total_ = std::log(total);
  return total;
}

// Computes the weights of the row. Returns the last token that top-k and top-p keep.
OrderedToken RowSampler::prepare(const Parameters& parameters) {
  filtered_ = parameters.top_k < vocab_ || parameters.top_p < 1.0;
  const double total = compute_weights(parameters.temperature, filtered_ ? -kInfinity : parameters.log_min_p);
  if (!filtered_) return kEnd;
  return filter_.apply(
      {logits_, weights_.data(), total, best_, parameters.temperature, parameters.top_k, parameters.top_p,
       parameters.log_min_p});
}

std::int64_t RowSampler::sample(double uniform) const {
  if (filtered_) return filter_.sample(uniform);
  const int block = invert(masses_.data(), blocks_, uniform);
  double cumulated[kBlock], total = 0.0;
  for (int at = 0; at < kBlock; ++at) cumulated[at] = total += weights_[block * kBlock + at];
  return block * kBlock + invert(cumulated, kBlock, uniform);
}

// Returns 1 + the number of tokens with a higher logit.
std::int64_t RowSampler::rank(float logit) const {
  std::int64_t others = 0;  // tokens without a higher logit
  for (int at = 0; at < blocks_ * kBlock; at += kLanes)
    others += __builtin_popcount(bits(at_least(all(logit), load(logits_ + at))));
  return 1 + std::int64_t(blocks_) * kBlock - others;
}

// Lists the top `count` tokens in order, possibly followed by others.
void RowSampler::list_top(int count) {
  ids_.clear();
  float bound = -kInfinity;  // at least `count` blocks have a token that reaches it
  if (count <= blocks_) {
    bounds_ = maxima_;
    std::nth_element(bounds_.begin(), bounds_.begin() + (count - 1), bounds_.end(), std::greater<float>());
    bound = bounds_[count - 1];
  }
  for (int block = 0; block < blocks_; ++block) {
    if (maxima_[block] < bound) continue;
    for (int at = block * kBlock; at < (block + 1) * kBlock; at += kLanes)
      for (unsigned left = bits(at_least(load(logits_ + at), all(bound))); left != 0; left &= left - 1)
        if (const int id = at + __builtin_ctz(left); id < vocab_) ids_.push_back(id);
  }
  std::partial_sort(ids_.begin(), ids_.begin() + count, ids_.end(), [&](std::int64_t a, std::int64_t b) {
    return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
  });
}

// Scores the token of a choice and others, at temperature 1. Overwrites weights of another temperature.
void RowSampler::score(const SamplingArguments& args, int choice) {
  if (std::isnan(log_total_)) compute_weights(1.0f, -kInfinity);
  double* to = args.scores + std::size_t(choice) * (2 + args.num_named + 2 * args.max_top);
  const std::int64_t* named = args.named + std::size_t(choice) * args.num_named;
  *to++ = logprob(args.tokens[choice]);
  *to++ = double(rank(logits_[args.tokens[choice]]));
  for (int i = 0; i < args.num_named; ++i) *to++ = logprob(named[i]);
  const int count = args.num_top[choice];
  if (count > 0) list_top(count);
  for (int i = 0; i < count; ++i) {
    to[i] = double(ids_[i]);
    to[args.max_top + i] = logprob(ids_[i]);
  }
}

void RowSampler::run(const SamplingArguments& args, int begin, int end) {
  const Parameters parameters(args, begin);
  read(args.logits + args.rows[begin] * args.stride);
  const bool greedy = parameters.temperature == 0.0f || args.given;
  const OrderedToken last = finite() && !greedy ? prepare(parameters) : kEnd;
  for (int choice = begin; choice < end; ++choice) {
    args.finite[choice] = finite();
    args.last_logit[choice] = last.logit;
    args.last_id[choice] = last.id;
    args.tokens[choice] = token_of(args, choice, greedy);
  }
  for (int choice = begin; choice < end; ++choice)
    if (finite() && args.num_top[choice] >= 0) score(args, choice);
}

Sampler::Sampler(int vocab, int num_threads) : threads_(num_threads) {
  for (int thread = 0; thread < num_threads; ++thread) rows_.push_back(std::make_unique<RowSampler>(vocab));
}

Sampler::~Sampler() = default;

void Sampler::run(const SamplingArguments& args) {
  begins_.clear();
  for (int choice = 0; choice < args.num_choices; ++choice)
    if (choice == 0 || !have_equal_parameters(args, choice, choice - 1)) begins_.push_back(choice);
  const int runs = int(begins_.size());
  begins_.push_back(args.num_choices);
  threads_.parallel_for(runs, [&](int run, int thread) { rows_[thread]->run(args, begins_[run], begins_[run + 1]); });
}

}  // namespace motet
