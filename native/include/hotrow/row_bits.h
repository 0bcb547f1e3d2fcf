// A set of a table's rows: a bit for each.
#pragma once

#include <hotrow/types.h>

#include <bit>
#include <cstddef>
#include <vector>

namespace hotrow {

class RowBits {
 public:
  explicit RowBits(int64_t num_rows) : words_(static_cast<std::size_t>(num_rows + 63) / 64) {}

  bool has(uint32_t row) const { return words_[row / 64] >> (row % 64) & 1; }
  // Prefetches the bit of a row.
  void fetch(uint32_t row) const { __builtin_prefetch(&words_[row / 64]); }
  void add(uint32_t row) { words_[row / 64] |= uint64_t{1} << (row % 64); }
  void clear() { words_.assign(words_.size(), 0); }
  int64_t count() const {
    int64_t n = 0;
    for (const uint64_t word : words_) n += std::popcount(word);
    return n;
  }
  // The first `most` rows from `first` on, in rising order; fewer if there are no more.
  std::vector<int64_t> rows(int64_t first, int64_t most) const {
    std::vector<int64_t> found;
    uint64_t mask = ~uint64_t{0} << (first % 64);
    for (auto at = static_cast<std::size_t>(first) / 64; at < words_.size(); ++at, mask = ~uint64_t{0}) {
      for (uint64_t word = words_[at] & mask; word != 0; word &= word - 1) {
        if (static_cast<int64_t>(found.size()) == most) return found;
        found.push_back(static_cast<int64_t>(at) * 64 + std::countr_zero(word));
      }
    }
    return found;
  }
  int64_t num_bytes() const { return static_cast<int64_t>(words_.size() * sizeof(words_[0])); }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace hotrow
