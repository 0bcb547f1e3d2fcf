// Calls task(index, worker) once for every index in [0, num_tasks), worker in [0, num_threads). Any free thread takes
// the next index, in rising order, so results must not depend on which thread runs a task. If tasks throw, the
// others are left out, and the first exception is thrown to the caller. kMode: what every thread does with denormals.
//
// Uses OpenMP if the build has it (torch's own pool: its libgomp is already loaded), else std::thread. Always asks for
// num_threads: libgomp ends and restarts threads whenever the size of the team changes.
//
// In a forked child, everything runs on the calling thread: fork copies only that thread, and libgomp would wait for
// ever for the other threads of a team that it still believes in. No result depends on it.
#pragma once

#include <hotrow/denormals.h>

#include <atomic>
#include <cstdint>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#else
#include <system_error>
#include <thread>
#include <vector>
#endif

namespace hotrow {

// Begins to notice forks. Called once, before any kernel.
void watch_forks();

// Whether this process, or one it descends from, was forked after watch_forks.
bool in_forked_child();

// A region that moves fewer bytes runs on one thread: waking a sleeping thread takes 10 to 50 us, in which one thread
// moves about this much. Tests set it to 0, to divide small batches too.
inline std::atomic<int64_t> min_parallel_bytes{1 << 18};

// Multiply-adds of a product in the unit of `min_parallel_bytes`: a thread does about two while it moves a byte.
inline int64_t work_of_products(int64_t multiply_adds) { return multiply_adds / 2; }

// The number of threads for a region: all or one, because libgomp restarts threads if the size of a team changes.
inline int team(int64_t work, int num_threads) { return work < min_parallel_bytes.load() ? 1 : num_threads; }

// What tasks on several threads throw: an exception may not leave its thread.
class FirstError {
 public:
  template <class Call>
  void guard(const Call& call) noexcept {
    if (thrown_.load(std::memory_order_relaxed)) return;
    try {
      call();
    } catch (...) {
      if (!thrown_.exchange(true)) error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> thrown_{false};
  std::exception_ptr error_;
};

template <Denormals kMode = Denormals::kept, class Task>
void parallel_for(int64_t num_tasks, int num_threads, const Task& task) {
  if (num_threads <= 1 || num_tasks <= 1 || in_forked_child()) {
    const DenormalMode mode(kMode);
    for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
    return;
  }
  FirstError error;
#ifdef _OPENMP
#pragma omp parallel num_threads(num_threads)
  {
    const DenormalMode mode(kMode);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_tasks; ++i) error.guard([&] { task(i, omp_get_thread_num()); });
  }
#else
  std::atomic<int64_t> next{0};
  const auto run = [&](int worker) {
    const DenormalMode mode(kMode);
    for (int64_t i = next++; i < num_tasks; i = next++) error.guard([&] { task(i, worker); });
  };
  std::vector<std::thread> threads;
  try {
    for (int worker = 1; worker < num_threads; ++worker) threads.emplace_back(run, worker);
  } catch (const std::system_error&) {  // the threads that did start do all tasks
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
#endif
  error.rethrow();
}

}  // namespace hotrow
