// The forward pass of a decoder over a step's flat batch.
#pragma once

#include <memory>

#include "model.h"
#include "thread_pool.h"

namespace motet {

class Forward {
 public:
  // Returns the forward pass for the model's type of number. The model must outlive it.
  static std::unique_ptr<Forward> of(const Model& model, int num_threads);

  virtual ~Forward() = default;
  // Runs one step. Writes the outputs to the batch's memory.
  virtual void run(const Batch& batch) = 0;

  // Computes a single product: input [rows][depth] in the model's type of number, output [rows][columns] float32. The
  // number of columns must be a multiple of 32.
  virtual void multiply(const Linear& linear, const void* input, int rows, float* output) = 0;

  virtual ThreadPool& threads() = 0;
};

}  // namespace motet
