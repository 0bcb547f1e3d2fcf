// Rows that leave memory together come to lie together on disk: a row has no place of its own in the file, it is
// written beside the others that leave, a page in one I/O. Written each to its own sector, rows of a large table would
// take an I/O each, since hardly two of a step lie in one page.
//
//   region   some 32,000 rows in order, and a part of the file with kPlacesPerRow times as many places, in pages
//     map    row -> place, 2 bytes
//     free   a bit for each place, and of each page how many are free
//     open   a page in memory: rows that are written take its free places. When the last is taken they are written
//            down, and the page of the region with the most free places is opened.
//
// What a row that is written again leaves is a free place, no garbage to collect: the emptiest page has few rows left
// where there are twice as many places as rows (of 64, some 12), and is filled up around them: it is read first, from
// the first to the last unit (block_layout.h) that has new rows, and written in one I/O.
//
// A region opens its pages in order, and asks the file system for room for some of them at once: to find room for each
// as it is written would take many times as long as to write it.
//
// The map is memory of this process, and so the file means nothing to another one. Reads of rows that lie in the open
// page are served from there. A place is used again as soon as its row was written elsewhere, since a row that is being
// read must not be written (store.h).
#pragma once

#include <hotrow/block_store.h>

namespace hotrow {

inline constexpr int64_t kPlacesPerRow = 2;
inline constexpr int64_t kLeastPagePlaces = 8;
inline constexpr int64_t kReservedPages = 16;

// Whether pages of the layout are no larger than an I/O may be, and hold as many records as make gathering worth its
// while, and as can be counted.
bool can_gather(const BlockLayout& layout);
// Of the lower store, for so many rows. The last region has all of its places, of a sparse file.
int64_t num_places(const BlockLayout& layout, int64_t num_rows);

// file.num_rows: of the table, as everywhere; its file has num_places. The store takes the descriptor and closes it.
// Calls take turns; one that waits for room below keeps others waiting. In a forked child every call fails.
std::unique_ptr<BlockStore> open_gathered_store(std::shared_ptr<Engine> engine, TableFile file);

}  // namespace hotrow
