// The inside of the block store: what the engine's thread knows about tables, and the I/Os under way.
#pragma once

#include <hotrow/block_store.h>
#include <hotrow/io_queue.h>
#include <hotrow/memory.h>
#include <sys/types.h>

#include <array>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

namespace hotrow {

struct Table;

// Memory for units that wait: filled from the front, and reused once none of its units waits.
struct Chunk {
  Pages pages;
  int64_t size, filled = 0, num_units = 0;

  int64_t num_bytes() const { return static_cast<int64_t>(pages.bytes); }
};

// A unit of the file that is queued or being written. In memory it is followed by a bit per row, set if the row's
// newest bytes are known, and by the image of the unit. Once the unit has been read, all rows are known.
struct DirtyUnit {
  Table* table;
  int64_t unit;
  Chunk* chunk;
  DirtyUnit* next;  // in its call, then in the queue
  int32_t num_known;
  bool changed;  // since an I/O last took its bytes

  uint64_t* known() { return reinterpret_cast<uint64_t*>(this + 1); }
  std::byte* image();
  bool knows(int64_t row_in_unit) { return known()[row_in_unit / 64] >> (row_in_unit % 64) & 1; }
};

// The memory of all units that wait to be written: a bounded number of chunks, which are reused.
class WriteBuffer {
 public:
  // most_bytes: limit for all chunks together, except that one unit always fits.
  explicit WriteBuffer(int64_t most_bytes);
  ~WriteBuffer();

  // Takes memory for up to `count` units of `unit_bytes` from one chunk. Blocks while there is none; returns none once
  // `failure` is set. Hand them to the engine before taking more, so that no thread blocks while holding memory that
  // another waits for.
  struct Units {
    Chunk* chunk = nullptr;
    std::byte* bytes = nullptr;
    int64_t count = 0;
    int64_t blocked_ns = 0;
  };
  Units take(int64_t unit_bytes, int64_t count, const FailureSlot& failure);
  // Frees one unit of each chunk. look_again: wakes waiting threads in any case, because a table has failed and its
  // writers must give up.
  void give_back(const std::vector<Chunk*>& chunks, bool look_again);

  int64_t num_bytes() const { return num_bytes_.load(std::memory_order_relaxed); }
  // The time during which at least one thread was blocked.
  int64_t blocked_ns() const { return blocked_ns_.load(std::memory_order_relaxed); }
  // The most units of at least `unit_bytes` that can exist at a time.
  int64_t most_units(int64_t unit_bytes) const;

 private:
  bool open_chunk(int64_t unit_bytes);
  void release(Chunk* chunk);

  const int64_t most_bytes_;
  std::atomic<int64_t> num_bytes_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  Chunk* filling_ = nullptr;
  std::vector<Chunk*> free_;
  int64_t num_blocked_ = 0;
  std::chrono::steady_clock::time_point blocked_since_;
  std::atomic<int64_t> blocked_ns_{0};
};

// A hash map of all units that wait, with open addressing and room for as many as can exist. Only the engine's thread
// uses it.
class UnitIndex {
 public:
  explicit UnitIndex(int64_t most_units);
  DirtyUnit* find(const Table* table, int64_t unit) const;
  void insert(DirtyUnit* unit);
  void erase(const DirtyUnit* unit);
  int64_t num_bytes() const { return static_cast<int64_t>(units_.size() * sizeof(DirtyUnit*)); }

