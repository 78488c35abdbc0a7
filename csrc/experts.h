// A mixture of experts (Shazeer et al., 2017): each row is computed by the few experts that a router selects for it.
//
// The rows of each expert are gathered, and each iteration of a loop computes the same strip of columns of all experts
// that have rows. All iterations therefore take about the same time, however unequal the numbers of rows are, and only
// weights of experts with rows are read. The results of a row are added in the order of its experts' numbers. Products
// sum in the same order for any number of rows (gemm.h), so a row's bits do not depend on other rows.
#pragma once

#include <vector>

#include "model.h"
#include "thread_pool.h"

namespace motet {

template <class Number>
class ExpertLayer {
 public:
  // Computes the experts of a layer for input [rows][hidden]. Writes output [rows][hidden].
  void run(const Layer& layer, const Number* input, int rows, float* output, ThreadPool& threads);

  // Returns the factor of the shared expert for a row of the last run.
  float shared_factor(const Experts& experts, int row) const;

 private:
  // An expert with its places [begin, end) in `rows_`.
  struct Active {
    int expert, begin, end;
  };

  void prepare(const Experts& experts, int rows, int num_threads);
  void route(const Experts& experts, const Number* input, int rows, ThreadPool& threads);
  void select(const Experts& experts, int row);
  void assign(const Experts& experts, int rows);
  void gather(const Experts& experts, const Number* input, ThreadPool& threads);
  void gate(const Layer& layer, ThreadPool& threads);
  void add_up(const Experts& experts, int rows, float* output, ThreadPool& threads);

  std::vector<float> logits_;            // [rows][columns of the router]; scores after `select`
  std::vector<float> ranks_;             // [rows][columns of the router]: scores plus corrections, for the selection
  std::vector<int> selected_;            // [rows][per_row]: experts
  std::vector<float> weights_;           // [rows][per_row]
  std::vector<Active> active_;           // experts with rows, in their order
  std::vector<int> ends_;                // [experts]: end of the experts' places that have been assigned
  std::vector<int> rows_;                // [rows * per_row]: row of each place
  std::vector<float> row_weights_;       // [rows * per_row]: weight of each place
  std::vector<Number> gathered_;         // [rows * per_row][hidden]
  std::vector<Number> gated_;            // [rows * per_row][width]
  std::vector<std::vector<float>> wide_;  // for each thread, scratch for rows in float32
  std::vector<std::vector<float>> sums_;  // for each thread, scratch for sums of products (see `product`)
};

}  // namespace motet
