// Counting of raw ids: how often each occurs, and in which order they first appeared.
//
//   for each key of the stream: count[key] += 1; if new: order[key] = number of keys seen before it
//
// Entries are stored in order of first appearance, so the order costs no memory; an open-addressed index of (32 bits of
// the hash, entry number) finds them. A counter that grows too large is written out as a run and emptied: a run holds
// partial counts, sorted by (hash, key bytes), and runs are merged later (encode_vocabulary.h).
//
// Run file, little-endian: RunHeader, then per key: uint64 hash, uint64 count, uint64 first [, uint32 length, bytes].
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace hotrow {

struct RunHeader {
  char magic[8];  // "hotrowrn"
  uint32_t version;
  uint32_t has_bytes;  // 1: keys are byte strings, stored; 0: the hash is one-to-one and stands for the key
  uint64_t num_keys;
  uint64_t missing_count;
  uint64_t missing_first;
  uint64_t payload_bytes;
  uint32_t payload_crc;
  uint32_t header_crc;  // of the header's bytes before it
};
static_assert(sizeof(RunHeader) == 56);
inline constexpr char kRunMagic[8] = {'h', 'o', 't', 'r', 'o', 'w', 'r', 'n'};
inline constexpr uint32_t kRunVersion = 1;
inline constexpr uint64_t kNeverMissing = ~uint64_t{0};  // missing_first if no value was missing

// Fills in magic, version and header_crc, and writes the header at the start of `fd`; returns 0 or an errno.
int write_run_header(int fd, RunHeader header);

// A growing array of plain values; realloc moves large blocks by remapping pages, so growth copies little.
template <class T>
class GrowArray {
 public:
  GrowArray() = default;
  GrowArray(const GrowArray&) = delete;
  GrowArray& operator=(const GrowArray&) = delete;
  ~GrowArray() { std::free(data_); }

  static size_t capacity_for(size_t needed, size_t capacity) {
    return needed <= capacity ? capacity : needed + needed / 4 + 16;
  }
  void reserve(size_t needed) {
    const size_t capacity = capacity_for(needed, capacity_);
    if (capacity == capacity_) return;
    void* grown = std::realloc(data_, capacity * sizeof(T));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(grown);
    capacity_ = capacity;
  }
  void append(const T* values, size_t n) {
    for (size_t i = 0; i < n; ++i) data_[size_ + i] = values[i];
    size_ += n;
  }
  void restart() { size_ = 0; }
  void clear() {
    std::free(data_);
    data_ = nullptr;
    size_ = capacity_ = 0;
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  size_t num_bytes() const { return capacity_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

// Counts rows by dictionary code, before their keys are counted:
//   for each row i with mask[i] (null: all): if counts[codes[i]]++ == 0: append codes[i] to appeared
// counts has an entry per code, all zero at first; returns how many codes appeared.
size_t count_codes(const int64_t* codes, size_t num_rows, const uint8_t* mask, uint32_t* counts, int64_t* appeared);

class Counter {
 public:
  explicit Counter(bool has_bytes, uint64_t first_order) : has_bytes_(has_bytes), order_(first_order) {}
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  ~Counter() { std::free(slots_); }

  // Counts key i counts[i] times, as if it had come so often in a row (counts null: each once). valid[i] == 0 means a
  // missing value (valid null: none is missing). bytes and offsets hold the keys if the counter has bytes, else they
  // are null. May throw std::bad_alloc, and keeps what was counted until then.
  void add(const uint64_t* hashes, size_t num_keys, const uint8_t* valid, const uint32_t* counts, const uint8_t* bytes,
           const int64_t* offsets);

  // Writes everything as one run from the start of `fd` and empties the counter; returns 0, or the errno of a failed
  // write, after which the counter is unchanged.
  int drain(int fd);

  uint64_t num_keys() const { return entries_.size(); }
  uint64_t missing_count() const { return missing_count_; }
  uint64_t order() const { return order_ + entries_.size(); }           // first-appearance number of the next new key
  size_t num_bytes() const;                                             // memory held
  size_t num_bytes_after(size_t num_keys, size_t num_key_bytes) const;  // upper limit after that many new keys
  bool has_bytes() const { return has_bytes_; }

 private:
  struct Entry {
    uint64_t hash;
    uint64_t count;
  };
  static size_t slots_for(size_t num_keys);
  bool same_key(uint32_t entry, uint64_t hash, const uint8_t* key, size_t key_bytes) const;
  bool before(uint32_t a, uint32_t b) const;
  void reserve(size_t num_more);
  void rebuild(size_t num_slots);
  void sort_slots();

  bool has_bytes_;
  uint64_t order_;  // first-appearance number of entry 0
  uint64_t missing_count_ = 0;
  uint64_t missing_first_ = kNeverMissing;
  uint64_t* slots_ = nullptr;  // upper half of the hash << 32 | entry + 1; 0 = empty
  size_t num_slots_ = 0;
  GrowArray<Entry> entries_;
  GrowArray<uint64_t> key_ends_;  // with bytes: key e ends at key_ends_[e] of arena_
  GrowArray<uint8_t> arena_;
};

}  // namespace hotrow
