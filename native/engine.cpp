// The thread that does the I/O of all block stores: its life, and the calls that it takes in order. engine_io.cpp
// carries them out.
#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <new>
#include <system_error>

namespace hotrow {
namespace {

constexpr int64_t kRingEntryBytes = 128;   // of a submission queue and a result queue, in the kernel's memory
constexpr int64_t kStackBytes = 16 << 10;  // that a thread touches here

// The memory of the engine apart from the write buffer.
int64_t fixed_bytes(const EngineOptions& options) {
  const int64_t frames = options.depth * (kPageBytes + static_cast<int64_t>(sizeof(Job)) + kRingEntryBytes);
  return frames + (1 + (options.ring ? 0 : options.num_threads)) * kStackBytes;
}

// What the limit leaves, or half of it if that is more; a sixteenth of this is for the index of the units.
int64_t write_buffer_bytes(const EngineOptions& options) {
  const int64_t most = options.most_waiting_bytes;
  return std::max(most - fixed_bytes(options), most / 2) / 16 * 15;
}

// Blocks all signals for threads that are started while it is alive.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      write_buffer_(write_buffer_bytes(options)),
      index_(write_buffer_.most_units(kLeastDirtyBytes)) {}

int64_t Engine::num_bytes() const {
  return fixed_bytes(options_) + index_.num_bytes() + write_buffer_.num_bytes() +
         large_bytes_.load(std::memory_order_relaxed);
}

// The queue is made by the thread that uses it, which blocks all signals.
bool Engine::open(std::string& reason) {
  std::promise<bool> promise;
  std::future<bool> opened = promise.get_future();
  try {
    const NoSignals none;
    thread_ = std::make_unique<std::thread>([this, &reason, promise = std::move(promise)]() mutable {
      const bool good = prepare(reason);
      promise.set_value(good);
      if (good) run();
      queue_.reset();
    });
  } catch (const std::system_error& error) {
    reason = threads_refused("no thread for reads and writes of files", error.code().value());
    return false;
  }
  return opened.get();
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    if (queue_) queue_->wake();
  }
  if (thread_) thread_->join();
  free_pages(large_frames_);
}

void Engine::push(Call call) {
  bool is_first;  // the engine takes all of them at once: one wake is enough
  {
    const std::lock_guard lock(mutex_);
    is_first = calls_.empty();
    calls_.push_back(std::move(call));
  }
  if (is_first) queue_->wake();
}

int64_t Engine::cpu_ns() {
  timespec time{};
#ifndef __APPLE__
  clockid_t clock;
  if (pthread_getcpuclockid(thread_->native_handle(), &clock) == 0) clock_gettime(clock, &time);
#endif
  return time.tv_sec * 1'000'000'000 + time.tv_nsec + queue_->cpu_ns();
}

// Makes the queue and all that it needs. An exception on the engine's thread would end the process.
bool Engine::prepare(std::string& reason) try {
  queue_ = options_.ring ? make_ring(options_.depth, reason) : make_pool(options_.depth, options_.num_threads, reason);
  if (!queue_) return false;
  for (int i = 0; i < options_.depth; ++i) {
    jobs_.push_back(std::make_unique<Job>());
    jobs_.back()->frame = queue_->frames() + i * kPageBytes;
    free_jobs_.push_back(jobs_.back().get());
  }
  // Without memory for them every I/O fits a frame.
  const int64_t large_bytes = options_.depth * kPageBytes / kPackedPageBytes * kMostPackedPageBytes;
  large_frames_ = allocate_pages(static_cast<size_t>(large_bytes), true);
  for (int64_t at = large_bytes; large_frames_.data && (at -= kMostPackedPageBytes) >= 0;) {
    free_large_frames_.push_back(static_cast<std::byte*>(large_frames_.data) + at);
  }
  ended_.reserve(jobs_.size());
  fewest_free_ = free_large_frames_.size();
  return true;
} catch (const std::bad_alloc&) {
  reason = "there is no memory for the buffers of reads and writes: free some, or raise the limit (ulimit -v)";
  return false;
}

void Engine::run() {
  while (take_calls()) {
    for (Call& call : taken_) handle_or_fail(call);
    taken_.clear();
    send();
    // Returns freed memory before it sleeps, and wakes the writers of a table that has failed.
    if (!left_.empty() || has_failed_) write_buffer_.give_back(left_, has_failed_);
    left_.clear();
    has_failed_ = false;
    // Waits for a quarter of the I/Os in flight: fewer wake-ups per I/O, and the queue stays three quarters full.
    const auto in_flight = static_cast<int64_t>(jobs_.size() - free_jobs_.size());
    queue_->wait(in_flight / 4, ended_);
    for (Io* io : ended_) finish(*static_cast<Job*>(io));
    ended_.clear();
  }
}

// False when the engine ends: no store is left then, so nothing is under way.
bool Engine::take_calls() {
  const std::lock_guard lock(mutex_);
  taken_.swap(calls_);
  return !ending_;
}

void Engine::handle_or_fail(Call& call) noexcept {
  try {
    handle(std::move(call));
  } catch (const std::bad_alloc&) {
    lose(*call.table);
    call.ticket->fail(std::max<int64_t>(1, static_cast<int64_t>(call.moves.size())));
  }
}

// Fails a table whose rows cannot be moved for lack of memory.
void Engine::lose(Table& table) noexcept {
  table.failure.set(table.file.table, kNoMemory);
  has_failed_ = true;
}

// Moves from `call` only once nothing can throw.
void Engine::handle(Call&& call) {
  Table& table = *call.table;
  switch (call.kind) {
    case Call::Kind::read:
      return start_reading(std::move(call));
    case Call::Kind::write:
      return start_writing(call);
    case Call::Kind::attach:
      ending_tables_.reserve(++num_tables_);  // to detach must not fail
      table.queue_file = queue_->add_file(table.file.fd);
      return call.ticket->done(1);
    case Call::Kind::flush:
      table.flushes.push_back(call.ticket);
      break;
    case Call::Kind::detach:
      table.leaving = call.ticket;
  }
  if (std::find(ending_tables_.begin(), ending_tables_.end(), &table) == ending_tables_.end()) {
    ending_tables_.push_back(&table);
  }
}

void Engine::start_reading(Call&& call) {
  auto own = std::make_unique<Call>();
  reading_.emplace_back();
  ++call.table->calls_reading;
  *own = std::move(call);
  reading_.back() = std::move(own);
}

void Engine::start_writing(const Call& call) {
  Table& table = *call.table;
  for (DirtyUnit* unit = call.units; unit;) {
    DirtyUnit* next = unit->next;
    DirtyUnit* waiting = table.num_dirty ? index_.find(&table, unit->unit) : nullptr;
    if (table.failure.get()) {
      forget(unit);
    } else if (waiting) {
      Table::merge(*waiting, *unit);
      forget(unit);
    } else {
      index_.insert(unit);
      ++table.num_dirty;
      put_last(unit);
    }
    unit = next;
  }
}

std::shared_ptr<Engine> start_engine(const EngineOptions& options, std::string& reason) {
  // A forked child has no thread to join, and locks may be held for ever: it leaks the engine.
  const auto end = [process = getpid()](Engine* engine) {
    if (getpid() == process) delete engine;
  };
  const std::shared_ptr<Engine> engine(new Engine(options), end);
  return engine->open(reason) ? engine : nullptr;
}

}  // namespace hotrow
