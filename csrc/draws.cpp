#include "draws.h"

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

// Finds the first place at which cumulated weights exceed `fraction` of the last one. `fraction` becomes what is left of
// it there, as a fraction of that place's own weight.
int invert(const double* cumulated, int size, double& fraction) {
  const double whole = cumulated[size - 1];
  // The rest of a block may be rounded up to the whole block, which would be behind the last place.
  const double target = std::min(fraction * whole, std::nextafter(whole, 0.0));
  const int place = std::min(int(std::upper_bound(cumulated, cumulated + size, target) - cumulated), size - 1);
  const double before = place ? cumulated[place - 1] : 0.0;
  fraction = std::max(0.0, (target - before) / (cumulated[place] - before));
  return place;
}

// How a choice draws from its row.
struct Way {
  float temperature;
  std::int64_t top_k;
  double top_p;
  float log_min_p;

  Way(const Drawing& step, int choice)
      : temperature(step.temperature[choice]),
        top_k(step.top_k[choice]),
        top_p(step.top_p[choice]),
        log_min_p(step.log_min_p[choice]) {}
  bool operator==(const Way&) const = default;
};

double uniform_of(const Drawing& step, int choice) {
  return step.uniform ? step.uniform[choice] : uniform_at(step.seeds[choice], step.positions[choice]);
}

bool are_alike(const Drawing& step, int a, int b) {
  return step.rows[a] == step.rows[b] && Way(step, a) == Way(step, b);
}

}  // namespace

// One row of logits after the other, in the same memory.
class Row {
 public:
  explicit Row(int vocab)
      : vocab_(vocab),
        blocks_((vocab + kBlock - 1) / kBlock),
        padded_(vocab % kBlock ? blocks_ * kBlock : 0, -kInfinity),
        weights_(blocks_ * kBlock),
        maxima_(blocks_),
        masses_(blocks_),
        filter_(vocab, blocks_ * kBlock) {}

  // Draws for choices [begin, end), which draw alike from one row.
  void run(const Drawing& step, int begin, int end);

 private:
  void read(const float* logits);
  bool finite() const { return sound_ && std::isfinite(best_); }
  std::int64_t first_best() const;
  Place prepare(const Way& way);
  std::int64_t draw(double uniform) const;
  void score(const Drawing& step, int choice);
  template <bool Temperate, class Keep>
  double weigh(float temperature, Keep keep);
  double weigh(float temperature, float log_min_p);
  double logprob(std::int64_t id) const { return float(double(logits_[id]) - best_ - log_whole_); }
  std::int64_t rank(float logit) const;
  void list_best(int count);

  const int vocab_, blocks_;
  std::vector<float> padded_;   // the row up to the end of its last block, if the vocabulary ends inside it
  std::vector<float> weights_;  // relative to that of the best token, at the way's temperature
  std::vector<float> maxima_, bounds_;
  std::vector<double> masses_;     // cumulated over the blocks
  std::vector<std::int64_t> ids_;  // the best tokens
  Filter filter_;
  const float* logits_;
  float best_;
  double log_whole_;  // of the weights at temperature 1; NaN: not known yet
  bool sound_;        // no logit is NaN
  bool filtered_;     // draws go through the filter
};

void Row::read(const float* logits) {
  logits_ = logits;
  log_whole_ = NAN;
  if (!padded_.empty()) logits_ = padded_.data(), std::copy_n(logits, vocab_, padded_.data());
  sound_ = true;
  for (int block = 0; block < blocks_; ++block) {
    const float* x = logits_ + block * kBlock;
    Floats most = all(-kInfinity);
    bool sound = true;
    for (int at = 0; at < kBlock; at += kLanes) {
      const Floats v = load(x + at);
      sound &= every(numbers(v));
      most = max(v, most);
    }
    sound_ &= sound;
    maxima_[block] = greatest(most);
  }
  best_ = *std::max_element(maxima_.begin(), maxima_.end());
}

std::int64_t Row::first_best() const {
  const int block = int(std::find(maxima_.begin(), maxima_.end(), best_) - maxima_.begin());
  return std::find(logits_ + block * kBlock, logits_ + vocab_, best_) - logits_;
}

// Writes the weights and masses of those numbers, less the best one and over the temperature, that `keep` selects.
// Returns their sum.
template <bool Temperate, class Keep>
double Row::weigh(float temperature, Keep keep) {
  double whole = 0.0;
  for (int block = 0; block < blocks_; ++block) {
    Floats mass = all(0.0f);
    for (int at = block * kBlock; at < (block + 1) * kBlock; at += kLanes) {
      Floats x = load(logits_ + at) - all(best_);  // before the division, so that no temperature overflows
      if (Temperate) x = x / all(temperature);
      const Floats weight = keep(x, exp2_of_negative(x * all(kLog2E)));
      store(weights_.data() + at, weight);
      mass = mass + weight;
    }
    masses_[block] = whole += sum(mass);
  }
  return whole;
}

