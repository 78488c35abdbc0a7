#include "filters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

namespace motet {
namespace {

constexpr int kBlock = 4 * kLanes;  // tokens of which one maximum is taken
constexpr int kBuckets = 1024;
constexpr int kFew = 48;            // so many tokens are sorted at once
constexpr double kUnits = 0x1p62;   // of a weight of 1: weights from 2^-38 on are exact, and their sum fits
constexpr double kSlack = 0x1p-12;  // far more than what sums of weights, rounded to float32, can be wrong by

std::int64_t units(float weight) { return std::int64_t(double(weight) * kUnits); }

// A list of token ids, in memory for all of them.
class Ids {
 public:
  explicit Ids(int room) : memory_(room) {}
  std::int32_t* begin() { return memory_.data(); }
  std::int32_t* end() { return memory_.data() + size_; }
  const std::int32_t* begin() const { return memory_.data(); }
  const std::int32_t* end() const { return memory_.data() + size_; }
  int size() const { return size_; }
  void clear() { size_ = 0; }
  void add(int id) { memory_[size_++] = id; }

  // Becomes the ids of a list for which `wanted` is true. Without branches, which could not be predicted.
  template <class Wanted>
  void select(const Ids& from, Wanted wanted) {
    int size = 0;
    for (const int id : from) {
      memory_[size] = id;
      size += wanted(id);
    }
    size_ = size;
  }

 private:
  std::vector<std::int32_t> memory_;
  int size_ = 0;
};

// A place in the order of a lane's tokens.
struct Place {
  float logit;
  std::int64_t id;
};
constexpr Place kEnd{-kInfinity, std::numeric_limits<std::int64_t>::max()};

// Filters one lane after the other. Its memory serves them all.
class LaneFilter {
 public:
  LaneFilter(const Filtering& batch)
      : batch_(batch), candidates_(batch.width), kept_(batch.width), bucket_(batch.width), smaller_(batch.width) {}

  Place last_kept(int lane);
  void prepare_draws(int lane, Place last);
  std::int64_t draw(double uniform) const;

 private:
  void list(const float* values, float bound);
  float reached_by(std::int64_t count);
  float negligible(int lane) const;
  bool is_kept(int id, Place last) const {
    return (logits_[id] > last.logit) | ((logits_[id] == last.logit) & (id <= last.id));
  }
  template <class Amount, class Enough>
  Place last_until(const Ids& ids, Amount amount, Enough enough);
  Place last_of_count(std::int64_t count);
  Place last_of_mass(const Ids& ids, double goal);

