// The map from rows to slots, and which row makes room; contract in hotrow/row_cache.h.
#include <hotrow/denormals.h>
#include <hotrow/kernels.h>
#include <hotrow/memory.h>
#include <hotrow/row_cache.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace hotrow {
namespace {

constexpr uint32_t kMostUses = 15;
constexpr int64_t kHugePageBytes = 2 << 20;
constexpr int64_t kKeptOverflowBytes = 256 << 10;  // of free slots beside the cache, that every table may keep
constexpr int64_t kAhead = 12;                     // ids between what they need is fetched and used
constexpr size_t kMostBrought = 1 << 16;           // rows that are read together when a table begins with saved ones

}  // namespace

RowCache::RowCache(const CacheSizes& sizes, InitialRow initial, std::shared_ptr<Store> store, Slots slots)
    : sizes_(sizes),
      initial_(std::move(initial)),
      store_(std::move(store)),
      slots_(std::move(slots)),
      exists_(sizes.num_rows),
      changed_(sizes.num_rows) {
  map_.resize(least_map());
  places_.resize(static_cast<size_t>(sizes_.cached));
  row_.resize(static_cast<size_t>(initial_.dim));
  for (int64_t row = 0; row < sizes_.pinned; ++row) create(static_cast<uint32_t>(row), row);
}

int64_t RowCache::num_bytes() const {
  const size_t bytes = places_.capacity() * sizeof(Entry) + free_overflow_.capacity() * 4;
  return map_bytes() + exists_.num_bytes() + changed_.num_bytes() + static_cast<int64_t>(bytes);
}

// ---- the map

int32_t RowCache::find(uint32_t row) const {
  for (size_t at = home(row); map_[at] != 0; at = at + 1 == map_.size() ? 0 : at + 1) {
    const int32_t place = map_[at] - 1;
    if (places_[static_cast<size_t>(place)].row == row) return place;
  }
  return kNone;
}

void RowCache::insert(uint32_t row, int32_t place) {
  if (4 * (num_mapped_ + 1) > 3 * static_cast<int64_t>(map_.size())) resize_map(2 * map_.size());
  size_t at = home(row);
  while (map_[at] != 0) at = at + 1 == map_.size() ? 0 : at + 1;
  map_[at] = place + 1;
  ++num_mapped_;
}

// Called when overflow fills the map, and when it is over.
void RowCache::resize_map(size_t size) {
  const std::vector<int32_t> old = std::exchange(map_, std::vector<int32_t>(size));
  for (const int32_t entry : old) {
    if (entry == 0) continue;
    size_t at = home(places_[static_cast<size_t>(entry - 1)].row);
    while (map_[at] != 0) at = at + 1 == map_.size() ? 0 : at + 1;
    map_[at] = entry;
  }
}

// Entries behind the hole move into it if probing would otherwise stop there.
void RowCache::erase(uint32_t row) {
  const size_t size = map_.size();
  size_t hole = home(row);
  while (places_[static_cast<size_t>(map_[hole] - 1)].row != row) hole = hole + 1 == size ? 0 : hole + 1;
  for (size_t at = hole;;) {
    at = at + 1 == size ? 0 : at + 1;
    if (map_[at] == 0) break;
    const size_t wanted = home(places_[static_cast<size_t>(map_[at] - 1)].row);
    const bool reaches = hole <= at ? hole < wanted && wanted <= at : hole < wanted || wanted <= at;
    if (reaches) continue;
    map_[hole] = map_[at];
    hole = at;
  }
  map_[hole] = 0;
  --num_mapped_;
}

// ---- which row makes room

// Returns a cached place that holds nothing or whose row makes room; kNone if a batch uses every one.
int32_t RowCache::room() {
  if (num_used_ < sizes_.cached) return static_cast<int32_t>(num_used_++);
  if (num_pinned_places_ >= sizes_.cached) return kNone;
  for (;;) {
    const auto place = static_cast<int32_t>(hand_);
    hand_ = hand_ + 1 == sizes_.cached ? 0 : hand_ + 1;
    Entry& entry = places_[static_cast<size_t>(place)];
    if (entry.pins != 0) continue;
    if (entry.uses == 0) return place;
    --entry.uses;
  }
}

int32_t RowCache::overflow_place() {
  if (!free_overflow_.empty()) {
    const int32_t place = free_overflow_.back();
    free_overflow_.pop_back();
    return place;
  }
  places_.emplace_back();
  return static_cast<int32_t>(places_.size() - 1);
}

// ---- rows come and go

