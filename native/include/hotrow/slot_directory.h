// The map from rows of a collection's tables to slots of a device. It moves no row itself: the caller makes the moves
// that `admit` returns, in the order of the calls. Calls come one at a time: there is no lock here, and the bindings
// release the GIL.
//
//   slots [0, pinned) of a table                  rows [0, pinned), always
//   slots [pinned, pinned + cached) of a table    rows that come and go
//
// A *place* is the number of a row among the cacheable rows of all tables; slots are numbered through all tables too.
// Eviction is by CLOCK over the cached slots of a table: a row can be evicted if no batch has it and it was not used
// since the hand last passed. New rows get their slots in rising order, so that the outcome does not depend on the
// order of a batch's ids.
#pragma once

#include <hotrow/types.h>

#include <cstdint>
#include <span>
#include <vector>

namespace hotrow {

class SlotDirectory {
 public:
  // Counted since it was made. A row counts once per batch, however often the batch names it.
  struct Counts {
    int64_t rows, hit_rows, read_rows, evicted_rows, written_rows;
  };
  struct Sizes {
    int64_t num_rows, pinned, cached;  // pinned + cached <= num_rows, and below 2^31
  };
  // The different rows that a batch names, in the order of their tables.
  struct BatchRows {
    std::vector<int64_t> pinned;   // slots
    std::vector<int64_t> passing;  // slots of rows that come and go
    std::vector<int64_t> coming;   // places of rows without a slot, rising
    struct Numbers {
      int64_t pinned, passing, coming;
    };
    std::vector<Numbers> numbers;  // by table
  };
  // Rows and slots by their numbers in their own tables, in the order of the tables.
  struct Rows {
    std::vector<int64_t> rows, slots, numbers;  // the last by table
    void add(size_t table, int64_t row, int64_t slot) {
      rows.push_back(row);
      slots.push_back(slot);
      ++numbers[table];
    }
  };
  struct Moves {
    Rows coming, leaving;           // into slots; out of slots, if the row was updated since it came
    std::vector<int64_t> pointers;  // places whose entry in the map has changed, then the entries: a slot, or -1
  };

  explicit SlotDirectory(std::span<const Sizes> sizes);

  // Finds the rows that a batch names, which stay as found until the next `admit`. False if an id is outside its table.
  // batch: in the order of the tables.
  template <class Id>
  bool find(const Id* ids, std::span<const TableSpan> batch, BatchRows& rows);

  // By table, how many slots are missing for these rows to lie here together; 0 or less if they can.
  std::vector<int64_t> missing(const BatchRows& rows) const;

  // Whether these rows could lie here together if no other batch had any.
  bool fits(const BatchRows& rows) const;

  // Gives every row a slot and pins it there; nothing may be missing. Afterwards no row is `coming`.
  Moves admit(BatchRows& rows);

  // Unpins the rows of a batch that is over. updated: they have changed.
  void release(const BatchRows& rows, bool updated);

  // The rows that lie here, or (dirty) those that were updated since they came.
  Rows resident(bool dirty) const;

  // The rows that were updated are written below now.
  void clear_dirty();

  // The rows at these places, whose slots are unknown.
  Rows coming(const BatchRows& rows) const;

  const std::vector<Counts>& counts() const { return counts_; }
  // By table, cached slots that hold no row of a batch.
  std::vector<int64_t> num_free() const;

 private:
  struct Slot {
    int64_t row = -1;
    uint32_t batch = 0;  // of `find`, the last that named it
    uint32_t pins : 30 = 0;
    bool dirty : 1 = false;
    bool used : 1 = false;  // since the hand last passed
  };
  struct Table {
    int64_t num_rows, pinned, cached, first_slot, first_place;
    int64_t num_free, hand;
    int64_t place_of(int64_t row) const { return first_place + row - pinned; }
  };

  int64_t room(Table& table);
  uint32_t next_batch();

  std::vector<Table> tables_;
  std::vector<Slot> slots_;
  std::vector<int32_t> map_;    // by place: the slot of its table; kAbsent; inside `find` kComing
  std::vector<int64_t> found_;  // scratch of `find`
  std::vector<Counts> counts_;
  uint32_t last_batch_ = 0;
};

}  // namespace hotrow
