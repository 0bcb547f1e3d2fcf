// A log-structured store: rows that leave memory together are written next to each other, a page per I/O, wherever
// there is room. If each row had its own sector, a large table would need one I/O per row, since hardly two rows of a
// step share a page.
//
//   region   some 32,000 rows in order, and a part of the file with kPlacesPerRow times as many places, in pages
//     map    row -> place, 2 bytes
//     free   a bit for each place, and of each page how many are free
//     open   a page in memory: rows that are written take its free places. When the last is taken they are written
//            down, and the page of the region with the most free places is opened.
//
// A row that is written again frees its old place, so there is no garbage collection. With twice as many places as
// rows, the emptiest page has few rows left (about 12 of 64). It is filled up around them: its units from the first to
// the last with new rows (block_layout.h) are read, merged, and written in one I/O.
//
// A region opens its pages in order and requests disk space for several at a time: allocating each page as it is
// written takes many times as long as the write.
//
// The map lives in the memory of this process, so no other process can use the file. Rows in the open page are read
// from there. A place may be reused as soon as its row has been written elsewhere, because nobody writes a row that is
// being read (store.h).
#pragma once

#include <hotrow/block_store.h>

namespace hotrow {

inline constexpr int64_t kPlacesPerRow = 2;
inline constexpr int64_t kLeastPagePlaces = 8;
inline constexpr int64_t kReservedPages = 16;

// Whether pages of this layout fit one I/O, and hold enough records for gathering to pay off, but no more than a byte
// can count.
bool can_gather(const BlockLayout& layout);
// The number of rows of the lower store that `num_rows` rows need. The last region is complete; the file is sparse.
int64_t num_places(const BlockLayout& layout, int64_t num_rows);

// file.num_rows counts the rows of the table; its file has room for num_places. The store takes the descriptor and
// closes it. Calls take turns; one that waits for room below keeps others waiting. In a forked child every call fails.
std::unique_ptr<BlockStore> open_gathered_store(std::shared_ptr<Engine> engine, TableFile file);

}  // namespace hotrow
