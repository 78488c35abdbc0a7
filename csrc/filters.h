// Top-k and top-p of a step's draws, and the draws among the tokens that they keep.
//
// The tokens of a lane have one order: the higher logit first, the lower id first among equals. Each filter keeps a front
// part of it, so all that is looked for is the last token kept. No lane is sorted for that:
//
//   1. tokens that can be kept are listed: those above a bound that costs one pass over the lane
//   2. they are put into buckets of equal width in logits, which are counted (top-k) or weighed (top-p)
//   3. the bucket that holds the last token is divided again, until few are left, and these are sorted
//
// Weights are added up as integers. So a sum has the same bits in any order, here and in Python.
#pragma once

#include <cstdint>

namespace motet {

// The lanes of one batch, and the choices that draw from them. All memory belongs to the caller.
struct Filtering {
  std::int32_t num_lanes, width, vocab, num_choices;  // width: a multiple of 64; logits from `vocab` on are -infinity
  const float* logits;        // [num_lanes][width]
  const float* weights;       // [num_lanes][width]: probabilities at the lane's temperature
  const double* whole;        // [num_lanes]: the sum of the lane's weights; NaN: no distribution, which draws token 0
  const float* temperature;   // [num_lanes]
  const std::int64_t* top_k;  // [num_lanes]; `vocab`: off
  const double* top_p;        // [num_lanes]; 1: off
  const float* log_min_p;     // [num_lanes]; -infinity: off
  const std::int64_t* lanes;  // [num_choices]: the lane of each choice; they rise
  const double* uniform;      // [num_choices], in [0, 1)
  float* last_logit;          // [num_lanes], written: the last token that top-k and top-p keep; -infinity: all are kept
  std::int64_t* last_id;      // [num_lanes], written
  std::int64_t* tokens;       // [num_choices], written
};

// Finds the last token kept of every lane, and draws a token for every choice from those that min-p keeps too.
void filter(const Filtering& batch);

}  // namespace motet
