// Finds the rows with most accesses in one pass and fixed memory: Misra and Gries' counters (1982) in buckets of four,
// as CAFE's HotSketch (Zhang et al., SIGMOD 2024) does with SpaceSaving's: one bucket to look in, and nothing to sort.
//
//   slot    key in the upper 40 bits, score in the lower 24, which saturates; 0: empty (keys start at 1)
//   add(k): bucket = upper 32 bits of mix64(k ^ mix64(seed + 1)), times num_buckets, over 2^32
//           a slot of the bucket has k:          its score + 1
//           else the least score, of the first slot that has it, is at most 1 (an empty one has 0): that slot goes,
//           later ones move up, (k, 1) becomes the last: of rows seen once, the one seen longest ago goes
//           else:                                the least score - 1, in the first slot that has it
//
// A score is never above the number of accesses of its key. A new key lowers the least score, so rows accessed once,
// which are most of a real stream, wear down the bucket's least score and not the others; with SpaceSaving, new keys
// inherit that score and push one another up. The result depends on the order of the keys alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

constexpr size_t kSketchSlots = 4;
constexpr uint64_t kSketchScore = (uint64_t{1} << 24) - 1;

// slots: [num_buckets, 4]; 1 <= num_buckets < 2^32. The key of an id is first_key + id, from 1 to 2^40 - 1. Id 0, which
// all rare ids of a table share and which is hot anyway, is skipped.
template <class Id>
void sketch_add(uint64_t* slots, size_t num_buckets, uint64_t seed, uint64_t first_key, const Id* ids, size_t num_ids);

}  // namespace hotrow
