// Tables in files that are read and written without the page cache, in whole sectors, many at a time.
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
  // Limit of the memory for what waits to be written, in all tables, and for buffers; when it is full, Store::write
  // waits. I/Os of more than a page of 4 KiB are extra while they are under way: of packed pages a quarter of `depth`,
  // of kMostPackedPageBytes each, and larger units.
  int64_t most_waiting_bytes;
};

// Does the I/O of any number of tables: one thread, which sleeps in the kernel when there is nothing to do and runs no
// OpenMP region. It lives as long as a caller or a store holds it.
class Engine;

// Returns null, and the reason, if io_uring or all threads are refused. Also sets the reason if there are fewer
// threads.
std::shared_ptr<Engine> start_engine(const EngineOptions& options, std::string& reason);

// How messages name the rows of a file whose rows are numbered differently from the table's. Any thread may call.
class RowNames {
 public:
  virtual ~RowNames() = default;
  // The name of rows first to last, such as "rows 3 to 9".
  virtual std::string text(int64_t first, int64_t last) const = 0;
};

// A file of layout.file_bytes(num_rows), open for reading and writing; with O_DIRECT the layout's sectors must fit its
// alignment. The store takes the descriptor and closes it.
struct TableFile {
  int fd;
  BlockLayout layout;
  int64_t num_rows;
  std::string table, path;                // for messages
  std::shared_ptr<const RowNames> names;  // for messages; null: rows are named by their numbers
};

// A store whose I/Os can be made to fail in tests: the `after`-th write (or read) from now ends with -error.
class BlockStore : public Store {
 public:
  virtual void inject(bool write, int64_t after, int error) = 0;
};

// A forked child has no engine, so every call fails there.
std::unique_ptr<BlockStore> open_block_store(std::shared_ptr<Engine> engine, TableFile file);

}  // namespace hotrow
