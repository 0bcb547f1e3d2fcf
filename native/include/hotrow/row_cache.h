// Which rows of a table lie in its slots: the map from ids to slots, and the moves between slots and store that keep it
// true. The kernels see slots alone, so that no result can depend on what is decided here.
//
//   slots [0, pinned)                    rows [0, pinned), always
//   slots [pinned, pinned + cached)      rows of the tail, as the policy keeps them
//   slots [pinned + cached, num_rows)    overflow: rows of a batch for which no other slot was free, and those read for
//                                        an evaluation; given back when the batch is released
//
// The arrays of slots have num_rows slots of address space, of which only those in use have memory.
#pragma once

#include <hotrow/frequency.h>
#include <hotrow/row_bits.h>
#include <hotrow/store.h>
#include <hotrow/types.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace hotrow {

// Which row of the tail goes first. A row in use by a batch never goes.
//   clock: one that was not used since the hand last passed.
//   lfu:   the same, but each use (up to 15) makes the hand pass once more; a new row starts with none, so that a row
//          seen once leaves before one seen twice.
//   lru:   the one used longest ago.
enum class Policy : int32_t { clock = 0, lfu = 1, lru = 2 };

// Which rows that come in the policy decides about. All lie in a slot for their batch.
//   none:       every one.
//   frequency:  those that were used more often lately (frequency.h) than the row which the policy would let go. Others
//               are on trial: they make room before any that was admitted, the one used longest ago first, so that rows
//               which come once take one another's slots. Where rows on trial are all in use, a newcomer takes an
//               admitted one's slot all the same; where admitted ones are all in use, it is admitted.
enum class Admission : int32_t { none = 0, frequency = 1 };

// What a row is before it is first written: weights as fill_uniform has them, stored as the table stores weights; then
// each state, element by element:  (of_weight ? of_weight * w : constant) + of_sign * sign(w), w the weight there
struct InitialState {
  int64_t dim;
  float constant, of_weight, of_sign;
};
struct InitialRow {
  uint64_t key;
  float bound;
  int64_t zero_rows;
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

// Calls of one cache come one at a time; different caches may work side by side.
class RowCache {
 public:
  // Fills the pinned rows with their initial values. `slots` has a part for the weights, for split ones another for
  // their lower halves, and one for each state.
  RowCache(const CacheSizes& sizes, Policy policy, Admission admission, InitialRow initial,
           std::shared_ptr<Store> store, Slots slots);

  // slot_of[i] = slot of row ids[i]; every tail row among them is pinned, once per batch, and on its way to its slot
  // until `ticket` is done. keep: the policy may keep the rows; else those that were not resident go to overflow slots,
  // and to empty ones of the cache only where overflow is full. False where an id is out of range; what was pinned
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

  // The table has num_rows now, at least as many as before; rows beyond are untouched ones. slots: of arrays that are
  // as long, into which everything is moved that lies in the old ones; every slot keeps its number, so batches may be
  // in flight, but no read under way. A table whose rows are all pinned stays so. The store has grown before.
  void grow(int64_t num_rows, Slots slots);

  // Rows [0, pinned) among those of slots[0 .. n) were written to.
  void mark_pinned(const int32_t* slots, int64_t n);

  // Rows that were ever written to by a batch, and those among them that were since clear_changed().
  const RowBits& written() const { return exists_; }
  const RowBits& changed() const { return changed_; }
  void clear_changed() { changed_.clear(); }

  // Gives the store every row that differs from it, the pinned ones included, unless all are; flush it for durability.
  void write_back();

  CacheCounters counters() const { return counters_; }
  // Bytes of everything here but slots: the map, two bits for each row, and what is known of each slot.
  int64_t num_bytes() const;
  // Of it, the map from ids to slots alone.
  int64_t map_bytes() const { return static_cast<int64_t>(map_.size() * sizeof(map_[0])); }

 private:
  static constexpr int32_t kNone = -1;
  static constexpr uint32_t kNoRow = 0xFFFFFFFF;
  struct Entry {  // of a slot of the tail
    uint32_t row = kNoRow;
    uint32_t batch = 0;  // the last that pinned it
    int32_t pins : 24 = 0;
    uint32_t uses : 4 = 0;  // passes of the hand that it survives
    bool dirty : 1 = false;
    bool on_trial : 1 = false;
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
  int32_t room_for(uint32_t row, bool& admitted);
  int32_t next_to_go();
  int32_t oldest(int32_t ring) const;
  void take_out(int32_t place);
  void put_in(int32_t place, bool admitted);
  int32_t overflow_place();
  void drop_overflow();
  void pin(int32_t place, uint32_t batch, bool keep, Pins& pins);
  void touch(int32_t place);
  void link_first(int32_t place, int32_t ring);
  void unlink(int32_t place);
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
  // Heads of the rings.
  int32_t lru_ring() const { return static_cast<int32_t>(sizes_.cached); }
  int32_t trial_ring() const { return lru_ring() + 1; }

  CacheSizes sizes_;
  Policy policy_;
  InitialRow initial_;
  std::shared_ptr<Store> store_;
  Slots slots_;
  std::vector<int32_t> map_;  // place + 1 of a row, or 0; linear probing
  RowBits exists_;            // written to: where no slot has the row, the store does
  RowBits changed_;
  std::vector<Entry> places_;  // of slots [pinned, ...)
  std::vector<int32_t> free_overflow_;
  std::vector<int32_t> before_, after_;  // lru, and rows on trial: neighbours of a cached place in its ring
  std::optional<Frequencies> frequencies_;
  int64_t num_mapped_ = 0, num_used_ = 0, num_pinned_places_ = 0, hand_ = 0;
  int64_t num_on_trial_ = 0, num_pinned_on_trial_ = 0;
  std::vector<float> row_;  // scratch
  CacheCounters counters_;
};

}  // namespace hotrow
