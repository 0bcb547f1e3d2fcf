// Units that wait to be written, and their bytes; see engine.h.
#include <hotrow/memory.h>

#include <algorithm>
#include <bit>
#include <new>

#include "engine.h"

namespace hotrow {
namespace {

constexpr int64_t kChunkBytes = 1 << 16;  // some hundred sectors: few system calls, and little idle memory

}  // namespace

// A write beyond the end of a truncated file makes it longer again, though never as long as it was (kTailBytes), and
// the rows between read as zeros.
bool Table::is_whole() {
  return hotrow::is_whole(file.fd, file.layout.file_bytes(file.num_rows), file.table, file.path, failure);
}

// ---- units

DirtyUnit* Table::make(std::byte* at, Chunk* chunk, int64_t unit) {
  DirtyUnit* made = new (at) DirtyUnit{this, unit, chunk, nullptr, 0, true};
  std::memset(made->known(), 0, static_cast<size_t>(known_words) * sizeof(uint64_t));
  // The bytes after the last row are written too.
  const int64_t rows_bytes = file.layout.unit_rows * file.layout.record_bytes;
  std::memset(made->image() + rows_bytes, 0, static_cast<size_t>(file.layout.unit_bytes - rows_bytes));
  return made;
}

namespace {

void set_known(DirtyUnit& unit, int64_t place) {
  unit.num_known += !unit.knows(place);
  unit.known()[place / 64] |= uint64_t{1} << (place % 64);
}

// Copies the rows for which takes(place) is true from another image of the unit.
template <class Takes>
void take(DirtyUnit& unit, const std::byte* from, const Takes& takes) {
  const BlockLayout& layout = unit.table->file.layout;
  for (int64_t place = 0; place < layout.unit_rows; ++place) {
    if (!takes(place)) continue;
    const int64_t at = place * layout.record_bytes;
    std::memcpy(unit.image() + at, from + at, static_cast<size_t>(layout.record_bytes));
    set_known(unit, place);
  }
}

}  // namespace

void Table::put(DirtyUnit& unit, int64_t row, const Slots& slots, int64_t slot) {
  const BlockLayout& layout = unit.table->file.layout;
  slots.gather(slot, unit.image() + layout.place_in_unit(row));
  set_known(unit, row % layout.unit_rows);
}

void Table::merge(DirtyUnit& unit, DirtyUnit& newer) {
  take(unit, newer.image(), [&](int64_t place) { return newer.knows(place); });
  unit.changed = unit.changed || newer.num_known > 0;
}

void Table::complete(DirtyUnit& unit, const std::byte* on_disk) {
  take(unit, on_disk, [&](int64_t place) { return !unit.knows(place); });
}

// ---- their memory

WriteBuffer::WriteBuffer(int64_t most_bytes) : most_bytes_(most_bytes) {}

WriteBuffer::~WriteBuffer() {
  if (filling_) release(filling_);
  for (Chunk* chunk : free_) release(chunk);
}

// A chunk made for one large unit may have less than a page left over, which smaller units use.
int64_t WriteBuffer::most_units(int64_t unit_bytes) const {
  return (std::max(most_bytes_, kChunkBytes) + kPageBytes) / unit_bytes + 1;
}

WriteBuffer::Units WriteBuffer::take(int64_t unit_bytes, int64_t count, const FailureSlot& failure) {
  using Clock = std::chrono::steady_clock;
  Units place;
  std::unique_lock lock(mutex_);
  while (!filling_ || filling_->size - filling_->filled < unit_bytes) {
    if (open_chunk(unit_bytes)) break;
    if (failure.get()) return place;
    const auto before = Clock::now();
    if (num_blocked_++ == 0) blocked_since_ = before;
    changed_.wait(lock);
    const auto after = Clock::now();
    if (--num_blocked_ == 0) blocked_ns_ += std::chrono::nanoseconds(after - blocked_since_).count();
    place.blocked_ns += std::chrono::nanoseconds(after - before).count();
  }
  place.chunk = filling_;
  place.bytes = static_cast<std::byte*>(filling_->pages.data) + filling_->filled;
  place.count = std::min(count, (filling_->size - filling_->filled) / unit_bytes);
  filling_->filled += place.count * unit_bytes;
  filling_->num_units += place.count;
  return place;
}

// The previous chunk is not freed while its units wait: it comes back with the last of them.
bool WriteBuffer::open_chunk(int64_t unit_bytes) {
  if (filling_ && filling_->num_units == 0) free_.push_back(filling_), filling_ = nullptr;
  const auto fits = [&](const Chunk* chunk) { return chunk->size >= unit_bytes; };
  const auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
  if (found != free_.rend()) {
    filling_ = *found;
    free_.erase(std::next(found).base());
    return true;
  }
  const int64_t size = std::max(kChunkBytes, (unit_bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  while (num_bytes() + size > most_bytes_ && !free_.empty()) {
    release(free_.back());
    free_.pop_back();
  }
  if (num_bytes() + size > most_bytes_ && num_bytes() > 0) return false;
  const Pages pages = allocate_pages(static_cast<size_t>(size));
  if (!pages.data) throw std::bad_alloc();
  filling_ = new Chunk{pages, size};
  num_bytes_ += filling_->num_bytes();
  return true;
}

void WriteBuffer::release(Chunk* chunk) {
  num_bytes_ -= chunk->num_bytes();
  free_pages(chunk->pages);
  delete chunk;
}

void WriteBuffer::give_back(const std::vector<Chunk*>& chunks, bool look_again) {
  const std::lock_guard lock(mutex_);
  for (Chunk* chunk : chunks) {
    if (--chunk->num_units > 0) continue;
    look_again = true;
    chunk->filled = 0;
    if (chunk->size > kChunkBytes) {  // made for one unit
      if (chunk == filling_) filling_ = nullptr;
      release(chunk);
    } else if (chunk != filling_) {
      free_.push_back(chunk);
    }
  }
  if (look_again && num_blocked_) changed_.notify_all();
}

// ---- where they are

UnitIndex::UnitIndex(int64_t most_units) {
  const size_t size = std::bit_ceil(static_cast<size_t>(2 * most_units + 2));
  units_.resize(size);
  shift_ = 64 - std::countr_zero(size);
}

size_t UnitIndex::home(const Table* table, int64_t unit) const {
  const uint64_t key = static_cast<uint64_t>(unit) + (reinterpret_cast<uint64_t>(table) << 20);
  return static_cast<size_t>(key * 0x9E3779B97F4A7C15u >> shift_);
}

// The position of the unit, or where it would be inserted.
size_t UnitIndex::place_of(const Table* table, int64_t unit) const {
  const size_t mask = units_.size() - 1;
  size_t at = home(table, unit);
  while (units_[at] && (units_[at]->unit != unit || units_[at]->table != table)) at = (at + 1) & mask;
  return at;
}

DirtyUnit* UnitIndex::find(const Table* table, int64_t unit) const { return units_[place_of(table, unit)]; }

void UnitIndex::insert(DirtyUnit* unit) { units_[place_of(unit->table, unit->unit)] = unit; }

// Units behind the hole move into it if probing would otherwise stop there.
void UnitIndex::erase(const DirtyUnit* unit) {
  const size_t mask = units_.size() - 1;
  size_t hole = place_of(unit->table, unit->unit);
  for (size_t at = (hole + 1) & mask; units_[at]; at = (at + 1) & mask) {
    const size_t wanted = home(units_[at]->table, units_[at]->unit);
    if (((at - wanted) & mask) < ((at - hole) & mask)) continue;
    units_[hole] = units_[at];
    hole = at;
  }
  units_[hole] = nullptr;
}

}  // namespace hotrow
