// How fast this machine can touch rows at all: the yardstick of the benchmarks. Shares no code with the kernels, so
// that a flaw of theirs cannot lower the limit they are measured against.
#include <hotrow/limit.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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

// kLines: of a row; 0: any number. Loops of a fixed length are unrolled, which an inner loop that waits for memory
// feels.
template <int kLines, int kFetchToWrite, int kLocality>
uint64_t touch_range(const RowPass& pass, int64_t first, int64_t last) {
  const int64_t row_bytes = kLines ? kLines * kLine : pass.row_bytes;
  uint64_t sum = 0;
  for (int64_t i = first; i < last; ++i) {
    if (pass.distance && i + pass.distance < pass.num_ids) {
      const char* ahead = pass.rows + pass.ids[i + pass.distance] * row_bytes;
#pragma GCC unroll 8
      for (int64_t at = 0; at < row_bytes; at += kLine) __builtin_prefetch(ahead + at, kFetchToWrite, kLocality);
    }
    char* row = pass.rows + pass.ids[i] * row_bytes;
#pragma GCC unroll 8
    for (int64_t at = 0; at < row_bytes; at += kLine) sum += touch(reinterpret_cast<uint64_t*>(row + at), pass.write);
  }
  return sum;
}

using TouchRange = uint64_t (*)(const RowPass&, int64_t, int64_t);

template <int kLines>
TouchRange range_of(const RowPass& pass) {
  if (pass.into_l2) return touch_range<kLines, 0, 2>;
  return pass.write ? touch_range<kLines, 1, 3> : touch_range<kLines, 0, 3>;
}

TouchRange choose_range(const RowPass& pass) {
  switch (pass.row_bytes) {
    case 1 * kLine:
      return range_of<1>(pass);
    case 2 * kLine:
      return range_of<2>(pass);
    case 4 * kLine:
      return range_of<4>(pass);
    case 8 * kLine:
      return range_of<8>(pass);
    default:
      return range_of<0>(pass);
  }
}

}  // namespace

double touch_rows(const RowPass& pass, int num_threads) {
  constexpr int64_t kPiece = 1 << 13;  // rows; whoever is free takes the next
  const TouchRange range = choose_range(pass);
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> total{0};
  const auto run = [&] {
    uint64_t sum = 0;
    for (int64_t first = next.fetch_add(kPiece); first < pass.num_ids; first = next.fetch_add(kPiece)) {
      sum += range(pass, first, std::min(first + kPiece, pass.num_ids));
    }
    total += sum;  // so that the loads count as used
  };
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int t = 1; t < num_threads; ++t) threads.emplace_back(run);
  run();
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace hotrow
