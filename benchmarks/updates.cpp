// Ways to apply the SGD update of summed bags that hotrow does not use, for benchmarks/updates.py: row of id i loses
// lr * grad of bag i / lookups. Compiled on demand; nothing of it is installed.
#include <omp.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

struct Update {
  float* rows;
  const int64_t* ids;
  int64_t num_ids, num_rows, dim, lookups;
  const float* grads;
  int64_t grad_stride;
  float lr;
  int threads;

  float* row(int64_t i) const { return rows + ids[i] * dim; }
  const float* grad(int64_t i) const { return grads + i / lookups * grad_stride; }
  void add(int64_t i) const {
    for (int64_t d = 0; d < dim; ++d) row(i)[d] -= lr * grad(i)[d];
  }
};

void atomic_subtract(float* at, float value) {
  std::atomic_ref<float> element(*at);
  float before = element.load(std::memory_order_relaxed);
  while (!element.compare_exchange_weak(before, before - value, std::memory_order_relaxed)) {
  }
}

}  // namespace

extern "C" void apply(int variant, float* rows, const int64_t* ids, int64_t num_ids, int64_t num_rows, int64_t dim,
                      int64_t lookups, const float* grads, int64_t grad_stride, float lr, int threads) {
  const Update u{rows, ids, num_ids, num_rows, dim, lookups, grads, grad_stride, lr, threads};
  switch (variant) {
    case 0:  // one thread
      for (int64_t i = 0; i < num_ids; ++i) u.add(i);
      break;
    case 1:  // ids cut among threads, nothing protected
#pragma omp parallel for num_threads(threads)
      for (int64_t i = 0; i < num_ids; ++i) u.add(i);
      break;
    case 2:  // the same, each element subtracted atomically
#pragma omp parallel for num_threads(threads)
      for (int64_t i = 0; i < num_ids; ++i)
        for (int64_t d = 0; d < dim; ++d) atomic_subtract(u.row(i) + d, lr * u.grad(i)[d]);
      break;
    case 3: {  // the same, a spin lock for each group of rows
      static std::vector<std::atomic_flag> locks(1 << 14);
#pragma omp parallel for num_threads(threads)
      for (int64_t i = 0; i < num_ids; ++i) {
        auto& lock = locks[static_cast<size_t>(ids[i]) % locks.size()];
        while (lock.test_and_set(std::memory_order_acquire)) {
        }
        u.add(i);
        lock.clear(std::memory_order_release);
      }
      break;
    }
    case 4:  // every thread reads all ids and updates the rows it owns, a range
#pragma omp parallel num_threads(threads)
    {
      const int64_t t = omp_get_thread_num(), n = omp_get_num_threads();
      const int64_t first = num_rows * t / n, last = num_rows * (t + 1) / n;
      for (int64_t i = 0; i < num_ids; ++i)
        if (ids[i] >= first && ids[i] < last) u.add(i);
    } break;
    default:
      break;
  }
}
