// See hotrow/finite.h. Compiled once, for the baseline: a pass over gradients that were just written is bound by
// caches.
#include <hotrow/finite.h>
#include <hotrow/parallel.h>

#include <algorithm>
#include <atomic>
#include <bit>

namespace hotrow {
namespace {

constexpr int64_t kFloatsPerTask = 1 << 15;

bool is_nonfinite(float x) {
  constexpr uint32_t kExponent = 0x7f800000u;
  return (std::bit_cast<uint32_t>(x) & kExponent) == kExponent;
}

bool any_nonfinite(const float* values, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) found |= is_nonfinite(values[i]) ? 1u : 0u;
  return found != 0;
}

}  // namespace

int64_t first_nonfinite(const float* values, int64_t num_rows, int64_t num_columns, int64_t stride, int num_threads) {
  if (stride == num_columns) {  // one long row, which can be divided anywhere
    num_columns *= num_rows;
    num_rows = std::min<int64_t>(num_rows, 1);
  }
  const int64_t pieces_per_row = std::max<int64_t>(1, num_columns / kFloatsPerTask);
  const int64_t rows_per_task = std::max<int64_t>(1, kFloatsPerTask / std::max<int64_t>(1, num_columns));
  const int64_t num_row_tasks = (num_rows + rows_per_task - 1) / rows_per_task;
  num_threads = team(num_rows * num_columns * static_cast<int64_t>(sizeof(float)), num_threads);
  std::atomic<int64_t> first{INT64_MAX};
  parallel_for(num_row_tasks * pieces_per_row, num_threads, [&](int64_t task, int) {
    const int64_t piece = task % pieces_per_row, row = task / pieces_per_row * rows_per_task;
    const int64_t begin = num_columns * piece / pieces_per_row, end = num_columns * (piece + 1) / pieces_per_row;
    for (int64_t r = row; r < std::min(num_rows, row + rows_per_task); ++r) {
      const float* at = values + r * stride;
      if (!any_nonfinite(at + begin, end - begin)) continue;
      const int64_t column = std::find_if(at + begin, at + end, is_nonfinite) - at;
      int64_t before = first.load();
      while (r * num_columns + column < before && !first.compare_exchange_weak(before, r * num_columns + column)) {
      }
      return;
    }
  });
  return first == INT64_MAX ? -1 : first.load();
}

}  // namespace hotrow
