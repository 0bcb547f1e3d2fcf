// The rows of one table behind a cache: a store takes records out of slots of fast memory and brings them back. It does
// not know which rows exist: a row that was never written reads as zeros.
//
// Any thread may call; callers check that rows are in [0, num_rows). A read sees the writes of calls before it; a row
// must not be written while it is being read. After an error of the medium a store does nothing more: every ticket and
// flush says so, and `failure` says why. A call that throws std::bad_alloc may have lost rows half-way: whoever catches
// it calls `fail` (see `fail_store_on_throw`).
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace hotrow {

inline constexpr int64_t kLineBytes = 64;  // of a cache line of the processor

// The slots of a table in fast memory: part p of slot s is at parts[p].base + s * parts[p].bytes. A record is the
// concatenation of its parts (weights, low halves, optimizer states).
struct Part {
  std::byte* base;
  int64_t bytes;
};
struct Slots {
  std::vector<Part> parts;

  int64_t record_bytes() const {
    int64_t bytes = 0;
    for (const Part& part : parts) bytes += part.bytes;
    return bytes;
  }
  void gather(int64_t slot, std::byte* record) const {
    for (const Part& part : parts) {
      std::memcpy(record, part.base + slot * part.bytes, static_cast<size_t>(part.bytes));
      record += part.bytes;
    }
  }
  // Prefetches the slot for `gather`.
  void fetch(int64_t slot) const {
    for (const Part& part : parts) {
      for (int64_t at = 0; at < part.bytes; at += kLineBytes) __builtin_prefetch(part.base + slot * part.bytes + at);
    }
  }
  void scatter(const std::byte* record, int64_t slot) const {
    for (const Part& part : parts) {
      std::memcpy(part.base + slot * part.bytes, record, static_cast<size_t>(part.bytes));
      record += part.bytes;
    }
  }
};

struct Move {
  int64_t row;
  int64_t slot;
};

// Counts the pending reads of one waiter, on any number of stores. It must outlive them.
class Ticket {
 public:
  void add(int64_t n) {
    const std::lock_guard lock(mutex_);
    remaining_ += n;
  }
  void done(int64_t n) { end(n, true); }
  // n of the reads ended without their records.
  void fail(int64_t n) { end(n, false); }
  // Blocks until all reads are done; false if a store failed.
  bool wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return remaining_ == 0; });
    return good_;
  }
  bool finished() const {
    const std::lock_guard lock(mutex_);
    return remaining_ == 0;
  }

 private:
  // Notifies under the lock: the waiter may destroy the ticket as soon as it gets the lock.
  void end(int64_t n, bool good) {
    const std::lock_guard lock(mutex_);
    remaining_ -= n;
    good_ = good_ && good;
    if (remaining_ == 0) changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t remaining_ = 0;
  bool good_ = true;
};

// Adds `count` reads to a ticket, and fails them at the end of the scope unless they were done or handed on: an
// exception cannot leave the waiter hanging.
class PendingReads {
 public:
  PendingReads(Ticket& ticket, int64_t count) : ticket_(ticket), count_(count) { ticket_.add(count); }
  PendingReads(const PendingReads&) = delete;
  PendingReads& operator=(const PendingReads&) = delete;
  ~PendingReads() {
    if (count_) ticket_.fail(count_);
  }
  void done() {
    ticket_.done(count_);
    count_ = 0;
  }
  // Their end will be reported to the ticket elsewhere.
  void hand_on() { count_ = 0; }

 private:
  Ticket& ticket_;
  int64_t count_;
};

// The text names operation, table, rows, file, the system's message and the cure.
struct Failure {
  std::string what;
};

// The first failure of a store, which stays for ever; and the process that opened it. A forked child lacks the threads
// of its parent, and locks may be held for ever there.
class FailureSlot {
 public:
  ~FailureSlot() {
    if (first_.load() != &kNoWords) delete first_.load();
  }
  const Failure* get() const { return first_.load(std::memory_order_acquire); }
  void set(std::string what) {
    const Failure* none = nullptr;
    auto failure = std::make_unique<const Failure>(Failure{std::move(what)});
    if (first_.compare_exchange_strong(none, failure.get())) failure.release();
  }
  // The failure of a table; if there is no memory for its text, a text that is the same for all tables.
  void set(const std::string& table, const char* why) noexcept {
    try {
      set("table '" + table + "' " + why);
    } catch (const std::bad_alloc&) {
      const Failure* none = nullptr;
      first_.compare_exchange_strong(none, &kNoWords);
    }
  }
  bool in_opening_process() const { return getpid() == process_; }
  // The same; if it is not, that is the failure.
  bool check_process(const std::string& table, const std::string& path = {}) {
    if (in_opening_process()) return true;
    const std::string where = path.empty() ? "'" : "' (" + path + ")";
    set("table '" + table + where +
        " was opened before this process was forked: use it in the process that opened it, "
        "or start workers with multiprocessing's 'spawn'");
    return false;
  }

