// The machine's own limit on random row access.
#pragma once

#include <cstdint>

namespace hotrow {

struct RowPass {
  char* rows;  // row i starts at rows + i * row_bytes; row_bytes a multiple of 8
  int64_t row_bytes;
  const int64_t* ids;  // in range: not checked
  int64_t num_ids;
  int64_t distance;  // rows to prefetch ahead; 0: none
  bool into_l2;      // prefetch into L2; else into L1
  bool write;        // also writes one word of every cache line back, incremented
};

// Loads one word of every cache line of rows[ids[i]] for all i; each thread takes pieces of ids. Returns the seconds
// that it took.
double touch_rows(const RowPass& pass, int num_threads);

}  // namespace hotrow
