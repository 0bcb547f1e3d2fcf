// The thread that does the I/O of all block stores: takes calls in order, keeps the queue full, gives results out.
//
// Everything that decides which bytes are the newest happens on this one thread. A unit is in at most one write at a
// time; rows written meanwhile change its image, which is written again after. Reads of rows with an image are served
// from it; others may read beside a write of their sector, which leaves their bytes as they were.
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

std::string rows_text(int64_t first, int64_t last) {
  if (first == last) return "row " + std::to_string(first);
  return "rows " + std::to_string(first) + " to " + std::to_string(last);
}

const char* cure_of(int error) {
  if (error == ENOSPC || error == EDQUOT) return "free some space on that disk";
  if (error == 0) return "the file ends before its last row: something truncated it; restore it";
  return "the disk or its driver has failed: look into the kernel's log (dmesg)";
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
  if (num_blocked_) room_.notify_all();
  return !ending_;
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

// Reads go first, for somebody waits for them, but leave a quarter of the queue to writes; those take at most half.
void Engine::send() {
  const auto reserve = [&] {
    return dirty_.empty() ? 0 : std::max<int64_t>(options_.depth / 4 - writes_in_flight_, 0);
  };
  while (!reading_.empty() && static_cast<int64_t>(free_jobs_.size()) > reserve()) {
    Call& call = *reading_.front();
    read_next(call);
    if (call.next < call.moves.size()) continue;
    // Owned by its jobs from here on, or ended.
    Call* whole = reading_.front().release();
    reading_.pop_front();
    if (whole->ended == whole->moves.size()) delete whole;
  }
  const int64_t most_writes = std::max(options_.depth / 2, 1);
  while (!dirty_.empty() && writes_in_flight_ < most_writes && !free_jobs_.empty()) write_next();
  flush_and_detach();
}

// Sends the next page of a read; rows whose write waits are served on the way.
void Engine::read_next(Call& call) {
  Table& table = *call.table;
  const BlockLayout& layout = table.file.layout;
  if (table.failure.get()) {
    const size_t rest = call.moves.size() - call.next;
    call.next = call.moves.size();
    return end_moves(call, rest, false);
  }
  size_t served = 0;
  for (; call.next < call.moves.size(); ++call.next, ++served) {
    const Move& move = call.moves[call.next];
    const std::byte* record = table.waiting_bytes_of(move.row);
    if (!record) break;
    call.slots.scatter(record, move.slot);
  }
  bump(table.counted.served_from_queue, static_cast<int64_t>(served));
  if (served) end_moves(call, served, true);
  if (call.next == call.moves.size()) return;

  const size_t first = call.next;
  const int64_t unit = layout.unit_of(call.moves[first].row), page = layout.page_of(unit);
  int64_t last_unit = unit;
  for (++call.next; call.next < call.moves.size(); ++call.next) {
    const int64_t row = call.moves[call.next].row, next_unit = layout.unit_of(row);
    if (layout.page_of(next_unit) != page || table.waiting_bytes_of(row)) break;
    last_unit = next_unit;
  }
  Job& job = take_job(Io::Kind::read, table, unit, (last_unit - unit + 1) * layout.unit_bytes);
  job.call = &call;
  job.first_move = first;
  job.last_move = call.next;
  queue_->submit(&job);
}

// The last moves to end take the call with them, unless it still stands in the queue of calls.
void Engine::end_moves(Call& call, size_t count, bool good) {
  call.ended += count;
  if (call.ended == call.moves.size()) --call.table->calls_reading;
  const auto n = static_cast<int64_t>(count);
  if (good) bump(call.table->counted.read_rows, n);
  good ? call.ticket->done(n) : call.ticket->fail(n);
}

// Sends the unit that has waited longest, together with those behind it in the queue that lie behind it in its page.
void Engine::write_next() {
  Dirty* first = dirty_.front();
  dirty_.pop_front();
  Table& table = *first->table;
  if (table.failure.get()) return drop(first);
  const BlockLayout& layout = table.file.layout;
  std::array<Dirty*, kMostUnits> units;
  units[0] = first;
  int64_t num_units = 1;
  bool whole = first->num_known == layout.unit_rows;
  while (!dirty_.empty() && num_units < layout.page_units) {
    Dirty* next = dirty_.front();
    const int64_t unit = first->unit + num_units;
    if (next->table != &table || next->unit != unit || layout.page_of(unit) != layout.page_of(first->unit)) break;
    dirty_.pop_front();
    whole = whole && next->num_known == layout.unit_rows;
    units[static_cast<size_t>(num_units++)] = next;
  }
  Job& job = take_job(Io::Kind::read, table, first->unit, num_units * layout.unit_bytes);
  job.units = units;
  job.num_units = num_units;
  ++writes_in_flight_;
  job.merging = !whole;
  if (whole) return start_write(job);
  bump(table.counted.read_modify_writes, 1);
  queue_->submit(&job);
}

void Engine::start_write(Job& job) {
  const int64_t unit_bytes = job.table->file.layout.unit_bytes;
  for (int64_t i = 0; i < job.num_units; ++i) {
    Dirty* unit = job.units[static_cast<size_t>(i)];
    std::memcpy(job.base + i * unit_bytes, unit->image, static_cast<size_t>(unit_bytes));
    unit->changed = false;
  }
  job.kind = Io::Kind::write;
  job.merging = false;
  job.data = job.base;
  job.offset = job.table->file.layout.offset_of(job.unit);
  job.bytes = job.num_units * unit_bytes;
  queue_->submit(&job);
}

// A flush waits until nothing of its table waits; what is written meanwhile, it writes too.
void Engine::flush_and_detach() {
  std::erase_if(ending_tables_, [&](Table* table) {
    if (!table->dirty.empty()) return false;
    if (table->failure.get()) {
      for (Ticket* ticket : table->flushes) ticket->fail(1);
      table->flushes.clear();
    }
    if (!table->flushes.empty()) {
      if (free_jobs_.empty()) return false;
      Job& job = take_job(Io::Kind::sync, *table, 0, 0);
      job.flushes.swap(table->flushes);
      queue_->submit(&job);
    }
    if (!table->leaving) return true;
    if (table->in_flight || table->calls_reading) return false;
    queue_->remove_file(table->queue_file);
    table->leaving->done(1);  // the table may be gone from here on
    return true;
  });
}

Job& Engine::take_job(Io::Kind kind, Table& table, int64_t unit, int64_t bytes) {
  Job& job = *free_jobs_.back();
  free_jobs_.pop_back();
  job.in_frames = bytes <= kPageBytes;
  job.base = job.in_frames
                 ? job.frame
                 : static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{kPageBytes}));
  static_cast<Io&>(job) = {
      kind, table.file.fd, table.queue_file, job.base, job.in_frames, table.file.layout.offset_of(unit), bytes, 0};
  job.table = &table;
  job.unit = unit;
  job.call = nullptr;
  job.num_units = 0;
  job.merging = false;
  ++table.in_flight;
  return job;
}

