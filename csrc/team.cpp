#include "team.h"

#include <immintrin.h>

namespace motet {
namespace {

constexpr int kSpins = 2000;  // some 20 to 50 microseconds

void wait_until_changed(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int num_threads) : size_(num_threads), missing_(num_threads) {
  for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Team::~Team() {
  ending_ = true;
  orders_.fetch_add(1, std::memory_order_release);
  orders_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& work) {
  work_ = &work;
  if (size_ > 1) {
    orders_.fetch_add(1, std::memory_order_release);
    orders_.notify_all();
  }
  work(0);
  meet();
}

void Team::serve(int thread) {
  for (std::uint32_t done = 0;; ++done) {
    wait_until_changed(orders_, done);
    if (ending_) return;
    (*work_)(thread);
    meet();
  }
}

void Team::meet() {
  if (size_ == 1) {
    next_.store(0, std::memory_order_relaxed);
    return;
  }
  const std::uint32_t meeting = meetings_.load(std::memory_order_relaxed);
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    missing_.store(size_, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    meetings_.fetch_add(1, std::memory_order_release);
    meetings_.notify_all();
  } else {
    wait_until_changed(meetings_, meeting);
  }
}

}  // namespace motet
