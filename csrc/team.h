// Threads that work on one forward pass together: all run the same function and meet at barriers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace motet {

// A decode step passes some two hundred barriers, each microseconds after the last, so who waits spins first. It does
// not spin for long: where another process wants the core, the thread waited for may be the one that has none.
class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Calls work(thread) on every thread, 0 being the caller's, and returns when all have returned.
  void run(const std::function<void(int)>& work);

  // Inside `work`: returns when every thread has come here; what they wrote before is visible after.
  void meet();

  // Inside `work`: the next of `count` pieces of work since the last meeting, or `count` when none is left.
  int next(int count) {
    const int piece = next_.fetch_add(1, std::memory_order_relaxed);
    return piece < count ? piece : count;
  }

 private:
  void serve(int thread);

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  bool ending_ = false;
  alignas(64) std::atomic<std::uint32_t> orders_{0};    // rises when there is work, or the end
  alignas(64) std::atomic<std::uint32_t> meetings_{0};  // rises when all have met
  alignas(64) std::atomic<int> missing_;
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace motet
