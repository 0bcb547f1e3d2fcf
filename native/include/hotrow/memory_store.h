// Stores that the processor addresses byte by byte: memory itself, and files mapped into it (DAX, CXL, tmpfs, any
// path). Their calls are done when they return.
#pragma once

#include <hotrow/store.h>

#include <memory>
#include <string>

namespace hotrow {

// Record r lies at r * record_bytes; pages cost nothing until they are written. In a forked child it is a copy.
// Null: no address space.
std::unique_ptr<Store> open_dram_store(int64_t record_bytes, int64_t num_rows, std::string table);

// A file of mapped_file_bytes, open for reading and writing. The store takes the descriptor and closes it.
struct MappedFile {
  int fd;
  int64_t record_bytes;
  int64_t num_rows;
  std::string table, path;  // for messages
};
int64_t mapped_file_bytes(int64_t record_bytes, int64_t num_rows);

// Null, with errno set, where the file cannot be mapped. Space is claimed before memory is written, so that a full disk
// is a failure and no signal. So is a file that was truncated, by its length before each call; one that is while a call
// copies rows, and a medium that fails under mapped memory, do end the process (SIGBUS), with the rows named on stderr:
// see mapping_fault.h. In a forked child every call fails, for the file is the other process's.
std::unique_ptr<Store> open_mapped_store(MappedFile file);

}  // namespace hotrow