void RowCache::create(uint32_t row, int64_t slot) {
  const InitialRow& first = initial_;
  const DenormalMode mode(Denormals::kept);
  kernels().fill_uniform(first.key, first.births.of(row), 1, 1, first.births.column, first.dim, first.bound,
                         first.zero_rows, row_.data());
  const auto at = [&](size_t part) { return slots_.parts[part].base + slot * slots_.parts[part].bytes; };
  size_t part = 0;
  kernels().store_row(row_.data(), first.dim, first.storage, at(0),
                      first.storage == Storage::split ? reinterpret_cast<uint16_t*>(at(++part)) : nullptr);
  for (const InitialState& state : first.states) {
    float* to = reinterpret_cast<float*>(at(++part));
    for (int64_t j = 0; j < state.dim; ++j) {
      const float w = state.dim == first.dim ? row_[static_cast<size_t>(j)] : 0.0f;
      const float sign = static_cast<float>((w > 0) - (w < 0));
      // Without a needless + 0, which would make +0 of -0.
      to[j] = state.of_weight == 0 ? state.constant : state.of_weight * w + 0.0F;  // never -0.0
      if (state.of_sign != 0) to[j] = to[j] + state.of_sign * sign;
    }
  }
}

void RowCache::evict(int32_t place, std::vector<Move>& moves) {
  Entry& entry = places_[static_cast<size_t>(place)];
  if (entry.row == kNoRow) return;
  if (entry.dirty) {
    moves.push_back({entry.row, slot_of_place(place)});
    ++counters_.written_rows;
  }
  erase(entry.row);
  entry = {};
}

int32_t RowCache::place_for(uint32_t row, bool keep, std::vector<Move>& evicted) {
  // If overflow is full, some cached place is empty, because there are as many slots as rows.
  int32_t place = keep || overflow_is_full() ? room() : kNone;
  if (place == kNone) {
    place = overflow_place();
    counters_.overflow_rows += keep;
  } else {
    counters_.evicted_rows += places_[static_cast<size_t>(place)].row != kNoRow;
    evict(place, evicted);
  }
  places_[static_cast<size_t>(place)].row = row;
  insert(row, place);
  return place;
}

void RowCache::pin(int32_t place, uint32_t batch, bool keep, Pins& pins) {
  Entry& entry = places_[static_cast<size_t>(place)];
  if (entry.batch == batch) return;
  if (keep && entry.batch != 0 && entry.uses < kMostUses) ++entry.uses;
  entry.batch = batch;
  num_pinned_places_ += entry.pins++ == 0 && place < sizes_.cached;
  pins.slots.push_back(place);
  ++counters_.rows;
}

template <class Id>
bool RowCache::admit(const Id* ids, int64_t n, int32_t* slot_of, uint32_t batch, bool keep, Pins& pins,
                     Ticket& ticket) {
  std::vector<int64_t> missing;
  const auto num_rows = static_cast<uint64_t>(sizes_.num_rows), pinned = static_cast<uint64_t>(sizes_.pinned);
  counters_.lookups += n;
  for (int64_t i = 0; i < n; ++i) {
    // Only a hint: an id that is out of range is found below.
    if (i + kAhead < n) __builtin_prefetch(&map_[home(static_cast<uint32_t>(ids[i + kAhead]))]);
    const auto id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
    if (id >= num_rows) return false;
    if (id < pinned) {
      slot_of[i] = static_cast<int32_t>(id);
      ++counters_.pinned_lookups;
      continue;
    }
    const int32_t place = find(static_cast<uint32_t>(id));
    if (place == kNone) {
      missing.push_back(i);
      exists_.fetch(static_cast<uint32_t>(id));
      continue;
    }
    const int64_t before = counters_.rows;
    pin(place, batch, keep, pins);
    counters_.hit_rows += counters_.rows - before;
    ++counters_.hit_lookups;
    slot_of[i] = static_cast<int32_t>(slot_of_place(place));
  }
  // Only after all resident rows are pinned, so that no row of this batch evicts another.
  std::vector<Move> evicted, arriving, fresh;
  for (const int64_t i : missing) {
    const auto row = static_cast<uint32_t>(ids[i]);
    int32_t place = find(row);
    if (place == kNone) {
      place = place_for(row, keep, evicted);
      pin(place, batch, keep, pins);
      (exists_.has(row) ? arriving : fresh).push_back({row, slot_of_place(place)});
    }
    slot_of[i] = static_cast<int32_t>(slot_of_place(place));
  }
  // In this order: a slot is copied out before anything is read or created in it.
  if (!evicted.empty()) store_->write(evicted, slots_);
  for (const Move& move : fresh) create(static_cast<uint32_t>(move.row), move.slot);
  if (!arriving.empty()) store_->read(arriving, slots_, ticket);
  counters_.created_rows += static_cast<int64_t>(fresh.size());
  counters_.read_rows += static_cast<int64_t>(arriving.size());
  return true;
}

template <class Id>
bool RowCache::holds(const Id* ids, int64_t n, const int32_t* slot_of) const {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = slot_of[i] - sizes_.pinned;
    const int64_t row = place < 0 ? slot_of[i] : int64_t{places_[static_cast<size_t>(place)].row};
    if (row != static_cast<int64_t>(ids[i])) return false;
  }
  return true;
}

