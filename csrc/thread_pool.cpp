#include "thread_pool.h"

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

ThreadPool::ThreadPool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { run_worker(thread); });
}

ThreadPool::~ThreadPool() {
  ending_ = true;
  ++signal_;
  signal_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::parallel_for(int count, Call call, void* context) {
  if (threads_.empty() || count == 1) {
    for (int index = 0; index < count; ++index) call(context, index, 0);
    return;
  }
  const std::uint64_t number = (next_.load(std::memory_order_relaxed) >> 32) + 1;
  Loop& loop = loops_[number % 2];
  loop.call.store(call, std::memory_order_relaxed);
  loop.context.store(context, std::memory_order_relaxed);
  loop.count.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  next_.store(number << 32, std::memory_order_release);
  signal_.fetch_add(1, std::memory_order_release);
  signal_.notify_all();
  while (run_next(0)) {
  }
  for (int done; (done = done_.load(std::memory_order_acquire)) < count;) wait_while(done_, done);
}

// Runs one iteration. Returns false if there is none for this thread.
bool ThreadPool::run_next(int thread) {
  std::uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    const Loop& loop = loops_[(next >> 32) % 2];
    const Call call = loop.call.load(std::memory_order_relaxed);
    void* const context = loop.context.load(std::memory_order_relaxed);
    const int count = loop.count.load(std::memory_order_relaxed), index = int(next & 0xffffffff);
    if (index >= count || thread >= count) return false;  // additional threads would only contend
    if (next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) {
      call(context, index, thread);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) done_.notify_one();
      return true;
    }
  }
}

void ThreadPool::run_worker(int thread) {
  for (;;) {
    const std::uint32_t signal = signal_.load(std::memory_order_acquire);
    if (ending_) return;
    while (run_next(thread)) {
    }
    wait_while(signal_, signal);
  }
}

}  // namespace motet
