// How fast this machine can touch rows at all: the yardstick of the benchmarks. Shares no code with the kernels, so
// that a flaw of theirs cannot lower the limit they are measured against.
#include <hotrow/limit.h>

#include <thread>
#include <vector>

namespace hotrow {
namespace {

constexpr int64_t kLine = 64;

uint64_t touch(uint64_t* line, bool write) {
  const uint64_t value = __atomic_load_n(line, __ATOMIC_RELAXED);
  if (write) __atomic_store_n(line, value + 1, __ATOMIC_RELAXED);
  return value;
}

uint64_t touch_range(const RowPass& pass, int64_t first, int64_t last) {
  uint64_t sum = 0;
  for (int64_t i = first; i < last; ++i) {
    if (pass.distance && i + pass.distance < last) {
      const char* ahead = pass.rows + pass.ids[i + pass.distance] * pass.row_bytes;
      for (int64_t at = 0; at < pass.row_bytes; at += kLine) {
        if (pass.write) {
          __builtin_prefetch(ahead + at, 1, 3);
        } else {
          __builtin_prefetch(ahead + at, 0, 3);
        }
      }
    }
    char* row = pass.rows + pass.ids[i] * pass.row_bytes;
    for (int64_t at = 0; at < pass.row_bytes; at += kLine)
      sum += touch(reinterpret_cast<uint64_t*>(row + at), pass.write);
  }
  return sum;
}

}  // namespace

uint64_t touch_rows(const RowPass& pass, int num_threads) {
  std::vector<uint64_t> sums(static_cast<size_t>(num_threads) * 8);  // a cache line apart
  std::vector<std::thread> threads;
  const auto run = [&](int t) {
    sums[static_cast<size_t>(t) * 8] =
        touch_range(pass, pass.num_ids * t / num_threads, pass.num_ids * (t + 1) / num_threads);
  };
  for (int t = 1; t < num_threads; ++t) threads.emplace_back(run, t);
  run(0);
  uint64_t sum = sums[0];
  for (int t = 1; t < num_threads; ++t) {
    threads[static_cast<size_t>(t) - 1].join();
    sum += sums[static_cast<size_t>(t) * 8];
  }
  return sum;
}

}  // namespace hotrow