void RowCache::release(Pins& pins, bool dirty) {
  std::vector<Move> leaving;
  const std::vector<int32_t> pinned = std::exchange(pins.slots, {});
  const auto n = static_cast<int64_t>(pinned.size());
  for (int64_t i = 0; i < n; ++i) {
    if (dirty && i + kAhead < n) {
      const uint32_t ahead = places_[static_cast<size_t>(pinned[static_cast<size_t>(i + kAhead)])].row;
      exists_.fetch(ahead);
      changed_.fetch(ahead);
    }
    const int32_t place = pinned[static_cast<size_t>(i)];
    Entry& entry = places_[static_cast<size_t>(place)];
    entry.dirty = entry.dirty || dirty;
    if (dirty) mark(entry.row);
    if (--entry.pins != 0) continue;
    if (place < sizes_.cached) {
      --num_pinned_places_;
    } else {
      evict(place, leaving);
      free_overflow_.push_back(place);
    }
  }
  if (!leaving.empty()) store_->write(leaving, slots_);
  drop_overflow();
  // Shrinks only well below the load at which it grows, so that one batch does not do both.
  if (map_.size() > least_map() && 8 * num_mapped_ <= 5 * static_cast<int64_t>(least_map())) resize_map(least_map());
}

// Gives memory back after a checkpoint has read many rows: that of all slots behind the last one in use.
void RowCache::drop_overflow() {
  const auto bytes_of = [&](size_t places) { return static_cast<int64_t>(places) * slots_.record_bytes(); };
  if (bytes_of(free_overflow_.size()) <= kKeptOverflowBytes) return;
  size_t end = places_.size();
  while (end > static_cast<size_t>(sizes_.cached) && places_[end - 1].row == kNoRow) --end;
  const size_t free = places_.size() - end;
  if (bytes_of(free) <= kKeptOverflowBytes) return;
  const int64_t first = slot_of_place(static_cast<int32_t>(end));
  for (const Part& part : slots_.parts) {
    // The last one in use may have brought a huge page, of which the rest was never a slot.
    const int64_t slots = std::min(static_cast<int64_t>(free) + kHugePageBytes / part.bytes, sizes_.num_rows - first);
    drop_pages_within(part.base + first * part.bytes, static_cast<size_t>(slots * part.bytes));
  }
  places_.resize(end);
  std::erase_if(free_overflow_, [&](int32_t place) { return static_cast<size_t>(place) >= end; });
}

void RowCache::restart_batches() {
  for (Entry& entry : places_) entry.batch = std::min(entry.batch, uint32_t{1});
}

bool RowCache::begin_with(std::shared_ptr<Store> store, const RowBits& rows) {
  store_ = std::move(store);
  exists_ = rows;
  std::vector<Move> piece;
  bool good = true;
  const auto bring = [&](size_t most) {
    if (piece.size() < most) return;
    Ticket ticket;
    store_->read(piece, slots_, ticket);
    good = ticket.wait() && good;
    counters_.read_rows += static_cast<int64_t>(std::exchange(piece, {}).size());
  };
  const auto add = [&](int64_t row, int64_t slot) {
    if (!exists_.has(static_cast<uint32_t>(row))) return;
    piece.push_back({row, slot});
    bring(kMostBrought);
  };
  for (int64_t row = 0; row < sizes_.pinned; ++row) add(row, row);
  for (size_t place = 0; place < places_.size(); ++place) {
    if (places_[place].row != kNoRow) add(places_[place].row, slot_of_place(static_cast<int32_t>(place)));
  }
  bring(1);
  return good;
}

void RowCache::mark_pinned(const int32_t* slots, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < sizes_.pinned) mark(static_cast<uint32_t>(slots[i]));
  }
}

void RowCache::write_back() {
  if (sizes_.pinned == sizes_.num_rows) return;  // no row ever leaves, and the store is never asked
  std::vector<Move> moves;
  for (int64_t row = 0; row < sizes_.pinned; ++row) moves.push_back({row, row});
  for (size_t place = 0; place < places_.size(); ++place) {
    Entry& entry = places_[place];
    if (entry.row == kNoRow || !entry.dirty) continue;
    moves.push_back({entry.row, slot_of_place(static_cast<int32_t>(place))});
    entry.dirty = false;
  }
  counters_.written_rows += static_cast<int64_t>(moves.size());
  store_->write(moves, slots_);
}

template bool RowCache::admit(const int32_t*, int64_t, int32_t*, uint32_t, bool, Pins&, Ticket&);
template bool RowCache::admit(const int64_t*, int64_t, int32_t*, uint32_t, bool, Pins&, Ticket&);
template bool RowCache::holds(const int32_t*, int64_t, const int32_t*) const;
template bool RowCache::holds(const int64_t*, int64_t, const int32_t*) const;

}  // namespace hotrow
