// Stores in byte-addressable memory: DRAM, and mapped files (DAX, CXL, tmpfs, any path). Their calls are complete when
// they return.
#pragma once

#include <hotrow/store.h>

#include <memory>
#include <string>

namespace hotrow {

// Record r is at r * record_bytes; pages cost nothing until they are written. A forked child has a copy. Null if there
// is no address space.
std::unique_ptr<Store> open_dram_store(int64_t record_bytes, int64_t num_rows, std::string table);

// A file of mapped_file_bytes, open for reading and writing. The store takes the descriptor and closes it.
struct MappedFile {
  int fd;
  int64_t record_bytes;
  int64_t num_rows;
  std::string table, path;  // for messages
};
int64_t mapped_file_bytes(int64_t record_bytes, int64_t num_rows);

// Null, with errno set, if the file cannot be mapped. Space is claimed before memory is written, so that a full disk is
// a failure and not a signal. A truncated file is a failure too: its length is checked before each call. A file that is
// truncated while a call copies rows, or a medium that fails under mapped memory, ends the process (SIGBUS) with the
// rows named on stderr; see mapping_fault.h. In a forked child every call fails, because the file belongs to its
// parent.
std::unique_ptr<Store> open_mapped_store(MappedFile file);

}  // namespace hotrow
