// Tables in files that are read and written past the page cache, in whole sectors, many at a time.
#pragma once

#include <hotrow/block_layout.h>
#include <hotrow/store.h>

#include <memory>
#include <string>

namespace hotrow {

struct EngineOptions {
  bool ring;        // io_uring; else a pool of threads
  int depth;        // I/Os under way together
  int num_threads;  // of the pool
  // Of memory for what waits to be written, all tables together, and for buffers; where it is full, Store::write waits.
  // I/Os of more than a page of 4 KiB come on top while they are under way: as many as take `depth` such pages, and
  // larger units.
  int64_t most_waiting_bytes;
};

// What does the I/O of any number of tables: one thread that sleeps in the kernel when there is nothing to do, and
// runs no OpenMP region. It lives as long as somebody, or a store, holds it.
class Engine;

// Null, and the reason, where io_uring or any thread is refused; an engine, and the reason, where it has fewer threads.
std::shared_ptr<Engine> start_engine(const EngineOptions& options, std::string& reason);

// What the rows of a file are called that are another table's by other numbers. Any thread may ask, at any time.
class RowNames {
 public:
  virtual ~RowNames() = default;
  // Of rows first to last, such as "rows 3 to 9".
  virtual std::string text(int64_t first, int64_t last) const = 0;
};

// A file of layout.file_bytes(num_rows), open for reading and writing, aligned as the layout's sectors where it
// was opened with O_DIRECT. The store takes the descriptor and closes it.
struct TableFile {
  int fd;
  BlockLayout layout;
  int64_t num_rows;
  std::string table, path;                // for messages
  std::shared_ptr<const RowNames> names;  // likewise; null: rows are called by their numbers
};

// A store whose I/Os can be made to fail, for tests: the `after`-th write (or read) from now ends with -error.
class BlockStore : public Store {
 public:
  virtual void inject(bool write, int64_t after, int error) = 0;
};

// A forked child has no engine: there, every call fails.
std::unique_ptr<BlockStore> open_block_store(std::shared_ptr<Engine> engine, TableFile file);

}  // namespace hotrow
