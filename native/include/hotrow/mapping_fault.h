// Names the rows when the system ends the process because of a mapped file (SIGBUS): the file was cut short while its
// rows were copied, or its medium failed. Otherwise the process would end without a message.
//
// The first watched mapping installs a handler. For a fault in a watched mapping it prints one line on stderr (rows,
// table, file, cause, cure) and restores the earlier SIGBUS handler, which gets the fault when it repeats: faulthandler
// prints where it happened, and the system ends the process. Every other SIGBUS goes to the earlier handler unchanged.
// The process ends and does not raise: the copy may be interrupted on any thread, below callers who hold locks, and
// neither a jump out of it nor mapping other pages is guaranteed to be safe in a signal handler.
#pragma once

#include <cstdint>
#include <string>

namespace hotrow {

// One mapping of a file; its first row is first_row_bytes after its begin.
struct MappedRows {
  const void* begin;
  int64_t bytes, first_row_bytes, record_bytes, num_rows;
  int fd;  // its length tells a file that was cut from a medium that failed
};

// The mapping is watched from construction until destruction, which must come before the memory is unmapped. Any thread
// may create and destroy these, also in a forked child.
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
