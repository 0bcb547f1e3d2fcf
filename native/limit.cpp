// How fast this machine can touch rows at all: it shares the kernels' threads but none of their code, so that a flaw in
// the kernels cannot lower the limit that they are measured against.
#include <hotrow/limit.h>
#include <hotrow/parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace hotrow {
namespace {

constexpr int64_t kLine = 64;

// kLines: lines of a row; 0: any number. Loops of a fixed length are unrolled, which matters to an inner loop that
// waits for memory.
template <int kLines, bool kWrite, int kLocality>
uint64_t touch_range(const RowPass& pass, int64_t first, int64_t last) {
  // Copies, because the compiler must assume that a write may change a field of `pass`.
  const int64_t row_bytes = kLines ? kLines * kLine : pass.row_bytes, distance = pass.distance;
  const int64_t* ids = pass.ids;
  char* rows = pass.rows;
  const auto fetch = [=](int64_t i) {
    const char* ahead = rows + ids[i] * row_bytes;
#pragma GCC unroll 8
    for (int64_t at = 0; at < row_bytes; at += kLine)
      __builtin_prefetch(ahead + at, kWrite && kLocality == 3, kLocality);
  };
  uint64_t sum = 0;
  for (int64_t i = first; i < std::min(first + distance, last); ++i) fetch(i);
  for (int64_t i = first; i < last; ++i) {
    if (distance && i + distance < last) fetch(i + distance);
    char* row = rows + ids[i] * row_bytes;
#pragma GCC unroll 8
    for (int64_t at = 0; at < row_bytes; at += kLine) {
      uint64_t* line = reinterpret_cast<uint64_t*>(row + at);
      const uint64_t value = __atomic_load_n(line, __ATOMIC_RELAXED);
      if (kWrite) __atomic_store_n(line, value + 1, __ATOMIC_RELAXED);
      sum += value;
    }
  }
  return sum;
}

using TouchRange = uint64_t (*)(const RowPass&, int64_t, int64_t);

template <int kLines>
TouchRange range_of(const RowPass& pass) {
  if (pass.write) return pass.into_l2 ? touch_range<kLines, true, 2> : touch_range<kLines, true, 3>;
  return pass.into_l2 ? touch_range<kLines, false, 2> : touch_range<kLines, false, 3>;
}

template <int... kLines>
TouchRange choose_range(const RowPass& pass) {
  TouchRange chosen = range_of<0>(pass);
  ((pass.row_bytes == kLines * kLine && (chosen = range_of<kLines>(pass), true)) || ...);
  return chosen;
}

}  // namespace

double touch_rows(const RowPass& pass, int num_threads) {
  constexpr int64_t kPiece = 1 << 13;  // rows; a free thread takes the next piece
  const TouchRange range = choose_range<1, 2, 4, 8>(pass);
  std::atomic<uint64_t> total{0};  // so that the loads count as used
  const auto start = std::chrono::steady_clock::now();
  parallel_for((pass.num_ids + kPiece - 1) / kPiece, num_threads, [&](int64_t piece, int) {
    total += range(pass, piece * kPiece, std::min((piece + 1) * kPiece, pass.num_ids));
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace hotrow
