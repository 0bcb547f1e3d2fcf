// Which accesses in a stream hit a cache of `capacity` rows: the cache of training (LRU), and the best possible one.
//
//   lru      admits every row that is accessed; the row accessed longest ago leaves
//   belady   knows the future (Belady's MIN) and may refuse a row: it keeps the rows that are accessed again soonest.
//   No
//            cache of the same size that loads a row when it is accessed has more hits
//
// Both start empty, so the first access to a row misses.
//
// rows: [n] numbers below num_rows, n < 2^32 - 1; hits: [n], 1 or 0. Throws std::bad_alloc. Memory besides the arrays:
// lru 9 bytes for each of num_rows; belady 5 for each of num_rows, 4 for each access and 8 for each of capacity.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

void lru_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits);
void belady_hits(const uint32_t* rows, size_t n, size_t num_rows, size_t capacity, uint8_t* hits);

}  // namespace hotrow
