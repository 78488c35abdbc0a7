// Samples the tokens of a step from its logits, and computes their log-probabilities.
//
// A row of logits is cut into blocks of 256 tokens. The uniform number first selects a block, by the blocks' masses,
// and its remaining fraction then selects a token in the block. Rows with top-k or top-p use `filters.h`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "thread_pool.h"

namespace motet {

// The choices of a step, and their results. With `given`, tokens are only scored. Choices that sample from the same row with equal parameters should be
// adjacent. All memory belongs to the caller.
struct SamplingArguments {
  std::int32_t num_choices, vocab;
  std::int32_t stride;                // distance of the logits' rows in floats, at least `vocab`
  std::int32_t max_top, num_named;    // these determine the width of `scores`
  const float* logits;                // [rows][stride]
  const std::int64_t* rows;           // [num_choices]: the row of each choice
  const float* temperature;           // [num_choices]; 0: greedy, with the lowest id among equal logits
  const std::int64_t* top_k;          // [num_choices]; `vocab`: off
  const double* top_p;                // [num_choices]; 1: off
  const float* log_min_p;             // [num_choices]; -infinity: off
  const double* uniform;              // [num_choices], in [0, 1); null: computed from seeds and positions
  const std::uint64_t* seeds;         // [num_choices]
  const std::uint64_t* positions;     // [num_choices]: positions of the sampled tokens
  const std::int32_t* num_top;        // [num_choices]: number of top tokens to score; -1: no token is scored
  const std::int64_t* named;          // [num_choices][num_named]: additional tokens to score
  const std::int64_t* given;          // [num_choices] or null: tokens that are scored instead of sampled tokens
  std::int64_t* tokens;               // [num_choices], output
  std::uint8_t* finite;               // [num_choices], output; 0: the row is not a distribution, its token is invalid
  float* last_logit;                  // [num_choices], output: last token that top-k and top-p keep; -infinity: all
  std::int64_t* last_id;              // [num_choices], output: id of this token
  // [num_choices][2 + num_named + 2 * max_top], output if requested: log-probability, rank, log-probabilities of the
  // named tokens, ids of the top tokens, log-probabilities of the top tokens.
  double* scores;
};

class RowSampler;

// Samples one step after the other. Owns its threads and its scratch memory.
class Sampler {
 public:
  Sampler(int vocab, int num_threads);
  ~Sampler();

  void run(const SamplingArguments& args);

 private:
  ThreadPool threads_;
  std::vector<std::unique_ptr<RowSampler>> rows_;  // one for each thread
  // First choice of each run of choices with the same row and parameters, then num_choices.
  std::vector<int> begins_;
};

}  // namespace motet
