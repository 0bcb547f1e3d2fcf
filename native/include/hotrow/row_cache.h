// The map from the ids of a table to its slots, and the moves between slots and store that keep it true. Kernels see
// only slots, so no result can depend on what is cached.
//
//   slots [0, pinned)                    rows [0, pinned), always
//   slots [pinned, pinned + cached)      rows of the tail that were used most
//   slots [pinned + cached, num_rows)    overflow: rows of a batch that found no other slot free, and rows read for an
//                                        evaluation; free again when the batch is released
//
// The arrays have address space for num_rows slots; only slots in use have memory.
//
// Eviction is by CLOCK with counters: the hand skips rows of the tail that a batch uses, takes one use from any other,
// and evicts a row that has none left. Each batch adds one use, up to 15. A new row starts with none, so a row seen
// once leaves before one seen twice.
#pragma once

#include <hotrow/row_bits.h>
#include <hotrow/store.h>
#include <hotrow/types.h>

#include <algorithm>
#include <vector>

namespace hotrow {

// Which row of a whole table a row starts as, and from which column on, if this table is a part of it.
struct Births {
  int64_t prefix, first, step, column;
  int64_t of(int64_t row) const { return row < prefix ? row : first + (row - prefix) * step; }
};

// What a row is before it is first written: weights as fill_uniform has them, stored as the table stores weights; then
// each state, element by element:  (of_weight ? of_weight * w + 0 : constant) + of_sign * sign(w), w the weight there
struct InitialState {
  int64_t dim;
  float constant, of_weight, of_sign;
};
struct InitialRow {
  uint64_t key;
  float bound;
  int64_t zero_rows;
  Births births;
  int64_t dim;
  Storage storage;
  std::vector<InitialState> states;
};

struct CacheSizes {
  int64_t num_rows;  // below 2^32 - 1
  int64_t pinned;
  int64_t cached;
};

// Counted since the cache was made. "Rows": once per batch, however often the batch names them.
struct CacheCounters {
  int64_t lookups = 0;
  int64_t pinned_lookups = 0;  // of rows [0, pinned)
  int64_t hit_lookups = 0;     // of tail rows that were resident
  int64_t rows = 0;            // tail rows
  int64_t hit_rows = 0;
  int64_t read_rows = 0;     // brought from the store
  int64_t created_rows = 0;  // given their initial values
  int64_t evicted_rows = 0;
  int64_t written_rows = 0;   // given to the store
  int64_t overflow_rows = 0;  // of a training batch, for which every slot was in use
};

// The tail rows of one batch, each pinned to its slot until it is released.
struct Pins {
  std::vector<int32_t> slots;
};

// Not thread-safe; different caches may be used in parallel.
class RowCache {
 public:
  // Fills the pinned rows with their initial values. `slots` has a part for the weights, for split ones another for
  // their lower halves, and one for each state.
  RowCache(const CacheSizes& sizes, InitialRow initial, std::shared_ptr<Store> store, Slots slots);

  // slot_of[i] = slot of row ids[i]; every tail row among them is pinned, once per batch, and on its way to its slot
  // until `ticket` is done. keep: the cache may keep the rows; if not, those that were not resident go to overflow
  // slots, and to empty ones of the cache only if overflow is full. False if an id is out of range; what was pinned
  // until then is in `pins`. batch: its number, 2 or more, larger than that of any since restart_batches(); several
  // calls may belong to one.
  template <class Id>
  bool admit(const Id* ids, int64_t n, int32_t* slot_of, uint32_t batch, bool keep, Pins& pins, Ticket& ticket);

  // Whether slot_of is still the answer to ids, whose rows are pinned.
  template <class Id>
  bool holds(const Id* ids, int64_t n, const int32_t* slot_of) const;

  // The batch is over. dirty: its rows were written to.
  void release(Pins& pins, bool dirty);

  // Numbers of batches may begin at 2 again; batches in flight stay as they are.
  void restart_batches();

  // From now on `store` has these rows, and the slots have theirs anew. No row may have been written to before, and no
  // batch be in flight. False if the store fails.
  bool begin_with(std::shared_ptr<Store> store, const RowBits& rows);

  // Rows [0, pinned) among those of slots[0 .. n) were written to.
  void mark_pinned(const int32_t* slots, int64_t n);

  // Rows that were ever written to by a batch, and those among them that were since clear_changed().
  const RowBits& written() const { return exists_; }
  const RowBits& changed() const { return changed_; }
  void clear_changed() { changed_.clear(); }

  // Gives the store every row that differs from it, and every pinned row unless all are pinned; flush the store for
  // durability.
  void write_back();

  CacheCounters counters() const { return counters_; }
  // Bytes of everything here but slots: the map, two bits for each row, and the entry of each slot.
  int64_t num_bytes() const;
  // Of it, the map from ids to slots alone.
  int64_t map_bytes() const { return static_cast<int64_t>(map_.size() * sizeof(map_[0])); }

 private:
  static constexpr int32_t kNone = -1;
  static constexpr uint32_t kNoRow = 0xFFFFFFFF;
  struct Entry {  // of a slot of the tail
    uint32_t row = kNoRow;
    uint32_t batch = 0;  // the last that pinned it
    int32_t pins : 27 = 0;
    uint32_t uses : 4 = 0;  // how often the hand passes it
    bool dirty : 1 = false;
  };

  size_t home(uint32_t row) const {
    return static_cast<size_t>((uint64_t{row} * 0x9E3779B97F4A7C15u >> 32) * map_.size() >> 32);
  }
  int32_t find(uint32_t row) const;
  void insert(uint32_t row, int32_t place);
  void erase(uint32_t row);
  void resize_map(size_t size);
  // Two entries of four bytes for each cached place.
  size_t least_map() const { return static_cast<size_t>(std::max<int64_t>(2 * sizes_.cached, 16)); }
  int32_t place_for(uint32_t row, bool keep, std::vector<Move>& evicted);
  int32_t room();
  int32_t overflow_place();
  void drop_overflow();
  void pin(int32_t place, uint32_t batch, bool keep, Pins& pins);
  void evict(int32_t place, std::vector<Move>& moves);
  void create(uint32_t row, int64_t slot);
  bool overflow_is_full() const {
    return free_overflow_.empty() && slot_of_place(static_cast<int32_t>(places_.size())) >= sizes_.num_rows;
  }
  void mark(uint32_t row) {
    exists_.add(row);
    changed_.add(row);
  }
  int64_t slot_of_place(int32_t place) const { return sizes_.pinned + place; }

  CacheSizes sizes_;
  InitialRow initial_;
  std::shared_ptr<Store> store_;
  Slots slots_;
  std::vector<int32_t> map_;  // place + 1 of a row, or 0; linear probing
  RowBits exists_;            // written to: where no slot has the row, the store does
  RowBits changed_;
  std::vector<Entry> places_;  // of slots [pinned, ...)
  std::vector<int32_t> free_overflow_;
  int64_t num_mapped_ = 0, num_used_ = 0, num_pinned_places_ = 0, hand_ = 0;
  std::vector<float> row_;  // scratch
  CacheCounters counters_;
};

}  // namespace hotrow
