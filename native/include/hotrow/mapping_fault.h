// Names the rows when the system ends the process for a mapped file (SIGBUS): the file was cut short while its rows
// were copied, or its medium failed under them. Else the process would end without a word.
//
// The first mapping watched installs a handler. A fault in a watched mapping is told in one line on stderr (rows,
// table, file, cause, cure); then what handled SIGBUS before is put back, and the fault, repeated, is its own:
// faulthandler prints where it was, the system ends the process. Every other SIGBUS goes to that earlier handler as it
// came. The process ends rather than raises: the copy that was cut short lies between callers who hold locks, on any
// thread, and neither a jump out of it nor other pages in its place are promised to be safe in a signal handler.
#pragma once

#include <cstdint>
#include <string>

namespace hotrow {

// One mapping of a file whose first row lies first_row_bytes behind its begin.
struct MappedRows {
  const void* begin;
  int64_t bytes, first_row_bytes, record_bytes, num_rows;
  int fd;  // asked for its length, which tells a cut from a medium that failed
};

// Watched from construction until destruction, which comes before the memory is unmapped. Any thread may make and drop
// them, in a fork's child too.
class WatchedMapping {
 public:
  WatchedMapping(const MappedRows& rows, const std::string& table, const std::string& path);
  ~WatchedMapping();
  WatchedMapping(const WatchedMapping&) = delete;
  WatchedMapping& operator=(const WatchedMapping&) = delete;

 private:
  friend struct FaultRegistry;
  MappedRows rows_;
  std::string where_;
};

}  // namespace hotrow
