// Hits of LRU and of the best cache; see optimum.h.
#include "hotrow/optimum.h"

#include <algorithm>
#include <vector>

namespace hotrow {

namespace {
constexpr uint32_t kNever = 0xffffffff;
constexpr size_t kFewEntries = 1024;  // a heap of fewer entries is not worth cleaning
}  // namespace

// A ring of the cached rows: after[ring] is the row accessed last, before[ring] the one accessed longest ago.
void lru_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits) {
  const auto ring = static_cast<uint32_t>(num_rows);
  std::vector<uint32_t> before(num_rows + 1), after(num_rows + 1);
  std::vector<uint8_t> cached(num_rows);
  before[ring] = after[ring] = ring;
  const auto take_out = [&](uint32_t row) {
    after[before[row]] = after[row];
    before[after[row]] = before[row];
  };
  size_t size = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t row = rows[i];
    hits[i] = cached[row];
    if (capacity == 0) continue;
    if (cached[row]) {
      take_out(row);
    } else if (size == capacity) {
      cached[before[ring]] = 0;
      take_out(before[ring]);
    } else {
      ++size;
    }
    cached[row] = 1;
    before[row] = ring;
    after[row] = after[ring];
    before[after[ring]] = row;
    after[ring] = row;
  }
}

void belady_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits) {
  std::vector<uint32_t> next_use(n);               // the next access to the same row, for each access
  std::vector<uint32_t> use_of(num_rows, kNever);  // the next access to each row
  for (size_t i = n; i-- > 0;) {
    next_use[i] = use_of[rows[i]];
    use_of[rows[i]] = static_cast<uint32_t>(i);
  }
  // An access identifies its row. The heap holds next accesses to cached rows, farthest first, and some outdated ones.
  std::vector<uint8_t> cached(num_rows);
  std::vector<uint32_t> heap;
  size_t size = 0;
  const auto holds = [&](uint32_t use) { return cached[rows[use]] && use_of[rows[use]] == use; };
  const auto pop = [&] {
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
  };
  for (size_t i = 0; i < n; ++i) {
    const uint32_t row = rows[i], next = next_use[i];
    hits[i] = cached[row];
    use_of[row] = next;
    if (cached[row] && next == kNever) {
      cached[row] = 0;
      --size;
    }
    if (next == kNever) continue;
    if (!cached[row]) {
      if (size == capacity) {
        while (!heap.empty() && !holds(heap.front())) pop();
        if (heap.empty() || heap.front() < next) continue;  // refused
        cached[rows[heap.front()]] = 0;
        pop();
      } else {
        ++size;
      }
      cached[row] = 1;
    }
    heap.push_back(next);
    std::push_heap(heap.begin(), heap.end());
    if (heap.size() > 2 * size + kFewEntries) {
      std::erase_if(heap, [&](uint32_t use) { return !holds(use); });
      std::make_heap(heap.begin(), heap.end());
    }
  }
}

}  // namespace hotrow
