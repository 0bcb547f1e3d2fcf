// The I/Os of the engine: keeps the queue full and hands out results.
//
// Everything that decides which bytes are newest happens on the engine's one thread. A unit is in at most one write at
// a time; rows written meanwhile change its image, which is then written again. Reads of rows with an image are served
// from it; other reads may run during a write of their sector, because the write leaves their bytes unchanged.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <thread>

#include "engine.h"

namespace hotrow {
namespace {

constexpr std::chrono::milliseconds kShortOfResources{1};  // before a retry

const char* cure_of(int error) {
  if (error == ENOSPC || error == EDQUOT) return "free some space on that disk";
  if (error == 0) return "the file ends before its last row: something truncated it; find out what";
  return "the disk or its driver has failed: look into the kernel's log (dmesg)";
}

// "row 3", or "rows 3 to 9", or as the file names them.
std::string rows_text(const TableFile& file, int64_t first, int64_t last) {
  if (file.names) return file.names->text(first, last);
  if (first == last) return "row " + std::to_string(first);
  return "rows " + std::to_string(first) + " to " + std::to_string(last);
}

}  // namespace

// Reads go first, because a caller waits for them, but leave a quarter of the queue for writes. Writes take at most
// half.
void Engine::send() {
  const auto reserve = [&] { return !first_dirty_ ? 0 : std::max<int64_t>(options_.depth / 4 - writes_in_flight_, 0); };
  while (!reading_.empty() && static_cast<int64_t>(free_jobs_.size()) > reserve()) {
    Call& call = *reading_.front();
    read_next(call);
    if (call.next < call.moves.size()) continue;
    // From here on it is owned by its jobs, or has ended.
    Call* whole = reading_.front().release();
    reading_.pop_front();
    if (whole->ended == whole->moves.size()) delete whole;
  }
  const int64_t most_writes = std::max(options_.depth / 2, 1);
  while (first_dirty_ && writes_in_flight_ < most_writes && !free_jobs_.empty()) write_next();
  flush_and_detach();
}

// Sends the next page of a read; rows whose write waits are served directly.
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
    const std::byte* record = waiting_bytes_of(table, move.row);
    if (!record) break;
    call.slots.scatter(record, move.slot);
  }
  bump_own(table.counted.served_from_queue, static_cast<int64_t>(served));
  if (served) end_moves(call, served, true);
  if (call.next == call.moves.size()) return;

  const size_t first = call.next;
  const int64_t unit = layout.unit_of(call.moves[first].row), page = layout.page_of(unit);
  const int64_t end_unit = unit + most_units(layout);
  int64_t last_unit = unit;
  for (++call.next; call.next < call.moves.size(); ++call.next) {
    const int64_t row = call.moves[call.next].row, next_unit = layout.unit_of(row);
    if (layout.page_of(next_unit) != page || next_unit >= end_unit || waiting_bytes_of(table, row)) break;
    last_unit = next_unit;
  }
  const auto taken = take_job(Io::Kind::read, table, unit, (last_unit - unit + 1) * layout.unit_bytes);
  if (!taken) {
    call.next = call.moves.size();
    return end_moves(call, call.moves.size() - first, false);
  }
  Job& job = *taken;
  job.call = &call;
  job.first_move = first;
  job.last_move = call.next;
  queue_->submit(&job);
}

// Completes the ticket once, when all moves of the call have ended. The last moves to end also end the call, unless it
// is still queued.
void Engine::end_moves(Call& call, size_t count, bool good) {
  call.ended += count;
  call.good = call.good && good;
  if (good) bump_own(call.table->counted.read_rows, static_cast<int64_t>(count));
  if (call.ended < call.moves.size()) return;
  call.good = call.good && is_whole(*call.table);
  --call.table->calls_reading;
  const auto n = static_cast<int64_t>(call.moves.size());
  call.good ? call.ticket->done(n) : call.ticket->fail(n);
}

