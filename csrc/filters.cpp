#include "filters.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "vectors.h"

namespace motet {
namespace {

constexpr int kBlock = 4 * kLanes;  // tokens per maximum
constexpr int kBuckets = 1024;
constexpr int kMaxSorted = 48;      // up to this number of tokens are sorted directly
constexpr double kUnits = 0x1p62;   // integer that represents the sum of all weights
constexpr double kSlack = 0x1p-12;  // much more than the rounding error of a sum of float32 weights

}  // namespace

// Lists the tokens with a value of at least `bound` as candidates.
void Filter::list(const float* values, float bound) {
  candidates_.clear();
  const Floats bounds = all(bound);
  for (int at = 0; at < width_; at += kLanes)
    for (unsigned left = bits(at_least(load(values + at), bounds)); left != 0; left &= left - 1)
      candidates_.add(at + __builtin_ctz(left));
}

// Returns a logit above -infinity that at least `count` tokens reach, because the maxima of `count` blocks reach it.
float Filter::bound_reached_by(std::int64_t count) {
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  maxima_.clear();
  for (const float* x = row_.logits; x < row_.logits + width_; x += kBlock)
    maxima_.push_back(reduce_max(max(max(load(x), load(x + kLanes)), max(load(x + 2 * kLanes), load(x + 3 * kLanes)))));
  if (count > std::int64_t(maxima_.size())) return kLowest;
  std::nth_element(maxima_.begin(), maxima_.begin() + (count - 1), maxima_.end(), std::greater<float>());
  return std::max(maxima_[count - 1], kLowest);
}

// Returns a weight such that all tokens with smaller weights together have less weight than top-p removes.
float Filter::negligible() const {
  const double dropped = (1.0 - row_.top_p - kSlack) * row_.total;
  return std::max(float(dropped / vocab_), std::numeric_limits<float>::denorm_min());
}

std::int64_t Filter::units(int id) const { return std::int64_t(double(row_.weights[id]) * unit_); }

// Returns the first token, in the row's order, at which the sum of the amounts of the tokens up to it is `enough`, or
// `kEnd` if there is none. `ids` are ascending, and contain every token up to this one that has an amount.
template <class Amount, class Enough>
OrderedToken Filter::last_until(const Ids& ids, Amount amount, Enough enough) {
  const Ids* left = &ids;
  std::int64_t sum = 0;
  bool equal = false;
  while (left->size() > kMaxSorted) {
    float low = kInfinity, high = -kInfinity;
    for (const int id : *left) low = std::min(low, row_.logits[id]), high = std::max(high, row_.logits[id]);
    equal = low == high;
    if (equal) break;
    const double scale = (kBuckets - 1) / (double(high) - double(low));
    const auto bucket_of = [&](int id) { return int((double(high) - double(row_.logits[id])) * scale); };
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
      return row_.logits[a] != row_.logits[b] ? row_.logits[a] > row_.logits[b] : a < b;
    });
    left = &bucket_;
  }
  for (const int id : *left)
    if (sum += amount(id); enough(sum)) return {row_.logits[id], id};
  return kEnd;
}

OrderedToken Filter::last_of_count(std::int64_t count) {
  return last_until(candidates_, [](int) { return 1; }, [&](std::int64_t sum) { return sum >= count; });
}

OrderedToken Filter::last_of_mass(const Ids& ids, double target) {
  return last_until(ids, [&](int id) { return units(id); },
                    [&](std::int64_t sum) { return double(sum) / kUnits >= target; });
}

// Lists the candidates of the row, and returns the last one that top-k and top-p keep.
OrderedToken Filter::last_kept() {
  const double top_p = row_.top_p;
  if (row_.top_k >= vocab_) {
    list(row_.weights, negligible());
    return top_p < 1.0 ? last_of_mass(candidates_, top_p) : kEnd;
  }
  list(row_.logits, bound_reached_by(row_.top_k));
  const OrderedToken last = last_of_count(row_.top_k);
  if (top_p >= 1.0) return last;
  kept_.select(candidates_, [&](int id) { return is_kept(id, last); });
  std::int64_t sum = 0;
  for (const int id : kept_) sum += units(id);
  const OrderedToken nearer = last_of_mass(kept_, top_p * (double(sum) / kUnits));
  return nearer.logit == kEnd.logit ? last : nearer;
}

OrderedToken Filter::apply(const FilteredRow& row) {
  row_ = row;
  unit_ = kUnits / row.total;
  const OrderedToken last = last_kept();
  if (row.log_min_p == -kInfinity) {
    kept_.select(candidates_, [&](int id) { return is_kept(id, last); });
  } else {
    kept_.select(candidates_, [&](int id) {
      return is_kept(id, last) & ((row.logits[id] - row.best) / row.temperature >= row.log_min_p);
    });
  }
  cumulated_.resize(kept_.size());
  double sum = 0;
  double* to = cumulated_.data();
  for (const int id : kept_) *to++ = sum += double(row.weights[id]);
  return last;
}

// Returns the token at a uniform, by the inverse CDF in the order of ids.
std::int64_t Filter::sample(double uniform) const {
  const double total = cumulated_.back();
  const double target = std::min(uniform * total, std::nextafter(total, 0.0));
  return kept_.begin()[std::upper_bound(cumulated_.begin(), cumulated_.end(), target) - cumulated_.begin()];
}

}  // namespace motet
