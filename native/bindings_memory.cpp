// Stores as Python objects, and the checks whether a block store can run here; see bindings_ops.cpp for the rules.
#include <hotrow/block_store.h>
#include <hotrow/cached_store.h>
#include <hotrow/gathered_store.h>
#include <hotrow/io_queue.h>
#include <hotrow/memory_store.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __linux__
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#endif

#include <cerrno>
#include <cstdlib>
#include <optional>
#include <span>
#include <utility>

#include "bindings.h"
#include "engine.h"

using namespace hotrow;

namespace {

std::vector<Move> moves_of(const Store& store, const Records& records, const In<int64_t>& rows,
                           const In<int64_t>& slots) {
  require(size(rows) == size(slots), "rows and slots differ in number");
  require(size(rows) == 0 || records.slots.record_bytes() == store.record_bytes(),
          "the arrays' parts together are not as long as a record");
  std::vector<Move> moves(rows.size());
  const int64_t num_rows = store.num_rows();
  for (size_t i = 0; i < moves.size(); ++i) {
    moves[i] = {rows.data()[i], slots.data()[i]};
    require(0 <= moves[i].row && moves[i].row < num_rows, "row out of range");
    require(0 <= moves[i].slot && moves[i].slot < records.num_slots, "slot out of range");
  }
  return moves;
}

// A read in flight. It keeps the memory that it writes to alive.
struct Reading {
  Reading(std::shared_ptr<Store> s, std::shared_ptr<Records> r) : store(std::move(s)), records(std::move(r)) {}
  ~Reading() {
    if (getpid() != process) return;  // a forked child does not have the thread that reads
    nb::gil_scoped_release release;
    ticket.wait();
  }
  // In a forked child the store says that it belongs to another process, and has failed from then on.
  bool wait() { return getpid() == process || ticket.finished() ? ticket.wait() : store->flush(); }
  std::shared_ptr<Store> store;
  std::shared_ptr<Records> records;
  Ticket ticket;
  const pid_t process = getpid();
};

std::unique_ptr<Reading> bind_read(std::shared_ptr<Store> store, const In<int64_t>& rows, const In<int64_t>& slots,
                                   std::shared_ptr<Records> records) {
  const std::vector<Move> moves = moves_of(*store, *records, rows, slots);
  auto reading = std::make_unique<Reading>(store, std::move(records));
  nb::gil_scoped_release release;
  PendingReads call(reading->ticket, 1);
  const bool good = fail_store_on_throw(*store, [&] {
    store->read(moves, reading->records->slots, reading->ticket);
    return true;
  });
  if (good) call.done();
  return reading;
}

void bind_write(Store& store, const In<int64_t>& rows, const In<int64_t>& slots, const Records& records) {
  const std::vector<Move> moves = moves_of(store, records, rows, slots);
  nb::gil_scoped_release release;
  fail_store_on_throw(store, [&] {
    store.write(moves, records.slots);
    return true;
  });
}

nb::dict counters_of(const Store& store) {
  const StoreCounters c = store.counters();
  nb::dict d;
  d["reads"] = c.reads;
  d["read_rows"] = c.read_rows;
  d["read_bytes"] = c.read_bytes;
  d["writes"] = c.writes;
  d["written_rows"] = c.written_rows;
  d["written_bytes"] = c.written_bytes;
  d["served_from_queue"] = c.served_from_queue;
  d["read_modify_writes"] = c.read_modify_writes;
  d["blocked_ns"] = c.blocked_ns;
  d["waiting_bytes"] = c.waiting_bytes;
  d["io_cpu_ns"] = c.io_cpu_ns;
  d["middle_hits"] = c.middle_hits;
  d["middle_rows"] = c.middle_rows;
  d["middle_read_bytes"] = c.middle_read_bytes;
  d["middle_written_bytes"] = c.middle_written_bytes;
  d["middle_map_bytes"] = c.middle_map_bytes;
  d["places_bytes"] = c.places_bytes;
  d["held_bytes"] = c.held_bytes;
  d["saved_rows"] = c.saved_rows;
  d["saved_index_bytes"] = c.saved_index_bytes;
  return d;
}

// Returns (engine or None, reason). The reason is empty unless the engine is missing or has fewer threads than asked
// for.
std::pair<std::shared_ptr<Engine>, std::string> bind_start_engine(bool ring, int depth, int num_threads,
                                                                  int64_t most_waiting_bytes) {
  require(1 <= depth && depth <= 4096, "depth must be in [1, 4096]");
  require(1 <= num_threads && num_threads <= 1024, "num_threads must be in [1, 1024]");
  require(most_waiting_bytes >= 0, "negative most_waiting_bytes");
  std::string reason;
  nb::gil_scoped_release release;
  auto engine = start_engine({ring, depth, num_threads, most_waiting_bytes}, reason);
  return {std::move(engine), std::move(reason)};
}

// Refuses tables whose size in bytes, with room for rounding, does not fit 63 bits.
void check_sizes(int64_t record_bytes, int64_t num_rows) {
  require(record_bytes >= 1 && record_bytes <= (1 << 30), "record_bytes must be in [1, 2^30]");
  require(num_rows >= 0 && num_rows <= (int64_t{1} << 50) / record_bytes, "num_rows is negative or beyond 2^50 bytes");
}

std::shared_ptr<BlockStore> bind_open_block(std::shared_ptr<Engine> engine, int fd, int64_t record_bytes,
                                            int64_t sector, int64_t num_rows, std::string table, std::string path,
                                            bool gathered) {
  require(512 <= sector && sector <= kPageBytes && (sector & (sector - 1)) == 0, "sector must be 512 to 4096 bytes");
  check_sizes(record_bytes, num_rows);
  const BlockLayout layout = BlockLayout::of(record_bytes, sector, gathered);
  require(!gathered || can_gather(layout), "records too long or too short to be gathered");
  nb::gil_scoped_release release;
  const auto open = gathered ? open_gathered_store : open_block_store;
  return open(std::move(engine), {fd, layout, num_rows, std::move(table), std::move(path), nullptr});
}

std::shared_ptr<Store> bind_open_mapped(int fd, int64_t record_bytes, int64_t num_rows, std::string table,
                                        std::string path) {
  check_sizes(record_bytes, num_rows);
  auto store = open_mapped_store({fd, record_bytes, num_rows, std::move(table), std::move(path)});
  if (!store) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return store;
}

std::shared_ptr<Store> bind_open_dram(int64_t record_bytes, int64_t num_rows, std::string table) {
  check_sizes(record_bytes, num_rows);
  auto store = open_dram_store(record_bytes, num_rows, std::move(table));
  if (!store) throw std::bad_alloc();
  return store;
}

std::shared_ptr<Store> bind_open_cached(std::shared_ptr<Store> middle, std::shared_ptr<Store> lower,
                                        std::string table) {
  require(middle->record_bytes() == lower->record_bytes(), "the records of middle and lower differ in length");
  require(middle->num_rows() >= 1, "the middle must hold a row");
  require(lower->num_rows() <= kMostCachedRows, "the lower store has more rows than a tier before it can name");
  return open_cached_store(std::move(middle), std::move(lower), std::move(table));
}

// (unit_bytes, unit_rows, page_bytes, page_units, file_bytes) of the file of a block store or of a gathered store; for
// the latter it is empty if its records cannot be gathered.
std::vector<int64_t> bind_block_layout(int64_t record_bytes, int64_t sector, int64_t num_rows, bool gathered) {
  const BlockLayout layout = BlockLayout::of(record_bytes, sector, gathered);
  if (gathered && !can_gather(layout)) return {};
  return {layout.unit_bytes, layout.unit_rows, layout.page_bytes, layout.page_units,
          layout.file_bytes(gathered ? num_places(layout, num_rows) : num_rows)};
}

// The sector size that direct I/O on this file needs: 0 if the file system refuses it, -1 if it does not say.
int direct_sector(int fd) {
#if defined(__linux__) && defined(STATX_DIOALIGN)
  struct statx facts{};
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 && (facts.stx_mask & STATX_DIOALIGN)) {
    return static_cast<int>(facts.stx_dio_offset_align);
  }
#endif
  (void)fd;
  return -1;
}