// Writes the oldest unit, together with units that follow it both in the queue and in its page. A unit without rows
// only fills the gap between two others, so it is dropped if it would be the first of an I/O.
void Engine::write_next() {
  DirtyUnit* first = pop_first();
  Table& table = *first->table;
  if (table.failure.get() || first->num_known == 0) return drop(first);
  const BlockLayout& layout = table.file.layout;
  const int64_t most = most_units(layout);
  std::array<DirtyUnit*, kMostUnits> units;
  units[0] = first;
  int64_t num_units = 1;
  bool whole = first->num_known == layout.unit_rows;
  while (first_dirty_ && num_units < most) {
    DirtyUnit* next = first_dirty_;
    const int64_t unit = first->unit + num_units;
    if (next->table != &table || next->unit != unit || layout.page_of(unit) != layout.page_of(first->unit)) break;
    pop_first();
    whole = whole && next->num_known == layout.unit_rows;
    units[static_cast<size_t>(num_units++)] = next;
  }
  const auto taken = take_job(Io::Kind::read, table, first->unit, num_units * layout.unit_bytes);
  if (!taken) {
    std::for_each(units.begin(), units.begin() + num_units, [&](DirtyUnit* unit) { drop(unit); });
    return;
  }
  Job& job = *taken;
  job.units = units;
  job.num_units = num_units;
  ++writes_in_flight_;
  job.merging = !whole;
  if (whole) return start_write(job);
  bump_own(table.counted.read_modify_writes, 1);
  queue_->submit(&job);
}

// How many bytes an I/O moves: of packed pages, no more than a frame if no large frame is free.
int64_t Engine::most_units(const BlockLayout& layout) const {
  return free_large_frames_.empty() ? std::max<int64_t>(kPageBytes / layout.unit_bytes, 1) : layout.page_units;
}

void Engine::start_write(Job& job) {
  const int64_t unit_bytes = job.table->file.layout.unit_bytes;
  for (int64_t i = 0; i < job.num_units; ++i) {
    DirtyUnit* unit = job.units[static_cast<size_t>(i)];
    std::memcpy(job.base + i * unit_bytes, unit->image(), static_cast<size_t>(unit_bytes));
    unit->changed = false;
  }
  job.kind = Io::Kind::write;
  job.merging = false;
  job.data = job.base;
  job.offset = job.table->file.layout.offset_of(job.unit);
  job.bytes = job.num_units * unit_bytes;
  queue_->submit(&job);
}

