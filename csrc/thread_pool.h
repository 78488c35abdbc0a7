// A thread pool that runs one parallel loop at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace motet {

// A decode step has about two hundred loops of a few microseconds each. The caller waits for iterations and not for
// threads: if the operating system has descheduled a thread, the other threads run its share until it is back. Idle
// threads spin before they sleep, but only briefly, because other threads may need their cores.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return int(threads_.size()) + 1; }

  // Calls work(index, thread) once for every index of [0, count), on the threads that are free. Returns when all calls
  // have returned; the caller then sees all their writes.
  template <class Work>
  void parallel_for(int count, Work&& work) {
    using Type = std::remove_reference_t<Work>;
    parallel_for(count, [](void* context, int index, int thread) { (*static_cast<Type*>(context))(index, thread); },
          const_cast<void*>(static_cast<const void*>(&work)));
  }

 private:
  using Call = void (*)(void*, int, int);

  // A loop. Two loops alternate, so that a thread that reads the previous loop late finds consistent values. It uses
  // these only if `next_` still names that loop.
  struct Loop {
    std::atomic<Call> call{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int> count{0};
  };

  void parallel_for(int count, Call call, void* context);
  void run_worker(int thread);
  bool run_next(int thread);

  std::vector<std::thread> threads_;
  Loop loops_[2];
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<std::uint64_t> next_{0};    // upper half: number of the loop; lower half: its next index
  alignas(64) std::atomic<std::uint32_t> signal_{0};  // incremented by every loop, and by the destructor
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace motet
