// Threads that share the pieces of one job after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace motet {

// A decode step is about two hundred jobs of microseconds each. The caller waits for pieces, not for threads: if a
// thread has lost its core to another process, the others take its share, until it is back. Idle threads spin before
// they sleep, but only briefly, because they would keep other threads from their core.
class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return int(threads_.size()) + 1; }

  // Calls work(piece, thread) once for every piece from 0 to `count`, on the threads that are free. Returns when all
  // are done; the caller then sees what they wrote.
  template <class Work>
  void share(int count, Work&& work) {
    using Type = std::remove_reference_t<Work>;
    share(count, [](void* context, int piece, int thread) { (*static_cast<Type*>(context))(piece, thread); },
          const_cast<void*>(static_cast<const void*>(&work)));
  }

 private:
  using Call = void (*)(void*, int, int);

  // Two jobs take turns, so that a thread that reads the last job late finds consistent values. It uses them only if
  // `next_` still names that job.
  struct Job {
    std::atomic<Call> call{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int> count{0};
  };

  void share(int count, Call call, void* context);
  void serve(int thread);
  bool take(int thread);

  std::vector<std::thread> threads_;
  Job jobs_[2];
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<std::uint64_t> next_{0};  // number of the job, then (lower half) its next piece
  alignas(64) std::atomic<std::uint32_t> news_{0};  // rises with every job, and at the end
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace motet
