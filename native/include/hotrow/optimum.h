// Which accesses of a stream a cache of so many rows hits: the cache that training has (LRU), and the best there can
// be.
//
//   lru      every row accessed is admitted, the one accessed longest ago leaves
//   belady   knows the future (Belady's MIN) and may refuse a row: of those at hand it keeps the ones accessed again
//            soonest. No cache of as many rows that loads a row when it is accessed hits more
//
// Both start empty, so every row's first access misses.
//
// rows: [n] numbers below num_rows, n < 2^32 - 1; hits: [n], 1 or 0. Throws std::bad_alloc. Memory beside the arrays:
// lru 9 bytes for each of num_rows; belady 5, 4 for each access and 8 for each of capacity.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

void lru_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits);
void belady_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits);

}  // namespace hotrow
