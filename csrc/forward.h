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

  // Computes a single product: output [rows][columns]; columns must be a multiple of 32.
  void multiply(const Linear& linear, const bf16* input, int rows, float* output);

 private:
  void prepare(const Batch& batch);
  void prepare_sums(std::size_t rows);
  void embed(const Batch& batch);
  void attend(const Layer& layer, const Batch& batch);
  void place(const Layer& layer, const Batch& batch, int row, bool last);
  void feed_forward(const Layer& layer, const Batch& batch);
  void add(const Linear& linear, const float* post_norm, const bf16* input, int rows);
  void head(const Batch& batch);
  void norm(const float* weights, int rows);
  template <class Work>
  void each_row(int rows, Work work);
  template <class Done>
  void multiply(const Linear& linear, const bf16* input, int rows, Done done);

  const Model& model_;
  Team team_;
  Attention attention_;
  std::vector<float> residual_;            // [rows][hidden]
  std::vector<float> projected_;           // [rows][columns of qkv, or hidden]
  std::vector<bf16> input_;                // [rows][hidden, or all queries]: input of the next product
  std::vector<bf16> gated_;                // [rows][intermediate]
  std::vector<bf16> queries_;              // see Attention::run
  std::vector<std::vector<float>> sums_;   // for each thread, sums of products with a great depth
};

}  // namespace motet
