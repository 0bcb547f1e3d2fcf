// What this machine allows: the plainest loops that move embedding rows, against which benchmarks state a share.
//
// They share no code with the kernels on purpose (own memory, own threads, own prefetch; no bags, no optimizer, no
// sort), so that a kernel cannot set its own limit. Everything is timed inside, from a common start of all threads to
// the last end.
#pragma once

#include <cstdint>

namespace hotrow::limits {

// Float memory on 2 MiB boundaries, backed by huge pages where the system grants them; zeroed, so every page exists.
class Buffer {
 public:
  explicit Buffer(int64_t num_floats);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data() const { return data_; }
  int64_t size() const { return num_floats_; }

 private:
  float* data_;
  int64_t num_floats_;
};

// Seconds to touch rows index[0..n) of `row_floats` floats each, in that order, cut into `threads` equal runs:
//   read:  sum += row            write:  row += constant          (rows `distance` ahead are prefetched; 0: none)
// Threads may write one row at once; the values are of no interest. Every index must lie in [0, size / row_floats).
double touch_rows(Buffer& buffer, const int64_t* index, int64_t n, int64_t row_floats, bool write, int threads,
                  int distance);

// Seconds to read `num_read` floats and then write the `num_write` after them, each in order, cut into `threads` runs.
double stream(Buffer& buffer, int64_t num_read, int64_t num_write, int threads);

}  // namespace hotrow::limits