void Engine::give_back(Job& job) {
  if (!job.in_frames) ::operator delete(job.base, std::align_val_t{kPageBytes});
  --job.table->in_flight;
  free_jobs_.push_back(&job);
}

// Less than was asked for is no error yet: the rest is asked for again, and then either comes or names its error.
void Engine::finish(Job& job) {
  Table& table = *job.table;
  const bool is_write = job.kind == Io::Kind::write;
  if (table.inject_after.load() > 0 && is_write == table.inject_write && table.inject_after.fetch_sub(1) == 1) {
    job.result = -table.inject_error;
  }
  if (job.result == -EINTR || job.result == -EAGAIN) return queue_->submit(&job);
  if (job.kind == Io::Kind::sync) return finish_sync(job, job.result == 0);
  if (job.result > 0) bump(is_write ? table.counted.written_bytes : table.counted.read_bytes, job.result);
  if (0 < job.result && job.result < job.bytes) {
    job.data += job.result;
    job.offset += job.result;
    job.bytes -= job.result;
    return queue_->submit(&job);
  }
  const bool good = job.result == job.bytes;
  if (!good) fail(job);
  bump(is_write ? table.counted.writes : table.counted.reads, 1);
  bump(num_ios_, 1);
  job.call ? finish_read(job, good) : finish_write(job, good);
}

void Engine::finish_read(Job& job, bool good) {
  Call& call = *job.call;
  const BlockLayout& layout = job.table->file.layout;
  if (good) {
    for (size_t i = job.first_move; i < job.last_move; ++i) {
      const Move& move = call.moves[i];
      const int64_t unit = layout.unit_of(move.row) - job.unit;
      call.slots.scatter(job.base + unit * layout.unit_bytes + layout.place_in_unit(move.row), move.slot);
    }
  }
  end_moves(call, job.last_move - job.first_move, good);
  give_back(job);
  if (call.ended == call.moves.size()) delete &call;
}

void Engine::finish_write(Job& job, bool good) {
  Table& table = *job.table;
  if (good && job.merging) {
    const int64_t unit_bytes = table.file.layout.unit_bytes;
    for (int64_t i = 0; i < job.num_units; ++i)
      table.complete(*job.units[static_cast<size_t>(i)], job.base + i * unit_bytes);
    return start_write(job);
  }
  for (int64_t i = 0; i < job.num_units; ++i) {
    Dirty* unit = job.units[static_cast<size_t>(i)];
    if (good && unit->changed) {
      dirty_.push_back(unit);
    } else {
      drop(unit);
    }
  }
  --writes_in_flight_;
  give_back(job);
}

void Engine::finish_sync(Job& job, bool good) {
  if (!good) fail(job);
  const bool all_good = good && !job.table->failure.get();
  std::vector<Ticket*> flushes;
  flushes.swap(job.flushes);
  give_back(job);
  for (Ticket* ticket : flushes) all_good ? ticket->done(1) : ticket->fail(1);
}

void Engine::drop(Dirty* unit) {
  Table& table = *unit->table;
  add_waiting(table, -table.file.layout.unit_bytes);
  table.drop(unit);
}

void Engine::fail(Job& job) {
  const TableFile& file = job.table->file;
  const int error = job.result < 0 ? static_cast<int>(-job.result) : 0;
  std::string what = job.kind == Io::Kind::sync ? "syncing" : job.kind == Io::Kind::write ? "writing" : "reading";
  if (job.call) {
    what += " " + rows_text(job.call->moves[job.first_move].row, job.call->moves[job.last_move - 1].row) + " of";
  } else if (job.kind != Io::Kind::sync) {
    const int64_t first = job.unit * file.layout.unit_rows;
    const int64_t last = first + job.num_units * file.layout.unit_rows - 1;
    what += " " + rows_text(first, std::min(last, job.table->num_rows.load() - 1)) + " of";
  }
  what += " table '" + file.table + "' in " + file.path + ": " +
          (error ? std::string(std::strerror(error)) : std::string("nothing moved"));
  job.table->failure.set(what + ". Nothing was trained on wrong rows; " + cure_of(error) +
                         ", then resume from the last checkpoint");
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
