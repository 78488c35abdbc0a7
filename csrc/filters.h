// Top-k, top-p and min-p of one row of logits, and draws among the tokens that they keep.
//
// The tokens of a row have one order: the higher logit first, the lower id first among equals. Each filter keeps a front
// part of it, so all that is looked for is the last token kept. Nothing is sorted for that:
//
//   1. tokens that can be kept are listed: those above a bound that costs one pass over the row
//   2. they are put into buckets of equal width in logits, which are counted (top-k) or weighed (top-p)
//   3. the bucket that holds the last token is divided again, until few are left, and these are sorted
//
// Weights are added up as integers. So a sum has the same bits in any order.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "numbers.h"

namespace motet {

// A row's logits and weights at its temperature, and what its choices ask for.
struct WeighedRow {
  const float* logits;   // [width]; -infinity from `vocab` on
  const float* weights;  // [width]
  double whole;          // the sum of the weights
  float best;            // the greatest logit, which is finite
  float temperature;
  std::int64_t top_k;  // `vocab`: off
  double top_p;        // 1: off
  float log_min_p;     // -infinity: off
};

// A place in the order of a row's tokens.
struct Place {
  float logit;
  std::int64_t id;
};
constexpr Place kEnd{-kInfinity, std::numeric_limits<std::int64_t>::max()};

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

// Filters one row after the other. Its memory serves them all.
class Filter {
 public:
  Filter(int vocab, int width)  // `width`: a multiple of 64
      : vocab_(vocab), width_(width), candidates_(width), kept_(width), bucket_(width), smaller_(width) {}

  // Prepares draws from a row. Returns the last token that top-k and top-p keep; `kEnd`: they keep all that have a
  // weight.
  Place apply(const WeighedRow& row);
  std::int64_t draw(double uniform) const;

 private:
  Place last_kept();
  void list(const float* values, float bound);
  float reached_by(std::int64_t count);
  float negligible() const;
  std::int64_t units(int id) const;
  bool is_kept(int id, Place last) const {
    return (row_.logits[id] > last.logit) | ((row_.logits[id] == last.logit) & (id <= last.id));
  }
  template <class Amount, class Enough>
  Place last_until(const Ids& ids, Amount amount, Enough enough);
  Place last_of_count(std::int64_t count);
  Place last_of_mass(const Ids& ids, double goal);

  const int vocab_, width_;
  WeighedRow row_;
  double unit_;     // of a weight, as an integer
  Ids candidates_;  // rising; holds all tokens that can be kept and have a weight
  Ids kept_;        // rising
  Ids bucket_, smaller_;
  std::vector<float> maxima_;
  std::vector<double> cumulated_;  // weights of the tokens kept
};

}  // namespace motet
