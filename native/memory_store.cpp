// See hotrow/memory_store.h.
#include <fcntl.h>
#include <hotrow/block_layout.h>
#include <hotrow/mapping_fault.h>
#include <hotrow/memory_store.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

namespace hotrow {
namespace {

constexpr int64_t kChunkBytes =
    1 << 16;  // claimed in a file at a time: one call per 16 pages, and the file stays sparse

struct RowCounters {
  std::atomic<int64_t> read_rows{0}, written_rows{0};

  StoreCounters counters(int64_t record_bytes) const {
    StoreCounters c;
    c.read_rows = read_rows;
    c.read_bytes = c.read_rows * record_bytes;
    c.written_rows = written_rows;
    c.written_bytes = c.written_rows * record_bytes;
    return c;
  }
};

// Makes a system call, again if a signal interrupted it before it did anything.
template <class Call>
ssize_t retried(const Call& call) {
  ssize_t result;
  do result = call();
  while (result < 0 && errno == EINTR);
  return result;
}

class Dram final : public Store {
 public:
  Dram(int64_t record_bytes, std::string table) : record_bytes_(record_bytes), table_(std::move(table)) {}
  ~Dram() override {
    if (base_) munmap(base_, static_cast<size_t>(bytes_));
  }

  void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) override {
    PendingReads asked(ticket, static_cast<int64_t>(moves.size()));
    if (failure_.get()) return;
    for (const Move& move : moves) slots.scatter(base_ + move.row * record_bytes_, move.slot);
    counted_.read_rows += static_cast<int64_t>(moves.size());
    asked.done();
  }

  void write(std::span<const Move> moves, const Slots& slots) override {
    if (failure_.get()) return;
    for (const Move& move : moves) slots.gather(move.slot, base_ + move.row * record_bytes_);
    counted_.written_rows += static_cast<int64_t>(moves.size());
  }

  bool flush() override { return failure_.get() == nullptr; }
  void fail(const char* why) override { failure_.set(table_, why); }

  bool map(int64_t num_rows) {
    bytes_ = num_rows * record_bytes_;
    void* map = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return false;
    base_ = static_cast<std::byte*>(map);
    num_rows_ = num_rows;
    return true;
  }

  const Failure* failure() const override { return failure_.get(); }
  StoreCounters counters() const override { return counted_.counters(record_bytes_); }
  int64_t record_bytes() const override { return record_bytes_; }
  int64_t num_rows() const override { return num_rows_; }

 private:
  int64_t record_bytes_;
  std::string table_;
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t num_rows_ = 0;
  FailureSlot failure_;
  RowCounters counted_;
};

// Rows in chunks that are known to have space are read and written in memory; others through the descriptor, which
// reports a full or failing disk as an error and reads a hole without filling it.
class Mapped final : public Store {
 public:
  explicit Mapped(MappedFile file) : file_(std::move(file)) {}
  ~Mapped() override {
    watched_.reset();
    if (base_) munmap(base_, static_cast<size_t>(bytes_));
    close(file_.fd);
  }

  bool map(int64_t num_rows) {
    const int64_t bytes = mapped_file_bytes(file_.record_bytes, num_rows);
    void* map = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_.fd, 0);
    if (map == MAP_FAILED) return false;
    madvise(map, static_cast<size_t>(bytes), MADV_RANDOM);
    claimed_ = std::make_unique<std::atomic<uint8_t>[]>(static_cast<size_t>(bytes / kChunkBytes + 1));
    base_ = static_cast<std::byte*>(map);
    bytes_ = bytes;
    num_rows_ = num_rows;
    const MappedRows rows{map, bytes, kHeaderBytes, file_.record_bytes, num_rows, file_.fd};
    watched_ = std::make_unique<WatchedMapping>(rows, file_.table, file_.path);
    return true;
  }

