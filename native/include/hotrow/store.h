// The rows of one table that lie behind a cache: a store takes records out of slots of fast memory and brings them
// back. It knows nothing of which rows exist: what was never written reads as zeros.
//
// Any thread may call. Of calls in order, a read sees the writes before it; while a row is being read it must not be
// written. After an error of the medium a store does no more: every ticket and flush says so, and `failure` tells why.
// A call that throws std::bad_alloc may have lost rows half-way: who catches it calls `fail` (see `guarded`).
#pragma once

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

inline constexpr int64_t kLineBytes = 64;  // of the processor's caches

// Where the parts of a record lie in fast memory: part p of slot s at parts[p].base + s * parts[p].bytes. A record is
// its parts one after another (weights, low halves, optimizer states).
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
  // A hint that the slot is gathered soon.
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

// Reads under way for one waiter, on any number of stores. It must live until it is finished.
class Ticket {
 public:
  void add(int64_t n) {
    const std::lock_guard lock(mutex_);
    remaining_ += n;
  }
  void done(int64_t n) { end(n, true); }
  // n of them ended without their records.
  void fail(int64_t n) { end(n, false); }
  // Sleeps until all are done; false when a store failed.
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
  // Notifies under the lock: the waiter may destroy the ticket as soon as it can take it.
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

// `count` reads that a ticket waits for, and that fail unless they end otherwise: also where an exception ends the call
// that was to start them.
class Asked {
 public:
  Asked(Ticket& ticket, int64_t count) : ticket_(ticket), count_(count) { ticket_.add(count); }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;
  ~Asked() {
    if (count_) ticket_.fail(count_);
  }
  void done() {
    ticket_.done(count_);
    count_ = 0;
  }
  // Another tells the ticket of them.
  void hand_on() { count_ = 0; }

 private:
  Ticket& ticket_;
  int64_t count_;
};

// Names operation, table, rows, file, the system's words and the cure.
struct Failure {
  std::string what;
};

// Where the first failure is kept for ever.
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
  // Of a table; where there is no memory for the words, they are the same for all.
  void set(const std::string& table, const char* why) noexcept {
    try {
      set("table '" + table + "' " + why);
    } catch (const std::bad_alloc&) {
      const Failure* none = nullptr;
      first_.compare_exchange_strong(none, &kNoWords);
    }
  }

 private:
  static inline const Failure kNoWords{"a table lost rows, because there was no memory to move them"};
  std::atomic<const Failure*> first_{nullptr};
};

// What every call in a forked child leaves as the failure of a store that does its I/O in another process.
inline std::string forked_text(const std::string& table, const std::string& path) {
  return "table '" + table + "' (" + path +
         ") was opened before this process was forked, and its I/O runs in the process that opened it: use the table "
         "there, or start workers with multiprocessing's 'spawn'";
}

// Of records that a store hands to the one below it at once: malloc keeps so much at hand, and a queue takes it.
inline constexpr int64_t kPieceBytes = 64 << 10;

// Whether the file is at least so long; else the table has failed: something truncated it.
bool is_whole(int fd, int64_t bytes, const std::string& table, const std::string& path, FailureSlot& failure);

// Since the store was opened. reads and writes are I/Os; bytes are those that the medium was asked for.
struct StoreCounters {
  int64_t reads = 0;
  int64_t read_rows = 0;
  int64_t read_bytes = 0;
  int64_t writes = 0;
  int64_t written_rows = 0;
  int64_t written_bytes = 0;
  int64_t served_from_queue = 0;   // rows read out of a write that was waiting or under way
  int64_t read_modify_writes = 0;  // reads, counted above, for writing a part of a sector
  int64_t blocked_ns = 0;          // writers waited for room
  int64_t waiting_bytes = 0;       // of memory that rows to be written take, now
  int64_t io_cpu_ns = 0;           // of the engine's threads, by this store's share of its I/Os
  // Of the tiers of a cached store above its lowest (cached_store.h), which the counters above are of; else 0.
  int64_t middle_hits = 0;           // rows that were read there
  int64_t middle_rows = 0;           // that lie there, now
  int64_t middle_read_bytes = 0;     // also for writing rows down
  int64_t middle_written_bytes = 0;  // every record that was written
  int64_t middle_map_bytes = 0;      // of DRAM, for knowing which rows lie there
  // Of a gathered store (gathered_store.h); else 0.
  int64_t places_bytes = 0;  // of DRAM, for knowing where rows lie on disk, open pages included
  int64_t held_bytes = 0;    // of rows that are in open pages until these are full, beside waiting_bytes
};

class Store {
 public:
  virtual ~Store() = default;
  // Starts to read; `ticket` is done once every record lies in its slot. A row whose write is queued or under way is
  // served from that write. The memory of `slots` must outlive the ticket.
  virtual void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) = 0;
  // Copies the records out of their slots before it returns; they are on disk later (flush). Of a row given twice the
  // last counts. Blocks only while what waits to be written fills the memory there is for it.
  virtual void write(std::span<const Move> moves, const Slots& slots) = 0;
  // Everything written so far is on the medium (fdatasync); false when the store failed.
  virtual bool flush() = 0;
  // Its rows are not wanted any more, or some are lost; why: what the table did, and the cure. I/Os under way end,
  // nothing more is written, also not when the store goes, and every later call fails.
  virtual void fail(const char* why) = 0;
  // Makes room for rows up to num_rows, which read as zeros; false when the store failed.
  virtual bool grow(int64_t num_rows) = 0;
  // Sticky; null while all is well.
  virtual const Failure* failure() const = 0;
  virtual StoreCounters counters() const = 0;
  virtual int64_t record_bytes() const = 0;
  virtual int64_t num_rows() const = 0;
};

inline constexpr const char* kNoMemory =
    "lost rows, because there was no memory to move them. Nothing was trained on wrong rows; give the process more "
    "memory or the tables less, then resume from the last checkpoint";

// What `call` says, which moves rows of `store`; where it throws, the store has failed.
template <class Call>
bool guarded(Store& store, const Call& call) {
  try {
    return call();
  } catch (const std::exception&) {
    store.fail(kNoMemory);
    return false;
  }
}

}  // namespace hotrow
