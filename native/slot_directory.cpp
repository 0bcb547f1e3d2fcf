// Which rows have slots on a device; contract in hotrow/slot_directory.h.
#include <hotrow/slot_directory.h>

#include <algorithm>

namespace hotrow {
namespace {

constexpr int32_t kAbsent = -1;
constexpr int32_t kComing = -2;  // absent, and already listed as coming
constexpr int64_t kAhead = 16;   // ids between a prefetch and its use

// visit(table, first, last) of the range that each table has in a list in the order of the tables.
template <class Visit>
void by_table(const std::vector<SlotDirectory::BatchRows::Numbers>& numbers,
              int64_t SlotDirectory::BatchRows::Numbers::* which, const Visit& visit) {
  int64_t first = 0;
  for (size_t t = 0; t < numbers.size(); ++t) {
    const int64_t last = first + numbers[t].*which;
    visit(t, static_cast<size_t>(first), static_cast<size_t>(last));
    first = last;
  }
}

}  // namespace

SlotDirectory::SlotDirectory(std::span<const Sizes> sizes) : counts_(sizes.size()) {
  int64_t first_slot = 0, first_place = 0;
  for (const Sizes& own : sizes) {
    tables_.push_back({own.num_rows, own.pinned, own.cached, first_slot, first_place, own.cached, 0});
    first_slot += own.pinned + own.cached;
    first_place += own.num_rows - own.pinned;
  }
  slots_.resize(static_cast<size_t>(first_slot));
  map_.resize(static_cast<size_t>(first_place), kAbsent);
  for (const Table& table : tables_) {
    for (int64_t row = 0; row < table.pinned; ++row) slots_[static_cast<size_t>(table.first_slot + row)].row = row;
  }
}

uint32_t SlotDirectory::next_batch() {
  if (++last_batch_ == 0) {
    for (Slot& slot : slots_) slot.batch = 0;
    last_batch_ = 1;
  }
  return last_batch_;
}

template <class Id>
bool SlotDirectory::find(const Id* ids, std::span<const TableSpan> batch, BatchRows& rows) {
  const uint32_t number = next_batch();
  rows.numbers.assign(tables_.size(), {});
  bool good = true;
  // The slot of every id is written, and overwritten by the next one if this batch had it already: a branch would be
  // mispredicted, because ids are unpredictable.
  int64_t num_ids = 0;
  for (const TableSpan& own : batch) num_ids += own.last - own.first;
  if (static_cast<int64_t>(found_.size()) < 2 * num_ids) found_.resize(static_cast<size_t>(2 * num_ids));
  int64_t* const firsts[2] = {found_.data(), found_.data() + num_ids};  // pinned, passing
  int64_t* ends[2] = {firsts[0], firsts[1]};
  for (const TableSpan& own : batch) {
    const Table& table = tables_[own.table];
    const auto num_rows = static_cast<uint64_t>(table.num_rows), pinned = static_cast<uint64_t>(table.pinned);
    Slot* slots = slots_.data() + table.first_slot;
    int32_t* entries = map_.data() + table.first_place;  // of the rows behind the pinned ones
    BatchRows::Numbers& numbers = rows.numbers[own.table];
    const int64_t* const before[2] = {ends[0], ends[1]};
    for (int64_t i = own.first; i < own.last && good; ++i) {
      // Prefetches entries twice as far ahead as the slots that they point to. The range of ids is checked below.
      if (i + 2 * kAhead < own.last) {
        const auto ahead = static_cast<uint64_t>(static_cast<int64_t>(ids[i + 2 * kAhead]));
        if (ahead >= pinned && ahead < num_rows) __builtin_prefetch(entries + (ahead - pinned), 1);
      }
      if (i + kAhead < own.last) {
        const auto ahead = static_cast<uint64_t>(static_cast<int64_t>(ids[i + kAhead]));
        const bool has_slot = ahead < pinned || (ahead < num_rows && entries[ahead - pinned] >= 0);
        if (has_slot) __builtin_prefetch(slots + (ahead < pinned ? ahead : entries[ahead - pinned]), 1);
      }
      const auto row = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
      if (row >= num_rows) {
        good = false;
        break;
      }
      const bool passes = row >= pinned;
      auto slot = static_cast<int64_t>(row);
      if (passes) {
        int32_t& entry = entries[row - pinned];
        slot = entry;
        if (slot == kAbsent) {
          entry = kComing;
          rows.coming.push_back(table.place_of(static_cast<int64_t>(row)));
          ++numbers.coming;
        }
        if (slot < 0) continue;
      }
      int64_t*& end = ends[passes];
      *end = table.first_slot + slot;
      end += slots[slot].batch != number;
      slots[slot].batch = number;
    }
    numbers.pinned += ends[0] - before[0];
    numbers.passing += ends[1] - before[1];
  }
  rows.pinned.assign(firsts[0], ends[0]);
  rows.passing.assign(firsts[1], ends[1]);
  for (const int64_t place : rows.coming) map_[static_cast<size_t>(place)] = kAbsent;
  std::sort(rows.coming.begin(), rows.coming.end());
  return good;
}

std::vector<int64_t> SlotDirectory::missing(const BatchRows& rows) const {
  std::vector<int64_t> found(tables_.size());
  by_table(rows.numbers, &BatchRows::Numbers::passing, [&](size_t t, size_t first, size_t last) {
    int64_t idle = 0;
    for (size_t i = first; i < last; ++i) idle += slots_[static_cast<size_t>(rows.passing[i])].pins == 0;
    found[t] = rows.numbers[t].coming + idle - tables_[t].num_free;
  });
  return found;
}

bool SlotDirectory::fits(const BatchRows& rows) const {
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (rows.numbers[t].passing + rows.numbers[t].coming > tables_[t].cached) return false;
  }
  return true;
}

