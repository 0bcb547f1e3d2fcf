// Where records are in a file that is read and written in whole sectors.
//
//   unit   the smallest write: one sector that several records share, or the whole sectors of one record
//   page   the largest read or write: 4 KiB of units, or one larger unit; no unit crosses a page
//
//   file:  header | page 0: unit 0, unit 1, ..., padding | page 1: ... | tail
//   Nothing is ever written to the tail, so a file that was cut short stays too short whatever rows are written later.
//   Records of less than half a sector share sectors and never cross one: writing a record means reading its
//   neighbours. Larger records have their own sectors, so that no write has to read first. Packed, if neighbours are
//   written together (gathered_store.h): records of exactly half a sector share one too, pages are larger, and units
//   between written units of a page are read and written with them, because one I/O costs less than two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace hotrow {

inline constexpr int64_t kPageBytes = 4096;
inline constexpr int64_t kPackedPageBytes = 16384;      // of records, and at most kMostPackedRows
inline constexpr int64_t kMostPackedPageBytes = 20480;  // eight units of five sectors
inline constexpr int64_t kMostPackedRows = 255;         // so that a byte can count them
inline constexpr int64_t kHeaderBytes = 4096;
inline constexpr int64_t kTailBytes = 4096;

struct BlockLayout {
  int64_t record_bytes;
  int64_t unit_bytes;
  int64_t unit_rows;
  int64_t page_bytes;
  int64_t page_units;
  bool packed;
  int64_t sector;

  // sector: a power of two, at most a page.
  static BlockLayout of(int64_t record_bytes, int64_t sector, bool packed) {
    const bool shared = 2 * record_bytes < sector + packed;
    const int64_t unit = shared ? sector : (record_bytes + sector - 1) / sector * sector;
    const int64_t unit_rows = shared ? sector / record_bytes : 1;
    if (!packed) {
      const int64_t page = std::max(unit, kPageBytes);
      return {record_bytes, unit, unit_rows, page, page / unit, packed, sector};
    }
    // Whole blocks of a file system, however many sectors a unit has: on the first write to a part of a block, a file
    // system fills the rest with zeros and blocks all other writes to the file meanwhile.
    const int64_t least = std::lcm(unit, kPageBytes);
    int64_t page = std::max(least, kPackedPageBytes / least * least);
    while (page > least && page / unit * unit_rows > kMostPackedRows) page /= 2;
    return {record_bytes, unit, unit_rows, page, page / unit, packed, sector};
  }
  int64_t unit_of(int64_t row) const { return row / unit_rows; }
  int64_t page_of(int64_t unit) const { return unit / page_units; }
  // Whether two units are written in one I/O, with the units between them.
  bool joins(int64_t unit, int64_t later) const { return packed && page_of(unit) == page_of(later); }
  int64_t place_in_unit(int64_t row) const { return row % unit_rows * record_bytes; }
  int64_t offset_of(int64_t unit) const {
    return kHeaderBytes + unit / page_units * page_bytes + unit % page_units * unit_bytes;
  }
  int64_t page_rows() const { return page_units * unit_rows; }
  // Whole blocks of the file system: growing a file that ends within a block would write that block through the page
  // cache while its rows are written directly, and the system takes that for a lost write (EIO at the next fsync).
  int64_t file_bytes(int64_t num_rows) const {
    const int64_t end = kHeaderBytes + (num_rows + page_rows() - 1) / page_rows() * page_bytes;
    return (end + kPageBytes - 1) / kPageBytes * kPageBytes + kTailBytes;
  }
};

}  // namespace hotrow
