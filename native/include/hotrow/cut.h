// How the work of a batch is divided into tasks: by bytes, so that long bags and wide tables count for what they cost.
// The division depends on the number of threads; results must not.
#pragma once

#include <hotrow/parallel.h>
#include <hotrow/types.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

namespace hotrow {

// Handing out a smaller task costs more than the imbalance that it could avoid.
inline constexpr int64_t kSmallestTaskBytes = 1 << 16;
// Tasks per thread: enough that little is left over if a thread loses its core for a while.
inline constexpr int64_t kTasksPerThread = 16;

inline int64_t task_bytes(int64_t total_bytes, int num_threads) {
  if (num_threads <= 1) return total_bytes + 1;
  return std::max(kSmallestTaskBytes, total_bytes / (num_threads * kTasksPerThread));
}

inline int64_t num_pieces(int64_t bytes, int64_t piece_bytes) {
  return std::max<int64_t>(1, (bytes + piece_bytes - 1) / piece_bytes);
}

struct Range {
  size_t owner;  // which feature, segment or table
  int64_t first, last;
};

inline int64_t count_ids(const Bags& bags) { return bags.begin(bags.num_bags) - bags.begin(0); }

// The first bag with at least `target` rows before it (one per id, and one per bag for its output).
inline int64_t bag_at(const Bags& bags, int64_t target) {
  int64_t low = 0, high = bags.num_bags;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (bags.begin(middle) - bags.begin(0) + middle < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The rows of all bags of an item and their output. view(item) is {bags, dim}.
template <class Item, class View>
int64_t bytes_of_bags(const Item& item, const View& view) {
  const auto [bags, dim] = view(item);
  return (count_ids(*bags) + bags->num_bags) * dim * static_cast<int64_t>(sizeof(float));
}

template <class Items, class View>
int64_t bytes_of_all_bags(const Items& items, const View& view) {
  int64_t total = 0;
  for (const auto& item : items) total += bytes_of_bags(item, view);
  return total;
}

// All bags of `items`, divided into ranges of about equal bytes.
template <class Items, class View>
std::vector<Range> cut_bags(const Items& items, int num_threads, const View& view) {
  const auto bytes = [&](const auto& item) { return bytes_of_bags(item, view); };
  const int64_t total = bytes_of_all_bags(items, view);
  const int64_t piece_bytes = task_bytes(total, num_threads);
  std::vector<Range> ranges;
  for (size_t f = 0; f < items.size(); ++f) {
    const Bags& bags = *view(items[f]).first;
    const int64_t pieces = num_pieces(bytes(items[f]), piece_bytes), rows = count_ids(bags) + bags.num_bags;
    int64_t first = 0;
    for (int64_t k = 1; k <= pieces; ++k) {
      const int64_t last = k == pieces ? bags.num_bags : bag_at(bags, rows / pieces * k);
      if (last > first) ranges.push_back({f, first, last});
      first = std::max(first, last);
    }
  }
  return ranges;
}

// Runs work(item, first, last) over all bags of all items; false if any call returns false.
template <class Items, class View, class Work>
bool for_all_bags(const Items& items, int num_threads, const View& view, const Work& work) {
  const std::vector<Range> ranges = cut_bags(items, num_threads, view);
  std::atomic<bool> good{true};
  parallel_for(static_cast<int64_t>(ranges.size()), num_threads, [&](int64_t task, int) {
    const Range& range = ranges[static_cast<size_t>(task)];
    if (!work(items[range.owner], range.first, range.last)) good.store(false, std::memory_order_relaxed);
  });
  return good.load();
}

// Whether the first and last offsets can be trusted for the division; the kernels check every bag.
inline bool ends_in_range(const Bags& bags) {
  return 0 <= bags.begin(0) && bags.begin(0) <= bags.begin(bags.num_bags) && bags.begin(bags.num_bags) <= bags.num_ids;
}

}  // namespace hotrow
