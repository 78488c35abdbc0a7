// Top-k, top-p and min-p of one row of logits, and sampling from the tokens that they keep.
//
// The tokens of a row are ordered by descending logit, and by ascending id for equal logits. Each filter keeps a prefix
// of this order, so only the last kept token has to be found. The tokens are not sorted for that:
//
//   1. list the candidates: all tokens above a bound, which takes one pass over the row
//   2. put them into buckets of equal width in logits, and compute the number (top-k) or weight (top-p) of each bucket
//   3. subdivide the bucket that contains the last token, until few tokens are left, and sort these
//
// Weights are summed as integers, so a sum has the same bits in any order.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "number_types.h"

namespace motet {

// A row's logits, its weights at its temperature, and the filters of its choices. The memory belongs to the caller.
struct FilteredRow {
  const float* logits;   // [width]; -infinity from `vocab` on
  const float* weights;  // [width]
  double total;          // the sum of the weights
  float best;            // the maximum logit, which is finite
  float temperature;
  std::int64_t top_k;  // `vocab`: off
  double top_p;        // 1: off
  float log_min_p;     // -infinity: off
};

// A token's position in the order of a row's tokens. kEnd is after all tokens.
struct OrderedToken {
  float logit;
  std::int64_t id;
};
constexpr OrderedToken kEnd{-kInfinity, std::numeric_limits<std::int64_t>::max()};

// A list of token ids with a fixed capacity.
class Ids {
 public:
  explicit Ids(int capacity) : memory_(capacity) {}
  std::int32_t* begin() { return memory_.data(); }
  std::int32_t* end() { return memory_.data() + size_; }
  const std::int32_t* begin() const { return memory_.data(); }
  const std::int32_t* end() const { return memory_.data() + size_; }
  int size() const { return size_; }
  void clear() { size_ = 0; }
  void add(int id) { memory_[size_++] = id; }

  // Becomes the ids of `from` for which `selected` is true. Has no branches, because they could not be predicted.
  template <class Selected>
  void select(const Ids& from, Selected selected) {
    int size = 0;
    for (const int id : from) {
      memory_[size] = id;
      size += selected(id);
    }
    size_ = size;
  }

 private:
  std::vector<std::int32_t> memory_;
  int size_ = 0;
};

// Filters one row after the other. The memory is reused.
class Filter {
 public:
  Filter(int vocab, int width)  // `width` is a multiple of 64
      : vocab_(vocab), width_(width), candidates_(width), kept_(width), bucket_(width), smaller_(width) {}

  // Filters a row. Returns the last token that top-k and top-p keep, or `kEnd` if they keep all tokens that have a
  // weight.
  OrderedToken apply(const FilteredRow& row);
  // Samples from the kept tokens.
  std::int64_t sample(double uniform) const;

 private:
  OrderedToken last_kept();
  void list(const float* values, float bound);
  float bound_reached_by(std::int64_t count);
  float negligible() const;
  std::int64_t units(int id) const;
  bool is_kept(int id, OrderedToken last) const {
    return (row_.logits[id] > last.logit) | ((row_.logits[id] == last.logit) & (id <= last.id));
  }
  template <class Amount, class Enough>
  OrderedToken last_until(const Ids& ids, Amount amount, Enough enough);
  OrderedToken last_of_count(std::int64_t count);
  OrderedToken last_of_mass(const Ids& ids, double target);

  const int vocab_, width_;
  FilteredRow row_;
  double unit_;     // factor that converts a weight to an integer
  Ids candidates_;  // ascending; all tokens that can be kept and have a weight
  Ids kept_;        // ascending
  Ids bucket_, smaller_;
  std::vector<float> maxima_;
  std::vector<double> cumulated_;  // cumulative weights of the kept tokens
};

}  // namespace motet
