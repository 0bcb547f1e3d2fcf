// Which accesses of a stream a cache of so many rows hits: the cache that training has (LRU), and the best there can
// be.
//
//   lru      starts empty; every row accessed is admitted, the one accessed longest ago leaves
//   belady   knows the future (Belady's MIN), may refuse a row, and starts with the rows it wants: of all rows at hand
//            it keeps those accessed again soonest. No cache of as many rows hits more accesses, a fixed set of rows
//            neither
//
// rows: [n] numbers below num_rows, n < 2^32 - 1; hits: [n], 1 or 0. Throws std::bad_alloc. Memory beside the arrays:
// lru 9 bytes for each of num_rows; belady 5, and 4 for each access and for each of 2 capacity rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

void lru_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits);
void belady_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits);

}  // namespace hotrow
