// The thread that does the I/O of all block stores: its life, and the calls it takes in order. What becomes of them is
// in engine_io.cpp.
#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <new>

namespace hotrow {
namespace {

bool by_row(const Move& a, const Move& b) { return a.row < b.row || (a.row == b.row && a.slot < b.slot); }

void sort_by_row(std::vector<Move>& moves) {
  if (!std::is_sorted(moves.begin(), moves.end(), by_row)) std::sort(moves.begin(), moves.end(), by_row);
}

// Refuses rows outside the table: `moves` are sorted.
bool are_rows_of(Table& table, const std::vector<Move>& moves) {
  const int64_t num_rows = table.num_rows.load();
  if (moves.front().row >= 0 && moves.back().row < num_rows) return true;
  table.failure.set("table '" + table.file.table + "': " + rows_text(moves.front().row, moves.back().row) +
                    " were asked for, but it has " + std::to_string(num_rows) + " rows (" + table.file.path +
                    "); grow it first");
  return false;
}

}  // namespace

Engine::Engine(const EngineOptions& options) : options_(options), process_(getpid()) {}

std::string rows_text(int64_t first, int64_t last) {
  if (first == last) return "row " + std::to_string(first);
  return "rows " + std::to_string(first) + " to " + std::to_string(last);
}

bool Engine::is_of_this_process() const { return getpid() == process_; }

// The queue is made by the thread that uses it; no signal is for that thread.
bool Engine::open(std::string& reason) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::promise<void> promise;
  const std::future<void> opened = promise.get_future();
  thread_ = std::make_unique<std::thread>([this, &reason, promise = std::move(promise)]() mutable {
    queue_ = options_.ring ? make_ring(options_.depth, reason) : make_pool(options_.depth, options_.num_threads);
    const bool good = queue_ != nullptr;
    promise.set_value();
    if (good) run();
    queue_.reset();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  opened.wait();
  return reason.empty();
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    if (queue_) queue_->wake();
  }
  if (thread_) thread_->join();
}

void Engine::push(Call call) {
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }
  queue_->wake();
}

void Engine::add_waiting(Table& table, int64_t bytes) {
  waiting_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  bump(table.counted.waiting_bytes, bytes);
}

void Engine::wait_for_room(Table& table) {
  const auto has_room = [&] { return waiting_bytes_.load() <= options_.most_waiting_bytes || table.failure.get(); };
  if (has_room()) return;
  timespec before, after;
  clock_gettime(CLOCK_MONOTONIC, &before);
  {
    std::unique_lock lock(mutex_);
    ++num_blocked_;
    room_.wait(lock, has_room);
    --num_blocked_;
  }
  clock_gettime(CLOCK_MONOTONIC, &after);
  bump(table.counted.blocked_ns, (after.tv_sec - before.tv_sec) * 1'000'000'000 + after.tv_nsec - before.tv_nsec);
}

int64_t Engine::cpu_ns() {
  timespec time{};
#ifndef __APPLE__
  clockid_t clock;
  if (pthread_getcpuclockid(thread_->native_handle(), &clock) == 0) clock_gettime(clock, &time);
#endif
  return time.tv_sec * 1'000'000'000 + time.tv_nsec + queue_->cpu_ns();
}

void Engine::run() {
  for (int i = 0; i < options_.depth; ++i) {
    jobs_.push_back(std::make_unique<Job>());
    jobs_.back()->frame = queue_->frames() + i * kPageBytes;
    free_jobs_.push_back(jobs_.back().get());
  }
  while (take_calls()) {
    for (Call& call : taken_) handle(std::move(call));
    taken_.clear();
    send();
    wake_blocked();
    // A quarter of what is under way at once: fewer wakes per I/O, and the queue stays three quarters full.
    const auto in_flight = static_cast<int64_t>(jobs_.size() - free_jobs_.size());
    queue_->wait(in_flight / 4, ended_);
    for (Io* io : ended_) finish(*static_cast<Job*>(io));
    ended_.clear();
  }
}

// False when the engine ends: no store is left then, so there is nothing under way.
bool Engine::take_calls() {
  const std::lock_guard lock(mutex_);
  taken_.swap(calls_);
  return !ending_;
}

// Before the engine sleeps: whatever gave room, or failed a table, since it last did.
void Engine::wake_blocked() {
  const std::lock_guard lock(mutex_);
  if (num_blocked_) room_.notify_all();
}

void Engine::handle(Call&& call) {
  Table& table = *call.table;
  switch (call.kind) {
    case Call::Kind::read:
      return start_reading(std::move(call));
    case Call::Kind::write:
      return start_writing(call);
    case Call::Kind::attach:
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
  sort_by_row(call.moves);
  are_rows_of(*call.table, call.moves);
  ++call.table->calls_reading;
  reading_.push_back(std::make_unique<Call>(std::move(call)));
}

void Engine::start_writing(Call& call) {
  Table& table = *call.table;
  const int64_t record_bytes = table.file.layout.record_bytes;
  sort_by_row(call.moves);
  if (are_rows_of(table, call.moves) && !table.failure.get()) {
    for (const Move& move : call.moves) {
      const auto [unit, is_new] = table.make(table.file.layout.unit_of(move.row));
      table.put(*unit, move.row, call.records.get() + move.slot * record_bytes);
      if (is_new) {
        dirty_.push_back(unit);
        add_waiting(table, table.file.layout.unit_bytes);
      }
    }
    bump(table.counted.written_rows, static_cast<int64_t>(call.moves.size()));
  }
  add_waiting(table, -static_cast<int64_t>(call.moves.size()) * record_bytes);
}

std::shared_ptr<Engine> start_engine(const EngineOptions& options, std::string& reason) {
  // In a forked child the thread is not there to be joined, and locks may be held for ever: there, it is left alone.
  const auto end = [](Engine* engine) {
    if (engine->is_of_this_process()) delete engine;
  };
  const std::shared_ptr<Engine> engine(new Engine(options), end);
  return engine->open(reason) ? engine : nullptr;
}

}  // namespace hotrow
