// A cache in front of a store is itself a store: rows that leave the slots of fast memory lie in a middle tier before
// they go further down.
//
//   slots  <- read -   middle (memory, or a file mapped into it)  <-          -   lower (any store, a cached one too)
//          - write ->                                             - write ->
//
// The middle holds what was written, and keeps it until its place is needed:
//   write   lays every record into the middle. A row that has no place there takes one; the row that was in it, if the
//           lower store's image of it is older, is written down first, together with others that leave in this call.
//   read    copies rows that have a place out of the middle, and leaves them as they are: evaluations and checkpoints
//           change nothing. Others come from the lower store, straight into their slots, and take no place.
//   flush   writes down every row whose image below is older, which stays, and flushes the lower store. The middle
//           itself need not last: what it held when a process ends without a flush is lost, as in any store.
// So a row is read from below only while nothing newer lies above it; that its own write down may still wait there is
// the lower store's matter (store.h).
//
// Places are sets of 16: row r may lie in set r % sets. Rows numbered by popularity fall into them evenly, so that sets
// fill alike, and places for all rows, rounded up to 16, do hold all. Each set has a clock of its own: the next row in
// turn leaves, but one that was written again since its last turn stays once more. What is known takes 5 bytes a place,
// and one a set.
#pragma once

#include <hotrow/store.h>

#include <memory>
#include <string>

namespace hotrow {

inline constexpr int64_t kSetPlaces = 16;
inline constexpr int64_t kMostCachedRows = 0xFFFFFFFF - 1;  // of the lower store

// middle: a store of memory_store.h, whose calls are done when they return, of as many rows as it shall hold, at least
// one; nobody else uses it. Its rows are places, of which those beyond whole sets of 16 stay empty (but for a middle of
// fewer than 16, which is one set). lower: of at most kMostCachedRows rows, and of records as long. table: for
// messages. What a failure of the middle says is preceded by the rows that were on their way. Calls take turns; one
// that waits for room below keeps others waiting. In a forked child every call fails.
std::unique_ptr<Store> open_cached_store(std::shared_ptr<Store> middle, std::shared_ptr<Store> lower,
                                         std::string table);

}  // namespace hotrow