// A flush waits until nothing of its table waits; it also writes what is added meanwhile.
void Engine::flush_and_detach() {
  std::erase_if(ending_tables_, [&](Table* table) {
    if (table->num_dirty) return false;
    if (table->failure.get()) {
      for (Ticket* ticket : table->flushes) ticket->fail(1);
      table->flushes.clear();
    }
    if (!table->flushes.empty()) {
      if (free_jobs_.empty()) return false;
      Job& job = *take_job(Io::Kind::sync, *table, 0, 0);
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

// Null if there is no memory for a unit larger than frames; the table has failed then.
Job* Engine::take_job(Io::Kind kind, Table& table, int64_t unit, int64_t bytes) {
  Job& job = *free_jobs_.back();
  job.in_frames = bytes <= kPageBytes;
  if (job.in_frames) {
    job.base = job.frame;
  } else if (table.file.layout.packed) {
    job.base = free_large_frames_.back();
    free_large_frames_.pop_back();
    if (free_large_frames_.size() < fewest_free_) {
      fewest_free_ = free_large_frames_.size();
      bump_own(large_bytes_, kMostPackedPageBytes);
    }
  } else {
    void* memory = ::operator new(static_cast<size_t>(bytes), std::align_val_t{kPageBytes}, std::nothrow);
    if (!memory) return lose(table), nullptr;
    job.base = static_cast<std::byte*>(memory);
    bump_own(large_bytes_, bytes);
  }
  free_jobs_.pop_back();
  static_cast<Io&>(job) = {
      kind, table.file.fd, table.queue_file, job.base, job.in_frames, table.file.layout.offset_of(unit), bytes, 0};
  job.own_bytes = bytes;
  job.table = &table;
  job.unit = unit;
  job.call = nullptr;
  job.num_units = 0;
  job.merging = false;
  ++table.in_flight;
  return &job;
}

void Engine::give_back(Job& job) {
  if (!job.in_frames && job.table->file.layout.packed) {
    free_large_frames_.push_back(job.base);
  } else if (!job.in_frames) {
    ::operator delete(job.base, std::align_val_t{kPageBytes});
    bump_own(large_bytes_, -job.own_bytes);
  }
  --job.table->in_flight;
  free_jobs_.push_back(&job);
}

// A short result is not an error yet: the rest, from the last whole sector on, is requested again.
void Engine::finish(Job& job) {
  Table& table = *job.table;
  const bool is_write = job.kind == Io::Kind::write;
  if (table.inject_after.load() > 0 && is_write == table.inject_write && table.inject_after.fetch_sub(1) == 1) {
    job.result = -table.inject_error;
  }
  if (job.result == -EAGAIN) std::this_thread::sleep_for(kShortOfResources);
  if (job.result == -EINTR || job.result == -EAGAIN) return queue_->submit(&job);
  if (job.kind == Io::Kind::sync) return finish_sync(job, job.result == 0);
  if (job.result > 0) bump_own(is_write ? table.counted.written_bytes : table.counted.read_bytes, job.result);
  if (0 < job.result && job.result < job.bytes) {
    const int64_t whole = job.result & -table.file.layout.sector;
    job.data += whole;
    job.offset += whole;
    job.bytes -= whole;
    if (whole) return queue_->submit(&job);
    job.result = 0;
  }
  const bool good = job.result == job.bytes;
  if (!good) fail(job);
  bump_own(is_write ? table.counted.writes : table.counted.reads, 1);
  bump_own(num_ios_, 1);
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
      Table::complete(*job.units[static_cast<size_t>(i)], job.base + i * unit_bytes);
    return start_write(job);
  }
  for (int64_t i = 0; i < job.num_units; ++i) {
    DirtyUnit* unit = job.units[static_cast<size_t>(i)];
    if (good && unit->changed) {
      put_last(unit);
    } else {
      drop(unit);
    }
  }
  --writes_in_flight_;
  give_back(job);
}

void Engine::finish_sync(Job& job, bool good) {
  if (!good) fail(job);
  const bool all_good = good && is_whole(*job.table) && !job.table->failure.get();
  std::vector<Ticket*> flushes;
  flushes.swap(job.flushes);
  give_back(job);
  for (Ticket* ticket : flushes) all_good ? ticket->done(1) : ticket->fail(1);
}

const std::byte* Engine::waiting_bytes_of(const Table& table, int64_t row) const {
  if (table.num_dirty == 0) return nullptr;
  const BlockLayout& layout = table.file.layout;
  DirtyUnit* unit = index_.find(&table, layout.unit_of(row));
  return unit && unit->knows(row % layout.unit_rows) ? unit->image() + layout.place_in_unit(row) : nullptr;
}

void Engine::put_last(DirtyUnit* unit) {
  unit->next = nullptr;
  (first_dirty_ ? last_dirty_->next : first_dirty_) = unit;
  last_dirty_ = unit;
}

DirtyUnit* Engine::pop_first() {
  DirtyUnit* unit = first_dirty_;
  first_dirty_ = unit->next;
  return unit;
}

void Engine::drop(DirtyUnit* unit) {
  index_.erase(unit);
  --unit->table->num_dirty;
  forget(unit);
}

// Its memory may be reused as soon as the write buffer gets it back.
void Engine::forget(DirtyUnit* unit) {
  bump(unit->table->counted.waiting_bytes, -unit->table->dirty_bytes());
  left_.push_back(unit->chunk);
}

// What was read, or is reported to be on disk, is valid only if the file is still as long as its rows need.
bool Engine::is_whole(Table& table) {
  if (table.is_whole()) return true;
  has_failed_ = true;
  return false;
}

void Engine::fail(Job& job) noexcept try {
  has_failed_ = true;
  const TableFile& file = job.table->file;
  const int error = job.result < 0 ? static_cast<int>(-job.result) : 0;
  std::string what = job.kind == Io::Kind::sync ? "syncing" : job.kind == Io::Kind::write ? "writing " : "reading ";
  if (job.call) {
    what += rows_text(file, job.call->moves[job.first_move].row, job.call->moves[job.last_move - 1].row) + " of";
  } else if (job.kind != Io::Kind::sync) {
    const int64_t first = job.unit * file.layout.unit_rows;
    const int64_t last = first + job.num_units * file.layout.unit_rows - 1;
    what += rows_text(file, first, std::min(last, file.num_rows - 1)) + " of";
  }
  what += " table '" + file.table + "' in " + file.path + ": " +
          (error ? std::string(std::strerror(error)) : std::string("nothing moved"));
  job.table->failure.set(what + ". Nothing was trained on wrong rows; " + cure_of(error) +
                         ", then resume from the last checkpoint");
} catch (const std::bad_alloc&) {
  lose(*job.table);
}

}  // namespace hotrow