  const Filtering& batch_;
  const float* logits_;
  const float* weights_;
  Ids candidates_;  // rising; holds all tokens that can be kept and have a weight
  Ids kept_;        // rising
  Ids bucket_, smaller_;
  std::vector<float> maxima_;
  std::vector<double> cumulated_;  // weights of the tokens kept
};

// Lists the tokens whose value reaches the bound.
void LaneFilter::list(const float* values, float bound) {
  candidates_.clear();
  const Floats least = all(bound);
  for (int at = 0; at < batch_.width; at += kLanes)
    for (unsigned left = bits(at_least(load(values + at), least)); left != 0; left &= left - 1)
      candidates_.add(at + __builtin_ctz(left));
}

// Returns a logit that at least `count` tokens reach, above -infinity: the one that so many maxima of blocks reach.
float LaneFilter::reached_by(std::int64_t count) {
  constexpr float kLeast = std::numeric_limits<float>::lowest();
  maxima_.clear();
  for (const float* x = logits_; x < logits_ + batch_.width; x += kBlock)
    maxima_.push_back(greatest(max(max(load(x), load(x + kLanes)), max(load(x + 2 * kLanes), load(x + 3 * kLanes)))));
  if (count > std::int64_t(maxima_.size())) return kLeast;
  std::nth_element(maxima_.begin(), maxima_.begin() + (count - 1), maxima_.end(), std::greater<float>());
  return std::max(maxima_[count - 1], kLeast);
}

// Returns a weight so small that all tokens below it together are less than what top-p drops.
float LaneFilter::negligible(int lane) const {
  const double dropped = (1.0 - batch_.top_p[lane] - kSlack) * batch_.whole[lane];
  return std::max(float(dropped / batch_.vocab), std::numeric_limits<float>::denorm_min());
}

// Returns the first token, in the lane's order, at which the amounts of the tokens up to it are enough; `kEnd` if they
// never are. `ids` rise, and hold every token up to there that has an amount.
template <class Amount, class Enough>
Place LaneFilter::last_until(const Ids& ids, Amount amount, Enough enough) {
  const Ids* left = &ids;
  std::int64_t sum = 0;
  bool equal = false;
  while (left->size() > kFew) {
    float low = kInfinity, high = -kInfinity;
    for (const int id : *left) low = std::min(low, logits_[id]), high = std::max(high, logits_[id]);
    equal = low == high;
    if (equal) break;
    const double scale = (kBuckets - 1) / (double(high) - double(low));
    const auto bucket_of = [&](int id) { return int((double(high) - double(logits_[id])) * scale); };
    std::int64_t amounts[kBuckets] = {};
    for (const int id : *left) amounts[bucket_of(id)] += amount(id);
    int bucket = 0;
    while (bucket < kBuckets && !enough(sum + amounts[bucket])) sum += amounts[bucket++];
    if (bucket == kBuckets) return kEnd;
    smaller_.select(*left, [&](int id) { return bucket_of(id) == bucket; });
    std::swap(smaller_, bucket_);
    left = &bucket_;
  }
  if (!equal) {
    if (left != &bucket_) bucket_.select(*left, [](int) { return true; });
    std::sort(bucket_.begin(), bucket_.end(), [&](int a, int b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
    });
    left = &bucket_;
  }
  for (const int id : *left)
    if (sum += amount(id); enough(sum)) return {logits_[id], id};
  return kEnd;
}

Place LaneFilter::last_of_count(std::int64_t count) {
  return last_until(candidates_, [](int) { return 1; }, [&](std::int64_t sum) { return sum >= count; });
}

Place LaneFilter::last_of_mass(const Ids& ids, double goal) {
  return last_until(ids, [&](int id) { return units(weights_[id]); },
                    [&](std::int64_t sum) { return double(sum) / kUnits >= goal; });
}

// Lists the candidates of a lane, and returns the last one that top-k and top-p keep.
Place LaneFilter::last_kept(int lane) {
  logits_ = batch_.logits + std::size_t(lane) * batch_.width;
  weights_ = batch_.weights + std::size_t(lane) * batch_.width;
  candidates_.clear();
  if (std::isnan(batch_.whole[lane])) return kEnd;
  const double top_p = batch_.top_p[lane];
  if (batch_.top_k[lane] >= batch_.vocab) {
    list(weights_, negligible(lane));
    return top_p < 1.0 ? last_of_mass(candidates_, top_p * batch_.whole[lane]) : kEnd;
  }
  list(logits_, reached_by(batch_.top_k[lane]));
  const Place last = last_of_count(batch_.top_k[lane]);
  if (top_p >= 1.0) return last;
  kept_.select(candidates_, [&](int id) { return is_kept(id, last); });
  std::int64_t sum = 0;
  for (const int id : kept_) sum += units(weights_[id]);
  const Place nearer = last_of_mass(kept_, top_p * (double(sum) / kUnits));
  return nearer.logit == kEnd.logit ? last : nearer;
}

// Cumulates the weights of the tokens that all filters keep, in the order of their ids.
void LaneFilter::prepare_draws(int lane, Place last) {
  const float least = batch_.log_min_p[lane], temperature = batch_.temperature[lane];
  if (least == -kInfinity) {
    kept_.select(candidates_, [&](int id) { return is_kept(id, last); });
  } else {
    float best = -kInfinity;
    for (const int id : candidates_) best = std::max(best, logits_[id]);
    kept_.select(candidates_, [&](int id) {
      return is_kept(id, last) & ((logits_[id] - best) / temperature >= least);
    });
  }
  cumulated_.resize(kept_.size());
  double sum = 0;
  double* to = cumulated_.data();
  for (const int id : kept_) *to++ = sum += double(weights_[id]);
}

// Returns the token at a uniform of the prepared lane, by the inverse of the cumulative distribution.
std::int64_t LaneFilter::draw(double uniform) const {
  if (cumulated_.empty()) return 0;
  const double whole = cumulated_.back();
  const double target = std::min(uniform * whole, std::nextafter(whole, 0.0));
  return kept_.begin()[std::upper_bound(cumulated_.begin(), cumulated_.end(), target) - cumulated_.begin()];
}

}  // namespace

void filter(const Filtering& batch) {
  LaneFilter filter(batch);
  int choice = 0;
  for (int lane = 0; lane < batch.num_lanes; ++lane) {
    const Place last = filter.last_kept(lane);
    batch.last_logit[lane] = last.logit;
    batch.last_id[lane] = last.id;
    if (choice < batch.num_choices && batch.lanes[choice] == lane) filter.prepare_draws(lane, last);
    for (; choice < batch.num_choices && batch.lanes[choice] == lane; ++choice)
      batch.tokens[choice] = filter.draw(batch.uniform[choice]);
  }
}

}  // namespace motet