 private:
  static inline const Failure kNoWords{"a table lost rows, because there was no memory to move them"};
  std::atomic<const Failure*> first_{nullptr};
  const pid_t process_ = getpid();
};

// Bytes of records that a store hands to the store below it at a time: malloc keeps blocks of this size for reuse, and
// a queue can take them.
inline constexpr int64_t kPieceBytes = 64 << 10;

// Whether the file has at least `bytes`; if not, something truncated it, and the table fails.
bool is_whole(int fd, int64_t bytes, const std::string& table, const std::string& path, FailureSlot& failure);

// Counted since the store was opened. reads and writes are I/Os; bytes are those requested from the medium.
struct StoreCounters {
  int64_t reads = 0;
  int64_t read_rows = 0;
  int64_t read_bytes = 0;
  int64_t writes = 0;
  int64_t written_rows = 0;
  int64_t written_bytes = 0;
  int64_t served_from_queue = 0;   // rows read out of a write that was waiting or under way
  int64_t read_modify_writes = 0;  // reads, counted above, for writing a part of a sector
  int64_t blocked_ns = 0;          // time that writers waited for room
  int64_t waiting_bytes = 0;       // memory of rows that wait to be written, now
  int64_t io_cpu_ns = 0;           // processor time of the engine's threads, by this store's share of its I/Os
  // For a cached store, the tiers above its lowest tier (cached_store.h), which the counters above are for; else 0.
  int64_t middle_hits = 0;           // rows read there
  int64_t middle_rows = 0;           // rows there, now
  int64_t middle_read_bytes = 0;     // includes reads for writing rows to the tier below
  int64_t middle_written_bytes = 0;  // all records written there
  int64_t middle_map_bytes = 0;      // DRAM for the index of the rows there
  // For a gathered store (gathered_store.h); else 0.
  int64_t places_bytes = 0;  // DRAM for the index of positions on disk, open pages included
  int64_t held_bytes = 0;    // rows in open pages, which are written when full; not part of waiting_bytes
  // For a saved store (saved_store.h); else 0.
  int64_t saved_rows = 0;         // rows read from saved files, counted above too
  int64_t saved_index_bytes = 0;  // DRAM for knowing where they lie
};

class Store {
 public:
  virtual ~Store() = default;
  // Starts to read; `ticket` is done once every record is in its slot. A row whose write is queued or under way is
  // served from that write. The memory of `slots` must outlive the ticket.
  virtual void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) = 0;
  // Copies the records out of their slots before it returns; they are on disk later (flush). If a row is given twice,
  // the last one counts. Blocks only while rows that wait to be written fill the memory allowed for them.
  virtual void write(std::span<const Move> moves, const Slots& slots) = 0;
  // Blocks until everything written so far is on the medium (fdatasync); false if the store failed.
  virtual bool flush() = 0;
  // Gives the rows up, because they are no longer wanted or some are lost; why: what happened to the table, and the
  // cure. Pending I/Os complete, nothing more is written, even when the store is destroyed, and every later call fails.
  virtual void fail(const char* why) = 0;
  // Sticky; null while there is none.
  virtual const Failure* failure() const = 0;
  virtual StoreCounters counters() const = 0;
  virtual int64_t record_bytes() const = 0;
  virtual int64_t num_rows() const = 0;
};

inline constexpr const char* kNoMemory =
    "lost rows, because there was no memory to move them. Nothing was trained on wrong rows; give the process more "
    "memory or the tables less, then resume from the last checkpoint";

// Runs `call`, which moves rows of `store`. If it throws, fails the store and returns false.
template <class Call>
bool fail_store_on_throw(Store& store, const Call& call) {
  try {
    return call();
  } catch (const std::exception&) {
    store.fail(kNoMemory);
    return false;
  }
}

}  // namespace hotrow
