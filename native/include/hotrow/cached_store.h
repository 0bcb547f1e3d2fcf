// A cache in front of a store is itself a store: rows evicted from the slots of fast memory stay in a middle tier
// before they are written to the store below.
//
//   slots  <- read -   middle (memory, or a file mapped into it)  <-          -   lower (any store, a cached one too)
//          - write ->                                             - write ->
//
// The middle holds rows that were written, each until its place is needed:
//   write   lays every record into the middle. A row that has no place there takes one; the row that was in it, if the
//           lower store's image of it is older, is written down first, together with others that leave in this call.
//   read    copies rows that have a place out of the middle, and leaves them as they are: evaluations and checkpoints
//           change nothing. Others come from the lower store, straight into their slots, and take no place.
//   flush   writes down every row whose image below is older, which stays, and flushes the lower store. The middle
//           itself need not last: what it held when a process ends without a flush is lost, as in any store.
// So a row is read from below only if nothing newer is above it. If its last write is still queued below, the lower
// store serves the read from there (store.h).
//
// The cache is set-associative, with 16 places per set: row r belongs to set r % num_sets. Rows are numbered by
// popularity, so sets fill evenly, and a middle with places for all rows, rounded up to 16, does hold all of them. Each
// set evicts by CLOCK: the next row in turn leaves, unless it was written again since its last turn. The index takes 5
// bytes per place and one per set.
#pragma once

#include <hotrow/store.h>

#include <memory>
#include <string>

namespace hotrow {

inline constexpr int64_t kSetPlaces = 16;
inline constexpr int64_t kMostCachedRows = 0xFFFFFFFF - 1;  // of the lower store

// middle: a store of memory_store.h, whose calls are complete when they return, with a row per place, at least one;
// nobody else uses it. Places beyond whole sets of 16 stay empty, but a middle of fewer than 16 is one set. lower: at
// most kMostCachedRows rows, with records of the same length. table: for messages, which also name the rows in transit
// if the middle fails. Calls run one at a time; one that is blocked by the lower store blocks the others. In a forked
// child every call fails.
std::unique_ptr<Store> open_cached_store(std::shared_ptr<Store> middle, std::shared_ptr<Store> lower,
                                         std::string table);

}  // namespace hotrow
