// One forward pass of a decoder over a step's flat batch.
#pragma once

#include <vector>

#include "attention.h"
#include "model.h"
#include "team.h"

namespace motet {

class Forward {
 public:
  Forward(const Model& model, int num_threads) : model_(model), team_(num_threads) {}

  void run(const Batch& batch);

 private:
  void pass(const Batch& batch, int thread);
  void embed(const Batch& batch, int thread);
  void attend(const Layer& layer, const Batch& batch, int thread);
  void place(const Layer& layer, const Batch& batch, int row, bool last);
  void feed_forward(const Layer& layer, const Batch& batch, int thread);
  void add(const Linear& linear, const float* post_norm, const bf16* input, const Batch& batch, int thread);
  void head(const Batch& batch, int thread);
  const bf16* normed(const float* weights, int rows, int thread);
  template <class Done>
  void multiply(const Linear& linear, const bf16* input, int rows, int thread, Done done);

  const Model& model_;
  Team team_;
  Attention attention_;
  std::vector<float> residual_;                 // [rows][hidden]
  std::vector<float> projected_;                // [rows][columns of qkv, or hidden]
  std::vector<bf16> input_;                     // [rows][hidden, or all queries]: what the next product multiplies
  std::vector<bf16> gated_;                     // [rows][intermediate]
  std::vector<bf16> queries_;                   // see Attention::run
  std::vector<std::vector<bf16>> own_inputs_;   // [threads][kOwnRows][hidden]
  std::vector<std::vector<float>> sums_;        // [threads]: of products over a great depth
};

}  // namespace motet
