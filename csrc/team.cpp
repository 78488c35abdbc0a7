#include "team.h"

#include <immintrin.h>

namespace motet {
namespace {

constexpr int kSpins = 300;  // about 10 microseconds

template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Team::~Team() {
  ending_ = true;
  ++news_;
  news_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::share(int count, Call call, void* context) {
  if (threads_.empty() || count == 1) {
    for (int piece = 0; piece < count; ++piece) call(context, piece, 0);
    return;
  }
  const std::uint64_t number = (next_.load(std::memory_order_relaxed) >> 32) + 1;
  Job& job = jobs_[number % 2];
  job.call.store(call, std::memory_order_relaxed);
  job.context.store(context, std::memory_order_relaxed);
  job.count.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  next_.store(number << 32, std::memory_order_release);
  news_.fetch_add(1, std::memory_order_release);
  news_.notify_all();
  while (take(0)) {
  }
  for (int done; (done = done_.load(std::memory_order_acquire)) < count;) wait_while(done_, done);
}

// Runs one piece; returns false if there is none for this thread.
bool Team::take(int thread) {
  std::uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    const Job& job = jobs_[(next >> 32) % 2];
    const Call call = job.call.load(std::memory_order_relaxed);
    void* const context = job.context.load(std::memory_order_relaxed);
    const int count = job.count.load(std::memory_order_relaxed), piece = int(next & 0xffffffff);
    if (piece >= count || thread >= count) return false;  // more threads than pieces would only disturb each other
    if (next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) {
      call(context, piece, thread);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) done_.notify_one();
      return true;
    }
  }
}

void Team::serve(int thread) {
  for (;;) {
    const std::uint32_t news = news_.load(std::memory_order_acquire);
    if (ending_) return;
    while (take(thread)) {
    }
    wait_while(news_, news);
  }
}

}  // namespace motet
