// LRU stack distances of a stream of row ids: exact, or of a sample of rows (SHARDS: Waldspurger et al., FAST 2015).
//
//   distance of an access = number of distinct rows accessed since the last access to the same row; none the first time
//   LRU cache of c rows hits an access  <=>  it has a distance, and distance < c
//
// A sampler keeps all accesses to rows with mix64(id ^ mix64(seed + 1)) <= threshold and no others, so a distance among
// them is, in expectation, the true one times the share of rows kept; the caller scales it.
//
// Each access has a bit, which is set while it is the latest access to its row; a Fenwick tree over 64-bit words counts
// the bits after a position. When the bits are used up, the set ones move to the front: O(log rows) per access, memory
// O(rows), at worst, while growing, about 40 bytes for each row seen.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

class StackDistances {
 public:
  static constexpr size_t kGaps = 128;

  StackDistances(uint64_t threshold, uint64_t seed);

  // Adds a batch of accesses in order; with `once`, each distinct row in it counts once, at its first access.
  // Throws std::bad_alloc, and std::length_error beyond 2^28 rows or 2^32 - 2 batches.
  template <class Id>
  void add(const Id* ids, size_t num_ids, bool once);

  uint64_t num_accesses() const { return num_accesses_; }  // of sampled rows, as counted
  uint64_t num_rows() const { return live_; }              // distinct sampled rows; the first access to each is cold
  uint64_t num_distinct() const { return num_distinct_; }  // sum over batches of the distinct sampled rows in each
  const std::vector<uint64_t>& histogram() const { return histogram_; }  // [d]: accesses at distance d
  const std::array<uint64_t, kGaps>& gaps() const {
    return gaps_;
  }  // [g - 1]: of num_distinct, last seen g batches ago

 private:
  struct Entry {
    uint64_t id;
    uint32_t place;
    uint32_t batch;  // of the latest access; 0: no entry here
  };

  Entry& find(uint64_t id, uint64_t hash);
  void touch(Entry& entry);
  uint64_t younger(uint32_t place) const;
  void flip(uint32_t place, uint32_t difference);
  void grow();
  void compact();

  uint64_t threshold_, salt_;
  std::vector<Entry> entries_;  // open addressing, at most half full
  std::vector<uint64_t> bits_;
  std::vector<uint32_t> tree_;  // [i]: set bits of the words (i - lowest bit of i, i], counted from 1
  uint64_t next_place_ = 0, live_ = 0;
  uint32_t batch_ = 0;
  uint64_t num_accesses_ = 0, num_distinct_ = 0;
  std::vector<uint64_t> histogram_;
  std::array<uint64_t, kGaps> gaps_{};
};

}  // namespace hotrow