// Makes one real read of `bytes` at the start of the file, into page-aligned memory; returns 0 or an errno.
int try_read(int fd, int64_t bytes) {
  void* page = std::aligned_alloc(kPageBytes, kPageBytes);
  if (!page) return ENOMEM;
  const ssize_t moved = pread(fd, page, static_cast<size_t>(std::min(bytes, kPageBytes)), 0);
  const int error = moved < 0 ? errno : 0;
  std::free(page);
  return error;
}

// Starts readahead for rows of a mapped file, so that the disk reads them in parallel and not one page fault after
// another. Rows below `first` are in memory. Only a hint: its failure costs time, nothing else.
void ask_for_rows(int fd, int64_t begin, int64_t row_bytes, const In<int64_t>& rows, int64_t first) {
#if defined(POSIX_FADV_WILLNEED)
  int64_t last = -1;  // ids that a request's rows share come one after another
  for (const int64_t row : std::span(rows.data(), rows.size())) {
    if (row < first || row == last) continue;
    last = row;
    posix_fadvise(fd, static_cast<off_t>(begin + row * row_bytes), static_cast<off_t>(row_bytes), POSIX_FADV_WILLNEED);
  }
#endif
}

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<Engine>(m, "Engine").def("num_bytes", &Engine::num_bytes).def("blocked_ns", [](Engine& engine) {
    return engine.write_buffer().blocked_ns();
  });
  nb::class_<Records>(m, "Records").def(nb::init<std::vector<Memory>>(), nb::arg().noconvert());
  nb::class_<Reading>(m, "Reading")
      .def("finished", [](const Reading& reading) { return reading.ticket.finished(); })
      .def("wait", &Reading::wait, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Store>(m, "Store")
      .def("read", bind_read)
      .def("write", bind_write)
      .def(
          "flush", [](Store& store) { return fail_store_on_throw(store, [&] { return store.flush(); }); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("fail", &Store::fail)
      .def("failure", [](const Store& store) { return store.failure() ? store.failure()->what : std::string(); })
      .def("counters", counters_of)
      .def("record_bytes", &Store::record_bytes)
      .def("num_rows", &Store::num_rows);
  nb::class_<BlockStore, Store>(m, "BlockStore").def("inject", &BlockStore::inject);
  m.def("start_engine", bind_start_engine);
  m.def("open_block_store", bind_open_block);
  m.def("open_mapped_store", bind_open_mapped);
  m.def("open_dram_store", bind_open_dram);
  m.def("open_cached_store", bind_open_cached);
  m.def("mapped_file_bytes", mapped_file_bytes);
  m.def("block_layout", bind_block_layout);
  m.def("direct_sector", direct_sector);
  m.def("try_read", try_read);
  m.def("ask_for_rows", ask_for_rows, nb::call_guard<nb::gil_scoped_release>());
}