  void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) override {
    PendingReads asked(ticket, static_cast<int64_t>(moves.size()));
    const auto read_each = [&](const Move& move) { return read_row(move, slots); };
    if (!is_usable() || !std::all_of(moves.begin(), moves.end(), read_each) || !is_whole()) return;
    counted_.read_rows += static_cast<int64_t>(moves.size());
    asked.done();
  }

  void write(std::span<const Move> moves, const Slots& slots) override {
    const auto write_each = [&](const Move& move) { return write_row(move, slots); };
    if (!is_usable() || !std::all_of(moves.begin(), moves.end(), write_each)) return;
    counted_.written_rows += static_cast<int64_t>(moves.size());
  }

  bool flush() override {
    if (!is_usable()) return false;
    if (msync(base_, static_cast<size_t>(bytes_), MS_SYNC) != 0) return fail("syncing", -1);
    return is_whole();
  }

  // The system drops pages that wait to be written together with their file.
  void fail(const char* why) override { failure_.set(file_.table, why); }

  const Failure* failure() const override { return failure_.get(); }
  StoreCounters counters() const override { return counted_.counters(file_.record_bytes); }
  int64_t record_bytes() const override { return file_.record_bytes; }
  int64_t num_rows() const override { return num_rows_; }

 private:
  int64_t place(int64_t row) const { return kHeaderBytes + row * file_.record_bytes; }

  // A failed store takes no calls, nor does one in a forked child: the file belongs to the parent.
  bool is_usable() { return failure_.check_process(file_.table, file_.path) && !failure_.get() && is_whole(); }

  // Checked before memory is touched: beyond the end of a truncated file the system ends the process (SIGBUS), and a
  // write would make the file longer again, though never as long as it was (kTailBytes). And after a read: rows that
  // were cut off meanwhile may have read as zeros.
  bool is_whole() { return hotrow::is_whole(file_.fd, bytes_, file_.table, file_.path, failure_); }

  bool fail(const char* operation, int64_t row) {
    const int error = errno;
    const bool full = error == ENOSPC || error == EDQUOT;
    const std::string rows = row < 0 ? "" : " row " + std::to_string(row) + " of";
    failure_.set(std::string(operation) + rows + " table '" + file_.table + "' in " + file_.path + ": " +
                 (error ? std::strerror(error) : "the file ends before it; something truncated it") + "; " +
                 (full ? "free some space on that disk" : "look into the kernel's log (dmesg)") +
                 ", then resume from the last checkpoint");
    return false;
  }

  bool is_claimed(int64_t row) const {
    const int64_t first = place(row) / kChunkBytes, last = (place(row + 1) - 1) / kChunkBytes;
    for (int64_t chunk = first; chunk <= last; ++chunk) {
      if (!claimed_[chunk].load(std::memory_order_relaxed)) return false;
    }
    return true;
  }

  // Whether the row's chunks have space now; never true if the file system cannot promise space.
  bool claim(int64_t row) {
#ifdef __linux__
    const int64_t first = place(row) / kChunkBytes, last = (place(row + 1) - 1) / kChunkBytes;
    for (int64_t chunk = first; chunk <= last; ++chunk) {
      const int64_t start = chunk * kChunkBytes, bytes = std::min(kChunkBytes, bytes_ - kTailBytes - start);
      const auto ask = [&] { return fallocate(file_.fd, 0, static_cast<off_t>(start), static_cast<off_t>(bytes)); };
      if (retried(ask) != 0) return false;
      claimed_[chunk].store(1, std::memory_order_relaxed);
    }
    return true;
#else
    (void)row;
    return false;
#endif
  }

  bool read_row(const Move& move, const Slots& slots) {
    if (is_claimed(move.row)) {
      slots.scatter(base_ + place(move.row), move.slot);
      return true;
    }
    std::vector<std::byte> record(static_cast<size_t>(file_.record_bytes));
    errno = 0;
    const auto at = static_cast<off_t>(place(move.row));
    const ssize_t moved = retried([&] { return pread(file_.fd, record.data(), record.size(), at); });
    if (moved != file_.record_bytes) return fail("reading", move.row);
    slots.scatter(record.data(), move.slot);
    return true;
  }

  bool write_row(const Move& move, const Slots& slots) {
    if (is_claimed(move.row) || claim(move.row)) {
      slots.gather(move.slot, base_ + place(move.row));
      return true;
    }
    std::vector<std::byte> record(static_cast<size_t>(file_.record_bytes));
    slots.gather(move.slot, record.data());
    const auto at = static_cast<off_t>(place(move.row));
    const ssize_t written = retried([&] { return pwrite(file_.fd, record.data(), record.size(), at); });
    if (written >= 0 && written != file_.record_bytes) errno = ENOSPC;
    return written == file_.record_bytes || fail("writing", move.row);
  }

  MappedFile file_;
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t num_rows_ = 0;
  std::unique_ptr<std::atomic<uint8_t>[]> claimed_;  // per chunk
  std::unique_ptr<WatchedMapping> watched_;
  FailureSlot failure_;
  RowCounters counted_;
};

}  // namespace

std::unique_ptr<Store> open_dram_store(int64_t record_bytes, int64_t num_rows, std::string table) {
  auto store = std::make_unique<Dram>(record_bytes, std::move(table));
  if (num_rows > 0 && !store->map(num_rows)) return nullptr;
  return store;
}

bool is_whole(int fd, int64_t bytes, const std::string& table, const std::string& path, FailureSlot& failure) {
  struct stat found;
  if (fstat(fd, &found) == 0 && found.st_size >= bytes) return true;
  failure.set("rows of table '" + table + "' in " + path + " are lost. Nothing was trained on wrong rows; the file " +
              "ends before its last row: something truncated it; find out what, then resume from the last checkpoint");
  return false;
}

int64_t mapped_file_bytes(int64_t record_bytes, int64_t num_rows) {
  return kHeaderBytes + num_rows * record_bytes + kTailBytes;
}

std::unique_ptr<Store> open_mapped_store(MappedFile file) {
  const int64_t num_rows = file.num_rows;
  auto store = std::make_unique<Mapped>(std::move(file));
  if (!store->map(num_rows)) return nullptr;
  return store;
}

}  // namespace hotrow
