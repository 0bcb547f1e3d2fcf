// Rows and positives of each value of a column, or of several columns together, in the training rows.
//
// A value is known by its 64-bit hash. A value that was never counted has zero rows, never another's. If there are more
// than max_values distinct ones, only those are counted whose hash begins with z zeros, for the least z that fits: a
// rule that depends on the set of values alone, not on their order or on how rows were divided.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

class ValueCounts {
 public:
  // strict: keeps what `before` needs to hide rows of one time from each other; such counts have one fold.
  ValueCounts(size_t num_folds, size_t max_values, bool strict);

  // Counts the rows i with counted[i], in fold folds[i] (null: 0). A count stays at 2^32 - 1.
  void add(const uint64_t* hashes, size_t num_rows, const uint8_t* labels, const uint8_t* counted,
           const uint8_t* folds);
  // Adds counts [n][num_folds][2] of values, of whose hashes the first `zeros` bits are zero.
  void put(const uint64_t* hashes, size_t n, size_t num_folds, const uint32_t* counts, size_t first_fold, int zeros);
  // out[i] = rows and positives of value i, in all folds; if own[i], in all but folds[i]. own null: in all.
  void get(const uint64_t* hashes, size_t num_rows, const uint8_t* own, const uint8_t* folds, uint32_t* out) const;
  // For each row in turn, of one fold:
  //   a training row:  out = the counts of training rows of earlier times; then it is counted. times null: of all
  //                    rows before it
  //   any other row:   out = after
  // Values that `after` leaves out are left out.
  void before(const uint64_t* hashes, size_t num_rows, const uint8_t* labels, const uint8_t* trains,
              const int64_t* times, const ValueCounts& after, uint32_t* out);
  // All values and their counts [size()][num_folds][2], by first appearance.
  void items(uint64_t* hashes, uint32_t* counts) const;

  size_t size() const { return words_.size() / stride_; }
  size_t num_folds() const { return num_folds_; }
  int zeros() const { return zeros_; }

 private:
  bool counts(uint64_t hash) const { return zeros_ == 0 || hash >> (64 - zeros_) == 0; }
  const uint32_t* find(uint64_t hash) const;  // null if it has none
  uint32_t* enter(uint64_t hash);             // null if it is left out
  void rebuild(size_t num_slots);
  void leave_out(int zeros);
  void prefetch(uint64_t hash) const;

  size_t num_folds_, max_values_, stride_;
  int zeros_ = 0;
  std::vector<uint64_t> slots_;  // upper half of the hash << 32 | entry + 1; 0 = empty
  std::vector<uint32_t> words_;  // by entry: hash (2), counts (2 per fold), of strict ones rows, positives, time (2)
};

}  // namespace hotrow
