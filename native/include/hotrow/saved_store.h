// A store before another one, for a table that begins with rows which were saved: they stay in their files until they
// are written to, so that a table of any size begins without a copy of it.
//
//   slots  <- read -   lower, for rows that were written here; else the saved files
//          - write ->  lower
//
// The files are those of a checkpoint (checkpoint_rows.py): links, each with the ids of its rows, rising, and the
// values of each part of a record in the same order. If several links hold a row, the last one counts. Nothing is ever
// written to them. They are held open, so their names may go meanwhile; their bytes must stay.
//
// What is known of a link is where each row lies in it: nothing for 65,536 neighbours that are all there, 2 bytes a row
// for up to 4,096 of them, 10 KiB for more. Beside that there is a bit for each row of the table.
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