 private:
  size_t home(const Table* table, int64_t unit) const;
  size_t place_of(const Table* table, int64_t unit) const;
  std::vector<DirtyUnit*> units_;
  int shift_;
};

// StoreCounters as the engine's thread counts them, for others to read.
struct TableCounters {
  std::atomic<int64_t> reads{0}, read_rows{0}, read_bytes{0}, writes{0}, written_rows{0}, written_bytes{0},
      served_from_queue{0}, read_modify_writes{0}, waiting_bytes{0}, blocked_ns{0};
};
inline void bump(std::atomic<int64_t>& counter, int64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }
// The same if only one thread counts: several times cheaper.
inline void bump_own(std::atomic<int64_t>& counter, int64_t n) {
  counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

// Used by the engine's thread alone, except what is atomic, and `file`, which does not change.
struct Table {
  explicit Table(TableFile f) : file(std::move(f)), known_words((file.layout.unit_rows + 63) / 64) {}

  TableFile file;
  const int64_t known_words;
  TableCounters counted;
  FailureSlot failure;
  std::atomic<int64_t> inject_after{0};  // 0: none
  bool inject_write = false;
  int inject_error = 0;

  int queue_file = -1;
  int64_t num_dirty = 0, in_flight = 0, calls_reading = 0;
  std::vector<Ticket*> flushes;
  Ticket* leaving = nullptr;

  // Whether the file is as long as its rows need; if not, the table fails.
  bool is_whole();
  // The memory of a unit that waits.
  int64_t dirty_bytes() const {
    const auto bytes = static_cast<int64_t>(sizeof(DirtyUnit)) + known_words * 8 + file.layout.unit_bytes;
    return (bytes + 7) / 8 * 8;
  }
  // A unit that knows no row yet, in memory of dirty_bytes.
  DirtyUnit* make(std::byte* at, Chunk* chunk, int64_t unit);
  static void put(DirtyUnit& unit, int64_t row, const Slots& slots, int64_t slot);
  // Takes the rows that `newer` knows.
  static void merge(DirtyUnit& unit, DirtyUnit& newer);
  // Takes the rows that the image lacks from the unit on disk.
  static void complete(DirtyUnit& unit, const std::byte* on_disk);
};

inline std::byte* DirtyUnit::image() { return reinterpret_cast<std::byte*>(known() + table->known_words); }

struct Call {
  enum class Kind { read, write, flush, attach, detach };
  Kind kind;
  Table* table;
  std::vector<Move> moves;  // for a read, by row
  Slots slots;
  DirtyUnit* units;  // for a write
  Ticket* ticket;
  size_t next = 0, ended = 0;  // counts of the moves of a read
  bool good = true;
};

inline constexpr int64_t kMostUnits = kPackedPageBytes / 512;

struct Job : Io {
  std::byte* frame;  // its own kPageBytes of the queue's frames
  std::byte* base;   // the memory of the I/O: the frame, a large one, or own_bytes if a unit is larger
  Table* table;
  int64_t unit;  // the first
  int64_t own_bytes;
  Call* call;  // for a read, with its moves
  size_t first_move, last_move;
  std::array<DirtyUnit*, kMostUnits> units;  // for a write
  int64_t num_units;
  bool merging;  // a read-modify-write that is still reading
  std::vector<Ticket*> flushes;
};

// Of a unit of one sector, not counting the bits of its rows.
inline constexpr int64_t kLeastDirtyBytes = static_cast<int64_t>(sizeof(DirtyUnit)) + 512;

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();
  bool open(std::string& reason);

  // From any thread.
  void push(Call call);
  WriteBuffer& write_buffer() { return write_buffer_; }
  int64_t cpu_ns();
  // Memory held now: the write buffer and its own.
  int64_t num_bytes() const;
  int64_t num_ios() const { return num_ios_.load(std::memory_order_relaxed); }

 private:
  bool prepare(std::string& reason);
  void run();
  bool take_calls();
  void handle_or_fail(Call& call) noexcept;
  void handle(Call&& call);
  void lose(Table& table) noexcept;
  void start_reading(Call&& call);
  void start_writing(const Call& call);
  void send();
  void read_next(Call& call);
  void end_moves(Call& call, size_t count, bool good);
  void write_next();
  int64_t most_units(const BlockLayout& layout) const;
  void flush_and_detach();
  Job* take_job(Io::Kind kind, Table& table, int64_t unit, int64_t bytes);
  void give_back(Job& job);
  void finish(Job& job);
  void finish_read(Job& job, bool good);
  void finish_write(Job& job, bool good);
  void start_write(Job& job);
  void finish_sync(Job& job, bool good);
  bool is_whole(Table& table);
  void fail(Job& job) noexcept;
  // The bytes of a row whose write waits or is under way; else null.
  const std::byte* waiting_bytes_of(const Table& table, int64_t row) const;
  void put_last(DirtyUnit* unit);
  DirtyUnit* pop_first();
  void forget(DirtyUnit* unit);
  void drop(DirtyUnit* unit);

  EngineOptions options_;
  std::unique_ptr<std::thread> thread_;
  std::unique_ptr<IoQueue> queue_;
  WriteBuffer write_buffer_;
  std::atomic<int64_t> num_ios_{0};
  std::atomic<int64_t> large_bytes_{0};  // large frames used so far, and I/Os of larger units

  std::mutex mutex_;
  std::vector<Call> calls_;  // these under the lock
  bool ending_ = false;

  std::vector<Call> taken_;  // from here on used by the engine's thread alone
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<Job*> free_jobs_;
  Pages large_frames_{};  // of kMostPackedPageBytes, for packed pages; address space until used
  std::vector<std::byte*> free_large_frames_;
  size_t fewest_free_ = 0;                                    // the fewest free frames so far
  std::deque<std::unique_ptr<Call>> reading_;                 // calls whose moves wait
  DirtyUnit *first_dirty_ = nullptr, *last_dirty_ = nullptr;  // units that wait
  UnitIndex index_;                                           // of these units and those being written
  std::vector<Chunk*> left_;                                  // of units that no longer wait
  bool has_failed_ = false;                                   // a table has, since the write buffer last heard
  std::vector<Table*> ending_tables_;                         // tables to flush or detach
  size_t num_tables_ = 0;                                     // ever attached
  int64_t writes_in_flight_ = 0;
  std::vector<Io*> ended_;
};

}  // namespace hotrow
