// Thread affinity by Linux's system call; on other systems nothing is moved. See hotrow/pin.h.
#include <hotrow/parallel.h>
#include <hotrow/pin.h>

#ifdef __linux__
#include <sched.h>
#endif

namespace hotrow {
namespace {

bool move_this_thread([[maybe_unused]] const std::vector<int>& cores) {
#ifdef __linux__
  cpu_set_t* set = CPU_ALLOC(CPU_SETSIZE);
  if (!set) return false;
  CPU_ZERO_S(CPU_ALLOC_SIZE(CPU_SETSIZE), set);
  for (const int core : cores) {
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET_S(static_cast<size_t>(core), CPU_ALLOC_SIZE(CPU_SETSIZE), set);
  }
  const bool moved = sched_setaffinity(0, CPU_ALLOC_SIZE(CPU_SETSIZE), set) == 0;
  CPU_FREE(set);
  return moved;
#else
  return false;
#endif
}

}  // namespace

int pin_threads(const std::vector<std::vector<int>>& cores) {
  const int num_threads = static_cast<int>(cores.size());
  if (num_threads == 0) return 0;
  // Without a team of lasting threads, only the caller can be moved.
  if (num_threads == 1 || in_forked_child()) return move_this_thread(cores[0]);
#ifdef _OPENMP
  int moved = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : moved)
  moved += move_this_thread(cores[static_cast<size_t>(omp_get_thread_num())]);
  return moved;
#else
  return 0;
#endif
}

}  // namespace hotrow
