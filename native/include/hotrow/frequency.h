// How often rows were used lately, also rows that are not resident: a count-min sketch (Cormode and Muthukrishnan 2005)
// whose counters are halved now and then, as in TinyLFU (Einziger, Friedman, Manes 2017).
//
//   words         one of 64 bits for every two slots of the cache: 4 bytes per slot; 16 counters of 4 bits
//   counters      of a row: word (h >> 32) * num_words >> 32, h = mix64(row), and of its four groups of four counters g
//                 the one of number h >> 2g & 3; all four in one word, so that a row costs one access to memory
//   estimate(r)   the least of its four
//   count(r)      adds 1 to those of its four that are the least, unless they are 15; after 8 calls for each slot all
//                 counters of all rows are halved
//
// Before the first halving an estimate is never below the uses of its row, or 15. The result depends on the order of
// the calls alone. sketch.h, which finds hot rows, also keeps which rows they are: 8 bytes for each row with a count.
#pragma once

#include <hotrow/encode_hash.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hotrow {

class Frequencies {
 public:
  explicit Frequencies(int64_t num_places)
      : words_(static_cast<size_t>(std::max<int64_t>((num_places + 1) / 2, 1))),
        halving_(kHalving * std::max<int64_t>(num_places, 1)) {}

  void prefetch(uint32_t row) const { __builtin_prefetch(&words_[word_of(mix64(row))]); }

  uint32_t estimate(uint32_t row) const {
    const uint64_t h = mix64(row);
    return least(words_[word_of(h)], h);
  }

  void count(uint32_t row) {
    const uint64_t h = mix64(row);
    uint64_t& word = words_[word_of(h)];
    const uint32_t before = least(word, h);
    for (int g = 0; g < 4 && before < kMost; ++g) {
      const int at = shift(h, g);
      if ((word >> at & kMost) == before) word += uint64_t{1} << at;
    }
    if (++num_counted_ < halving_) return;
    num_counted_ = 0;
    for (uint64_t& each : words_) each = each >> 1 & 0x7777777777777777u;
  }

  int64_t num_bytes() const { return static_cast<int64_t>(words_.capacity() * sizeof(words_[0])); }

 private:
  static constexpr uint32_t kMost = 15;
  static constexpr int64_t kHalving = 8;

  size_t word_of(uint64_t h) const { return static_cast<size_t>((h >> 32) * words_.size() >> 32); }
  static int shift(uint64_t h, int g) { return 16 * g + 4 * static_cast<int>(h >> (2 * g) & 3); }
  static uint32_t least(uint64_t word, uint64_t h) {
    uint32_t least = kMost;
    for (int g = 0; g < 4; ++g) least = std::min(least, static_cast<uint32_t>(word >> shift(h, g)) & kMost);
    return least;
  }

  std::vector<uint64_t> words_;
  int64_t halving_, num_counted_ = 0;
};

}  // namespace hotrow
