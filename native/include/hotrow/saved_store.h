// A store in front of another one, for a table that starts from saved rows. A row stays in its saved file until it is
// written, so a table of any size starts without being copied.
//
//   slots  <- read -   lower, for rows that were written here; else the saved files
//          - write ->  lower
//
// The files are those of a checkpoint (checkpoint_rows.py): links, each with the ids of its rows, rising, and the
// values of each part of a record in the same order. If several links hold a row, the last one counts. They are never
// written to. They are kept open, so they may be unlinked meanwhile, but not changed.
//
// The index of a link says where each row is in it. Per block of 65,536 rows it takes nothing if all of them are there,
// 2 bytes per row for up to 4,096 of them, else 10 KiB. The table has one more bit per row.
#pragma once

#include <hotrow/row_bits.h>
#include <hotrow/store.h>

#include <memory>
#include <string>
#include <vector>

namespace hotrow {

// An open file, which is closed with it.
struct SavedFile {
  SavedFile(int f, std::string p) : fd(f), path(std::move(p)) {}
  SavedFile(const SavedFile&) = delete;
  SavedFile& operator=(const SavedFile&) = delete;
  ~SavedFile();
  const int fd;
  const std::string path;  // for messages
};

// Values in a file, those of the first row at byte `offset`.
struct SavedValues {
  std::shared_ptr<SavedFile> file;
  int64_t offset;
};

struct SavedLink {
  int64_t num_rows;
  SavedValues ids;                 // int64
  std::vector<SavedValues> parts;  // of a record
};

// links: the oldest first; part_bytes: of the parts of a record. Adds all their rows to `rows`, a set of those of a
// table of num_rows. Null, and why, if ids cannot be read or do not rise within the table. Reads of saved rows are over
// when `read` returns. Any thread may call.
std::unique_ptr<Store> open_saved_store(std::shared_ptr<Store> lower, std::vector<SavedLink> links,
                                        std::vector<int64_t> part_bytes, std::string table, int64_t num_rows,
                                        RowBits& rows, std::string& reason);

}  // namespace hotrow