double Row::weigh(float temperature, float log_min_p) {
  const auto keep = [&](Floats x, Floats weight) { return choose(at_least(x, all(log_min_p)), weight, all(0.0f)); };
  const auto keep_all = [](Floats, Floats weight) { return weight; };
  if (log_min_p != -kInfinity) return weigh<true>(temperature, keep);
  if (temperature != 1.0f) return weigh<true>(temperature, keep_all);
  const double whole = weigh<false>(temperature, keep_all);
  log_whole_ = std::log(whole);
  return whole;
}

// Weighs the row for draws. Returns the last token that top-k and top-p keep.
Place Row::prepare(const Way& way) {
  filtered_ = way.top_k < vocab_ || way.top_p < 1.0;
  const double whole = weigh(way.temperature, filtered_ ? -kInfinity : way.log_min_p);
  if (!filtered_) return kEnd;
  return filter_.apply(
      {logits_, weights_.data(), whole, best_, way.temperature, way.top_k, way.top_p, way.log_min_p});
}

std::int64_t Row::draw(double uniform) const {
  if (filtered_) return filter_.draw(uniform);
  const int block = invert(masses_.data(), blocks_, uniform);
  double cumulated[kBlock], whole = 0.0;
  for (int at = 0; at < kBlock; ++at) cumulated[at] = whole += weights_[block * kBlock + at];
  return block * kBlock + invert(cumulated, kBlock, uniform);
}

// Returns 1 + the number of tokens that are better.
std::int64_t Row::rank(float logit) const {
  std::int64_t others = 0;  // that are not better
  for (int at = 0; at < blocks_ * kBlock; at += kLanes)
    others += __builtin_popcount(bits(at_least(all(logit), load(logits_ + at))));
  return 1 + std::int64_t(blocks_) * kBlock - others;
}

// Lists the best tokens in their order, and perhaps more behind them.
void Row::list_best(int count) {
  ids_.clear();
  float bound = -kInfinity;  // at least `count` blocks hold a token that reaches it
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

// Scores the drawn token and others, at temperature 1. Weights of another temperature are lost.
void Row::score(const Drawing& step, int choice) {
  if (std::isnan(log_whole_)) weigh(1.0f, -kInfinity);
  double* to = step.scores + std::size_t(choice) * (2 + step.num_named + 2 * step.most_best);
  const std::int64_t* named = step.named + std::size_t(choice) * step.num_named;
  *to++ = logprob(step.tokens[choice]);
  *to++ = double(rank(logits_[step.tokens[choice]]));
  for (int i = 0; i < step.num_named; ++i) *to++ = logprob(named[i]);
  const int count = step.best[choice];
  if (count > 0) list_best(count);
  for (int i = 0; i < count; ++i) {
    to[i] = double(ids_[i]);
    to[step.most_best + i] = logprob(ids_[i]);
  }
}

void Row::run(const Drawing& step, int begin, int end) {
  const Way way(step, begin);
  read(step.logits + step.rows[begin] * step.stride);
  const bool greedy = way.temperature == 0.0f;
  const Place last = finite() && !greedy ? prepare(way) : kEnd;
  for (int choice = begin; choice < end; ++choice) {
    step.finite[choice] = finite();
    step.last_logit[choice] = last.logit;
    step.last_id[choice] = last.id;
    step.tokens[choice] = !finite() ? 0 : greedy ? first_best() : draw(uniform_of(step, choice));
  }
  for (int choice = begin; choice < end; ++choice)
    if (finite() && step.best[choice] >= 0) score(step, choice);
}

Draws::Draws(int vocab, int num_threads) : team_(num_threads) {
  for (int thread = 0; thread < num_threads; ++thread) rows_.push_back(std::make_unique<Row>(vocab));
}

Draws::~Draws() = default;

void Draws::run(const Drawing& step) {
  begins_.clear();
  for (int choice = 0; choice < step.num_choices; ++choice)
    if (choice == 0 || !are_alike(step, choice, choice - 1)) begins_.push_back(choice);
  const int runs = int(begins_.size());
  begins_.push_back(step.num_choices);
  team_.share(runs, [&](int run, int thread) { rows_[thread]->run(step, begins_[run], begins_[run + 1]); });
}

}  // namespace motet
