// The inside of the block store: what its engine's thread knows of tables, and the I/Os under way.
#pragma once

#include <hotrow/block_store.h>
#include <hotrow/io_queue.h>
#include <sys/types.h>

#include <array>
#include <deque>
#include <thread>
#include <unordered_map>
#include <utility>

namespace hotrow {

// "row 3", or "rows 3 to 9".
std::string rows_text(int64_t first, int64_t last);

struct Table;

// A unit of the file that stands in the engine's queue or is being written. Its image holds the newest bytes of the
// rows whose bits in `known` are set, and of every row once the unit was read.
struct Dirty {
  Table* table;
  int64_t unit;
  std::byte* image;
  uint64_t* known;
  int64_t num_known;
  bool changed;  // since an I/O took its bytes

  bool knows(int64_t row_in_unit) const { return known[row_in_unit / 64] >> (row_in_unit % 64) & 1; }
};

// StoreCounters as the engine's thread counts them, for others to read.
struct Counted {
  std::atomic<int64_t> reads{0}, read_rows{0}, read_bytes{0}, writes{0}, written_rows{0}, written_bytes{0},
      served_from_queue{0}, read_modify_writes{0}, waiting_bytes{0}, blocked_ns{0};
};
inline void bump(std::atomic<int64_t>& counter, int64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }

// Of the engine's thread alone, but for what is atomic, and `file`, which does not change.
struct Table {
  explicit Table(TableFile f) : file(std::move(f)), num_rows(file.num_rows) {}

  TableFile file;
  std::atomic<int64_t> num_rows;
  Counted counted;
  FailureSlot failure;
  std::atomic<int64_t> inject_after{0};  // 0: none
  bool inject_write = false;
  int inject_error = 0;

  int queue_file = -1;
  std::unordered_map<int64_t, Dirty> dirty;
  std::vector<std::byte*> free_images;
  std::vector<std::unique_ptr<std::byte[]>> slabs;
  int64_t in_flight = 0, calls_reading = 0;
  std::vector<Ticket*> flushes;
  Ticket* leaving = nullptr;

  Dirty* find(int64_t unit);
  // The dirty unit, new where `second`.
  std::pair<Dirty*, bool> make(int64_t unit);
  void drop(Dirty* dirty);
  // The bytes of a row whose write waits or is under way; else null.
  const std::byte* waiting_bytes_of(int64_t row);
  void put(Dirty& unit, int64_t row, const std::byte* record);
  // Takes the rows that the image lacks from the unit as it lies on disk.
  void complete(Dirty& unit, const std::byte* on_disk);
};

struct Call {
  enum class Kind { read, write, flush, attach, detach };
  Kind kind;
  Table* table;
  std::vector<Move> moves;  // by row; of a write, slots are places in `records`
  Slots slots;
  std::unique_ptr<std::byte[]> records;
  Ticket* ticket;
  size_t next = 0, ended = 0;  // of the moves of a read
};

inline constexpr int64_t kMostUnits = kPageBytes / 512;

struct Job : Io {
  std::byte* frame;  // its own page of the queue's frames
  std::byte* base;   // where the I/O began: the frame, or memory of its own where a unit is larger
  Table* table;
  int64_t unit;  // the first
  Call* call;    // a read's, and its moves
  size_t first_move, last_move;
  std::array<Dirty*, kMostUnits> units;  // a write's
  int64_t num_units;
  bool merging;  // reads what a write lacks
  std::vector<Ticket*> flushes;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();
  bool open(std::string& reason);

  // From any thread.
  void push(Call call);
  void wait_for_room(Table& table);
  void add_waiting(Table& table, int64_t bytes);
  int64_t cpu_ns();
  int64_t num_ios() const { return num_ios_.load(std::memory_order_relaxed); }
  bool is_of_this_process() const;

 private:
  void run();
  bool take_calls();
  void wake_blocked();
  void handle(Call&& call);
  void start_reading(Call&& call);
  void start_writing(Call& call);
  void send();
  void read_next(Call& call);
  void end_moves(Call& call, size_t count, bool good);
  void write_next();
  void flush_and_detach();
  Job& take_job(Io::Kind kind, Table& table, int64_t unit, int64_t bytes);
  void give_back(Job& job);
  void finish(Job& job);
  void finish_read(Job& job, bool good);
  void finish_write(Job& job, bool good);
  void start_write(Job& job);
  void finish_sync(Job& job, bool good);
  void fail(Job& job);
  void drop(Dirty* dirty);

  EngineOptions options_;
  pid_t process_;
  std::unique_ptr<std::thread> thread_;
  std::unique_ptr<IoQueue> queue_;
  std::atomic<int64_t> num_ios_{0}, waiting_bytes_{0};

  std::mutex mutex_;
  std::condition_variable room_;
  std::vector<Call> calls_;  // these under the lock
  int64_t num_blocked_ = 0;
  bool ending_ = false;

  std::vector<Call> taken_;  // from here on of the engine's thread
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<Job*> free_jobs_;
  std::deque<std::unique_ptr<Call>> reading_;  // calls of which moves wait
  std::deque<Dirty*> dirty_;                   // units that wait
  std::vector<Table*> ending_tables_;          // that flush or leave
  int64_t writes_in_flight_ = 0;
  std::vector<Io*> ended_;
};

}  // namespace hotrow
