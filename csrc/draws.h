// The draws of a step, from its logits, and log-probabilities of what was drawn.
//
// A row of logits is cut into blocks of 256 tokens. A uniform number finds first a block, by the blocks' masses, and
// then a token in it, by what is left of the uniform. Rows with top-k or top-p go through `filters.h`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "team.h"

namespace motet {

// The choices of a step; those that draw from one row in the same way should follow each other. All memory belongs to
// the caller.
struct Drawing {
  std::int32_t num_choices, vocab;
  std::int32_t stride;                // of the logits' rows, at least `vocab`
  std::int32_t most_best, num_named;  // room in `scores`
  const float* logits;                // [rows][stride]
  const std::int64_t* rows;           // [num_choices]: the row of each choice
  const float* temperature;           // [num_choices]; 0: the best token, the lowest id among equals
  const std::int64_t* top_k;          // [num_choices]; `vocab`: off
  const double* top_p;                // [num_choices]; 1: off
  const float* log_min_p;             // [num_choices]; -infinity: off
  const double* uniform;              // [num_choices], in [0, 1); null: that of seed and position
  const std::uint64_t* seeds;         // [num_choices]
  const std::uint64_t* positions;     // [num_choices], of the tokens
  const std::int32_t* best;           // [num_choices]: how many of the best tokens are scored; -1: nothing is
  const std::int64_t* named;          // [num_choices][num_named]: tokens that are scored too
  std::int64_t* tokens;               // [num_choices], written
  std::uint8_t* finite;               // [num_choices], written; 0: the row is no distribution, its token means nothing
  float* last_logit;                  // [num_choices], written: the last token that top-k and top-p keep; -infinity: all
  std::int64_t* last_id;              // [num_choices], written
  double* scores;                     // [num_choices][2 + num_named + 2 * most_best], written where asked for:
};                                    // log-probability, rank, those of the named tokens, the best tokens, theirs

class Row;

// Its memory serves all steps.
class Draws {
 public:
  Draws(int vocab, int num_threads);
  ~Draws();

  void run(const Drawing& step);

 private:
  Team team_;
  std::vector<std::unique_ptr<Row>> rows_;  // one for each thread
  std::vector<int> begins_;                 // of choices that draw alike from one row, and the end
};

}  // namespace motet
