// One forward pass of a decoder over a step's flat batch.
#pragma once

#include <memory>

#include "model.h"
#include "team.h"

namespace motet {

class Forward {
 public:
  // Returns the forward pass for the model's type of number. The model must outlive it.
  static std::unique_ptr<Forward> of(const Model& model, int num_threads);

  virtual ~Forward() = default;
  virtual void run(const Batch& batch) = 0;

  // Computes a single product: input [rows][depth] in the model's numbers, output [rows][columns] float32; columns must
  // be a multiple of 32.
  virtual void multiply(const Linear& linear, const void* input, int rows, float* output) = 0;

  virtual Team& team() = 0;
};

}  // namespace motet