// Returns a cached slot that no batch uses; there must be one.
int64_t SlotDirectory::room(Table& table) {
  for (;;) {
    const int64_t slot = table.first_slot + table.pinned + table.hand;
    table.hand = table.hand + 1 == table.cached ? 0 : table.hand + 1;
    Slot& own = slots_[static_cast<size_t>(slot)];
    if (own.pins != 0) continue;
    if (!own.used) return slot;
    own.used = false;
  }
}

SlotDirectory::Moves SlotDirectory::admit(BatchRows& rows) {
  Moves moves;
  moves.coming.numbers.resize(tables_.size());
  moves.leaving.numbers.resize(tables_.size());
  // Pins these first, so that no row of the batch evicts another.
  by_table(rows.numbers, &BatchRows::Numbers::passing, [&](size_t t, size_t first, size_t last) {
    const BatchRows::Numbers& numbers = rows.numbers[t];
    counts_[t].rows += numbers.pinned + numbers.passing + numbers.coming;
    counts_[t].hit_rows += numbers.pinned + numbers.passing;
    for (size_t i = first; i < last; ++i) {
      Slot& slot = slots_[static_cast<size_t>(rows.passing[i])];
      tables_[t].num_free -= slot.pins == 0;
      slot.pins = slot.pins + 1;
      slot.used = true;
    }
  });
  if (rows.coming.empty()) return moves;
  std::vector<int64_t>& places = moves.pointers;
  std::vector<int64_t> passing, entries;
  passing.reserve(rows.passing.size() + rows.coming.size());
  auto found = rows.passing.begin();
  by_table(rows.numbers, &BatchRows::Numbers::coming, [&](size_t t, size_t first, size_t last) {
    Table& table = tables_[t];
    BatchRows::Numbers& numbers = rows.numbers[t];
    passing.insert(passing.end(), found, found + numbers.passing);
    found += numbers.passing;
    for (size_t i = first; i < last; ++i) {
      const int64_t place = rows.coming[i], row = place - table.first_place + table.pinned;
      const int64_t at = room(table);
      Slot& slot = slots_[static_cast<size_t>(at)];
      const auto point = [&](int64_t changed, int32_t entry) {
        map_[static_cast<size_t>(changed)] = entry;
        places.push_back(changed);
        entries.push_back(entry);
      };
      if (slot.row >= 0) {
        ++counts_[t].evicted_rows;
        point(table.place_of(slot.row), kAbsent);
      }
      if (slot.dirty) {
        ++counts_[t].written_rows;
        moves.leaving.add(t, slot.row, at - table.first_slot);
      }
      slot = {row, slot.batch, 1, false, true};
      point(place, static_cast<int32_t>(at - table.first_slot));
      moves.coming.add(t, row, at - table.first_slot);
      passing.push_back(at);
    }
    table.num_free -= numbers.coming;
    counts_[t].read_rows += numbers.coming;
    numbers.passing += numbers.coming;
    numbers.coming = 0;
  });
  places.insert(places.end(), entries.begin(), entries.end());
  rows.passing = std::move(passing);
  rows.coming.clear();
  return moves;
}

void SlotDirectory::release(const BatchRows& rows, bool updated) {
  by_table(rows.numbers, &BatchRows::Numbers::passing, [&](size_t t, size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      Slot& slot = slots_[static_cast<size_t>(rows.passing[i])];
      slot.pins = slot.pins - 1;
      slot.dirty = slot.dirty || updated;
      tables_[t].num_free += slot.pins == 0;
    }
  });
  if (!updated) return;
  for (const int64_t slot : rows.pinned) slots_[static_cast<size_t>(slot)].dirty = true;
}

SlotDirectory::Rows SlotDirectory::resident(bool dirty) const {
  Rows found;
  found.numbers.resize(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    for (int64_t slot = 0; slot < tables_[t].pinned + tables_[t].cached; ++slot) {
      const Slot& own = slots_[static_cast<size_t>(tables_[t].first_slot + slot)];
      if (dirty ? own.dirty : own.row >= 0) found.add(t, own.row, slot);
    }
  }
  return found;
}

void SlotDirectory::clear_dirty() {
  for (size_t t = 0; t < tables_.size(); ++t) {
    for (int64_t slot = 0; slot < tables_[t].pinned + tables_[t].cached; ++slot) {
      Slot& own = slots_[static_cast<size_t>(tables_[t].first_slot + slot)];
      counts_[t].written_rows += own.dirty;
      own.dirty = false;
    }
  }
}

SlotDirectory::Rows SlotDirectory::coming(const BatchRows& rows) const {
  Rows found;
  found.numbers.resize(tables_.size());
  by_table(rows.numbers, &BatchRows::Numbers::coming, [&](size_t t, size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      found.add(t, rows.coming[i] - tables_[t].first_place + tables_[t].pinned, -1);
    }
  });
  return found;
}

std::vector<int64_t> SlotDirectory::num_free() const {
  std::vector<int64_t> found;
  for (const Table& table : tables_) found.push_back(table.num_free);
  return found;
}

template bool SlotDirectory::find(const int32_t*, std::span<const TableSpan>, BatchRows&);
template bool SlotDirectory::find(const int64_t*, std::span<const TableSpan>, BatchRows&);

}  // namespace hotrow
