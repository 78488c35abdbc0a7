// The pieces of a matrix product that the iterations of a parallel loop compute.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "model.h"
#include "panel.h"

namespace motet {

constexpr int kFewRows = 4;   // rows per iteration: fewer would take less time than involving a thread
constexpr int kMaxStrip = 8;  // maximum number of panels per iteration

template <class Memory>
void grow(Memory& memory, std::size_t size) {
  if (memory.size() < size) memory.resize(size);
}

// Returns the number of a product's panels per iteration. It should be large, but all threads must end at the same
// time, and there should be at least three iterations per thread, so that a descheduled thread causes little delay.
inline int strip_of(int panels, int threads) {
  int best = 1, min_panels = panels;
  for (int strip = 1; strip <= std::clamp(panels / (3 * threads), 1, kMaxStrip); ++strip) {
    const int pieces = (panels + strip - 1) / strip, panels_of_thread = (pieces + threads - 1) / threads * strip;
    if (panels_of_thread > min_panels) continue;
    best = strip;
    min_panels = panels_of_thread;
  }
  return best;
}

// Calls `work` with a pointer to a product's packed weights, in their actual type.
template <class Number, class Work>
void with_panels(const Linear& linear, Work work) {
  if constexpr (std::is_same_v<Number, bf16>)
    if (linear.scales) return work(static_cast<const std::int8_t*>(linear.panels));
  work(static_cast<const Number*>(linear.panels));
}

// Returns the results of 16 columns from their sums: applies scales and biases.
inline Floats finished(const Linear& linear, std::size_t column, Floats sum) {
  const Floats bias = linear.bias ? load(linear.bias + column) : all(0.0f);
  if (linear.scales) return fma(sum, load(linear.scales + column) * all(kInt8Unit), bias);
  return linear.bias ? sum + bias : sum;
}

}  // namespace motet
