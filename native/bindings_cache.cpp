// The caches of a collection's tables as one Python object, and the batches in flight through them; see
// bindings_ops.cpp for the rules.
#include <hotrow/parallel.h>
#include <hotrow/row_cache.h>
#include <hotrow/saved_store.h>
#include <hotrow/slot_directory.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <tuple>

#include "bindings.h"

using namespace hotrow;

namespace {

// By table its first id and the end of its ids, in the order of the tables.
std::vector<TableSpan> checked(const std::vector<std::tuple<size_t, int64_t, int64_t>>& given, size_t num_tables,
                               int64_t num_ids) {
  std::vector<TableSpan> spans;
  for (const auto& [table, first, last] : given) {
    require(table < num_tables && 0 <= first && first <= last && last <= num_ids, "span outside the batch");
    require(spans.empty() || spans.back().table <= table, "spans must be in the order of their tables");
    spans.push_back({table, first, last});
  }
  return spans;
}

class Caches;

// A batch in flight: its rows stay pinned until it is released. Any thread may wait for it and release it. Its rows are
// read into the memory of the tables, so it keeps them alive.
class Flight {
 public:
  Flight(std::shared_ptr<Caches> caches, size_t num_tables)
      : caches_(std::move(caches)), pins_(num_tables), ticket_(std::make_shared<Ticket>()) {}
  ~Flight() {
    nb::gil_scoped_release release_gil;
    release(false, 1);
  }

  // Blocks until every row is in its slot, including rows that earlier batches are still reading; false if a store
  // failed.
  bool wait() {
    const std::lock_guard lock(mutex_);
    return wait_locked();
  }
  void release(bool dirty, int num_threads);

 private:
  friend class Caches;
  bool wait_locked() {
    for (const auto& earlier : earlier_) good_ = earlier->wait() && good_;
    earlier_.clear();
    good_ = ticket_->wait() && good_;
    return good_;
  }

  std::mutex mutex_;  // of all that follows, once a batch is admitted
  std::shared_ptr<Caches> caches_;
  std::vector<Pins> pins_;
  std::vector<TableSpan> spans_;
  std::vector<std::span<const TableSpan>> tables_;  // the spans of each table
  std::shared_ptr<int32_t[]> slots_;                // of the batch's ids
  std::shared_ptr<Ticket> ticket_;
  std::vector<std::shared_ptr<Ticket>> earlier_;
  bool good_ = true, released_ = false;
};

class Caches : public std::enable_shared_from_this<Caches> {
 public:
  uint32_t last_batch = 0;  // number of the last batch; wraps around

  void add(
      const std::tuple<int64_t, int64_t, int64_t>& sizes,
      const std::tuple<uint64_t, float, int64_t, std::tuple<int64_t, int64_t, int64_t, int64_t>, int64_t, int>& initial,
      const std::vector<std::tuple<int64_t, float, float, float>>& states, std::shared_ptr<Store> store,
      std::shared_ptr<Records> records) {
    const auto [num_rows, pinned, cached] = sizes;
    require(0 <= pinned && 0 <= cached && pinned + cached <= num_rows && num_rows < 0x7FFFFFFF,
            "pinned + cached slots must be within the table's rows, and these below 2^31");
    const auto [key, bound, zero_rows, births, dim, storage] = initial;
    const auto [prefix, behind, step, column] = births;
    require(0 <= prefix && 0 <= behind && 1 <= step, "births are of rows, and rise");
    require(0 <= column && column % 4 == 0, "births begin at a multiple of 4 columns");
    InitialRow first{key, bound, zero_rows, {prefix, behind, step, column}, dim, static_cast<Storage>(storage), {}};
    for (const auto& [state_dim, constant, of_weight, of_sign] : states) {
      require(of_weight == 0 || state_dim == dim, "a state made of weights must be as long");
      first.states.push_back({state_dim, constant, of_weight, of_sign});
    }
    require(records->arrays.size() == 1 + (first.storage == Storage::split) + states.size(), "an array for each part");
    require(records->num_slots == num_rows && num_rows > 0, "arrays must have num_rows slots, one or more");
    require(store->record_bytes() == records->slots.record_bytes(),
            "the arrays' parts together are not as long as a record");
    require(store->num_rows() >= num_rows, "the store has fewer rows than the table");
    nb::gil_scoped_release release;
    auto cache =
        std::make_unique<RowCache>(CacheSizes{num_rows, pinned, cached}, std::move(first), store, records->slots);
    const std::lock_guard lock(mutex_);
    records_.push_back(std::move(records));
    stores_.push_back(std::move(store));
    caches_.push_back(std::move(cache));
  }

  // Makes the table start from saved rows (saved_store.h). Returns its new store, or None if a row has been written
  // already. files: descriptors, which the store closes, and their paths. links: (number of rows, ids, parts of a
  // record), ids and parts as (file, offset). Raises ValueError, with nothing changed, for wrong ids.
  std::shared_ptr<Store> begin_with(
      size_t table, const std::vector<std::pair<int, std::string>>& files,
      const std::vector<std::tuple<int64_t, std::pair<size_t, int64_t>, std::vector<std::pair<size_t, int64_t>>>>&
          links,
      std::string name) {
    std::vector<std::shared_ptr<SavedFile>> opened;
    for (const auto& [fd, path] : files) opened.push_back(std::make_shared<SavedFile>(fd, path));
    require(table < caches_.size(), "no such table");
    const auto values = [&](const std::pair<size_t, int64_t>& where) {
      require(where.first < opened.size() && where.second >= 0, "no such place in a file");
      return SavedValues{opened[where.first], where.second};
    };
    std::vector<int64_t> part_bytes;
    for (const Part& part : records_[table]->slots.parts) part_bytes.push_back(part.bytes);
    std::vector<SavedLink> saved;
    for (const auto& [num_saved, ids, parts] : links) {
      require(num_saved >= 0 && parts.size() == part_bytes.size(), "a link has values for each part of a record");
      saved.push_back({num_saved, values(ids), {}});
      for (const auto& part : parts) saved.back().parts.push_back(values(part));
    }
    std::shared_ptr<Store> store;
    std::string reason;
    const int64_t num_rows = records_[table]->num_slots;
    RowBits rows(num_rows);
    {
      nb::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      for (const auto& ticket : under_way_) ticket->wait();
      RowCache& cache = *caches_[table];
      if (cache.written().count()) return nullptr;
      store = open_saved_store(stores_[table], std::move(saved), std::move(part_bytes), std::move(name), num_rows, rows,
                               reason);
      if (store) {
        stores_[table] = store;
        fail_store_on_throw(*store, [&] { return cache.begin_with(store, rows); });
      }
    }
    require(store != nullptr, reason.c_str());
    return store;
  }

  // Returns (flight, slots); flight is None if an id is out of range.
  std::pair<std::unique_ptr<Flight>, nb::ndarray<nb::numpy, int32_t>> admit(
      const Ids& ids, const std::vector<std::tuple<size_t, int64_t, int64_t>>& spans, bool keep, int num_threads) {
    auto flight = std::make_unique<Flight>(shared_from_this(), caches_.size());
    flight->spans_ = checked(spans, caches_.size(), size(ids));
    flight->tables_ = by_table(flight->spans_);
    flight->slots_ = std::make_shared<int32_t[]>(ids.size());
    int32_t* values = flight->slots_.get();
    auto slots = array_on(values, {ids.size()}, flight->slots_);
    const bool wide = is_wide(ids);
    const bool good = without_gil([&] {
      const std::lock_guard lock(mutex_);
      return admit_all(ids.data(), wide, values, *flight, keep, num_threads);
    });
    if (!good) flight.reset();
    return {std::move(flight), std::move(slots)};
  }

  bool holds(const Ids& ids, const Array<int32_t>& slots, const Flight& flight) {
    require(size(ids) == size(slots), "ids and slots differ in number");
    const bool wide = is_wide(ids);
    nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return std::all_of(flight.spans_.begin(), flight.spans_.end(), [&](const TableSpan& span) {
      const RowCache& cache = *caches_[span.table];
      const int64_t n = span.last - span.first;
      return wide ? cache.holds(static_cast<const int64_t*>(ids.data()) + span.first, n, slots.data() + span.first)
                  : cache.holds(static_cast<const int32_t*>(ids.data()) + span.first, n, slots.data() + span.first);
    });
  }

  void release(Flight& flight, bool dirty, int num_threads) {
    const std::lock_guard lock(mutex_);
    for_each_table(flight, num_threads, [&](RowCache& cache, Pins& pins, std::span<const TableSpan> spans) {
      cache.release(pins, dirty);
      for (const TableSpan& span : spans) {
        if (dirty) cache.mark_pinned(flight.slots_.get() + span.first, span.last - span.first);
      }
    });
  }

  // Rows that were written to since clear_changed(), or ever: how many, and the first `most` from `first` on.
  int64_t num_changed(size_t table, bool ever) {
    const std::lock_guard lock(mutex_);
    return bits(table, ever).count();
  }
  nb::ndarray<nb::numpy, int64_t> changed_rows(size_t table, bool ever, int64_t first, int64_t most) {
    require(first >= 0 && most >= 0, "first and most must not be negative");
    return array_of(without_gil([&] {
      const std::lock_guard lock(mutex_);
      return bits(table, ever).rows(first, most);
    }));
  }
  void clear_changed() {
    const std::lock_guard lock(mutex_);
    for (const auto& cache : caches_) cache->clear_changed();
  }

  bool write_back() {
    const std::lock_guard lock(mutex_);
    bool good = true;
    for (size_t t = 0; t < caches_.size(); ++t) {
      good = fail_store_on_throw(*stores_[t], [&] { return caches_[t]->write_back(), true; }) && good;
    }
    for (const auto& store : stores_) good = fail_store_on_throw(*store, [&] { return store->flush(); }) && good;
    return good;
  }

  std::string failure() {
    const std::lock_guard lock(mutex_);
    for (const auto& store : stores_) {
      if (store->failure()) return store->failure()->what;
    }
    return {};
  }

  nb::dict counters(size_t table) {
    require(table < caches_.size(), "no such table");
    const auto [c, num_bytes, map_bytes] = without_gil([&] {
      const std::lock_guard lock(mutex_);
      const RowCache& cache = *caches_[table];
      return std::tuple{cache.counters(), cache.num_bytes(), cache.map_bytes()};
    });
    nb::dict d;
    d["lookups"] = c.lookups;
    d["pinned_lookups"] = c.pinned_lookups;
    d["hit_lookups"] = c.hit_lookups;
    d["rows"] = c.rows;
    d["hit_rows"] = c.hit_rows;
    d["read_rows"] = c.read_rows;
    d["created_rows"] = c.created_rows;
    d["evicted_rows"] = c.evicted_rows;
    d["written_rows"] = c.written_rows;
    d["overflow_rows"] = c.overflow_rows;
    d["num_bytes"] = num_bytes;
    d["map_bytes"] = map_bytes;
    return d;
  }

 private:
  const RowBits& bits(size_t table, bool ever) const {
    require(table < caches_.size(), "no such table");
    return ever ? caches_[table]->written() : caches_[table]->changed();
  }

  static std::vector<std::span<const TableSpan>> by_table(const std::vector<TableSpan>& spans) {
    std::vector<std::span<const TableSpan>> tables;
    for (const TableSpan& span : spans) {
      const bool more = !tables.empty() && tables.back().back().table == span.table;
      if (more) {
        tables.back() = {tables.back().data(), tables.back().size() + 1};
      } else {
        tables.emplace_back(&span, 1);
      }
    }
    return tables;
  }

  // Calls visit(cache, pins, spans) for each table that the batch uses, tables in parallel. If it throws, some rows may
  // have left their slots without reaching the store, or have slots that were never filled: the store counts as failed,
  // and its cache is not used again.
  template <class Visit>
  void for_each_table(Flight& flight, int num_threads, const Visit& visit) {
    parallel_for(static_cast<int64_t>(flight.tables_.size()), num_threads, [&](int64_t task, int) {
      const std::span<const TableSpan> spans = flight.tables_[static_cast<size_t>(task)];
      const size_t table = spans.front().table;
      PendingReads call(*flight.ticket_, 1);
      if (stores_[table]->failure()) return;
      if (fail_store_on_throw(*stores_[table],
                              [&] { return visit(*caches_[table], flight.pins_[table], spans), true; })) {
        call.done();
      }
    });
  }

  bool admit_all(const void* ids, bool wide, int32_t* slots, Flight& flight, bool keep, int num_threads) {
    const uint32_t number = next_batch();
    // A failed ticket stays: its rows have slots but were never read.
    std::erase_if(under_way_, [](const auto& ticket) { return ticket->finished() && ticket->wait(); });
    flight.earlier_ = under_way_;
    under_way_.push_back(flight.ticket_);
    std::atomic<bool> good{true};
    for_each_table(flight, num_threads, [&](RowCache& cache, Pins& pins, std::span<const TableSpan> spans) {
      for (const TableSpan& span : spans) {
        const auto into = [&](const auto* all) {
          return cache.admit(all + span.first, span.last - span.first, slots + span.first, number, keep, pins,
                             *flight.ticket_);
        };
        if (!(wide ? into(static_cast<const int64_t*>(ids)) : into(static_cast<const int32_t*>(ids)))) good = false;
      }
    });
    return good;
  }

  // 0 means no batch, and 1 a batch from before the numbers wrapped around.
  uint32_t next_batch() {
    if (++last_batch < 2) {
      for (const auto& cache : caches_) cache->restart_batches();
      last_batch = 2;
    }
    return last_batch;
  }

  friend class Flight;
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::vector<std::shared_ptr<Records>> records_;
  std::vector<std::shared_ptr<Store>> stores_;
  std::vector<std::unique_ptr<RowCache>> caches_;
  std::vector<std::shared_ptr<Ticket>> under_way_;
};

void Flight::release(bool dirty, int num_threads) {
  if (getpid() != caches_->process_) return;  // a forked child: the threads that finish reads are in its parent
  const std::lock_guard lock(mutex_);
  if (std::exchange(released_, true)) return;
  wait_locked();  // a slot may be reused only when no read into it is pending
  caches_->release(*this, dirty, num_threads);
}

// ---- slots on a device

using Numbers = nb::ndarray<nb::numpy, int64_t>;

// (rows, slots, how many by table)
using RowsOfTables = std::tuple<Numbers, Numbers, std::vector<int64_t>>;
RowsOfTables lists_of(SlotDirectory::Rows&& found) {
  return {array_of(std::move(found.rows)), array_of(std::move(found.slots)), std::move(found.numbers)};
}

std::unique_ptr<SlotDirectory> make_directory(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& tables) {
  std::vector<SlotDirectory::Sizes> sizes;
  for (const auto& [num_rows, pinned, cached] : tables) {
    require(0 <= pinned && 0 <= cached && pinned + cached <= num_rows && pinned + cached <= 0x7FFFFFFF,
            "pinned + cached slots must be within the table's rows, and below 2^31");
    sizes.push_back({num_rows, pinned, cached});
  }
  return std::make_unique<SlotDirectory>(sizes);
}

std::unique_ptr<SlotDirectory::BatchRows> find_rows(SlotDirectory& directory, const Ids& ids,
                                                    const std::vector<std::tuple<size_t, int64_t, int64_t>>& given) {
  const std::vector<TableSpan> batch = checked(given, directory.counts().size(), size(ids));
  const bool wide = is_wide(ids);
  auto rows = std::make_unique<SlotDirectory::BatchRows>();
  nb::gil_scoped_release release;
  const bool good = wide ? directory.find(static_cast<const int64_t*>(ids.data()), batch, *rows)
                         : directory.find(static_cast<const int32_t*>(ids.data()), batch, *rows);
  if (!good) rows.reset();
  return rows;
}

// None if no row has to be read.
std::optional<std::tuple<RowsOfTables, RowsOfTables, Numbers>> admit_rows(SlotDirectory& directory,
                                                                          SlotDirectory::BatchRows& rows) {
  SlotDirectory::Moves moves = without_gil([&] { return directory.admit(rows); });
  if (moves.coming.rows.empty()) return std::nullopt;
  return std::tuple{lists_of(std::move(moves.coming)), lists_of(std::move(moves.leaving)),
                    array_of(std::move(moves.pointers))};
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<Flight>(m, "Flight")
      .def("wait", &Flight::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("release", &Flight::release, nb::arg("dirty"), nb::arg("num_threads") = 1,
           nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Caches>(m, "Caches")
      .def("__init__", [](Caches*) { throw nb::type_error("use make_caches()"); })
      .def("add", &Caches::add)
      .def("begin_with", &Caches::begin_with)
      .def("admit", &Caches::admit)
      .def("holds", &Caches::holds)
      .def("num_changed", &Caches::num_changed, nb::call_guard<nb::gil_scoped_release>())
      .def("changed_rows", &Caches::changed_rows)
      .def("clear_changed", &Caches::clear_changed, nb::call_guard<nb::gil_scoped_release>())
      .def("write_back", &Caches::write_back, nb::call_guard<nb::gil_scoped_release>())
      .def("failure", &Caches::failure, nb::call_guard<nb::gil_scoped_release>())
      .def("counters", &Caches::counters)
      .def_rw("last_batch", &Caches::last_batch);  // for tests
  using BatchRows = SlotDirectory::BatchRows;
  nb::class_<BatchRows>(m, "BatchRows").def_prop_ro("numbers", [](const BatchRows& rows) {
    std::vector<int64_t> found;
    for (const auto& own : rows.numbers) found.push_back(own.pinned + own.passing + own.coming);
    return found;
  });
  nb::class_<SlotDirectory>(m, "SlotDirectory")
      .def("find", &find_rows, nb::arg("ids").noconvert(), nb::arg("spans"))
      .def("missing", &SlotDirectory::missing)
      .def("fits", &SlotDirectory::fits)
      .def("admit", &admit_rows)
      .def("release", &SlotDirectory::release, nb::arg("rows"), nb::arg("updated"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("coming", [](const SlotDirectory& own, const BatchRows& rows) { return lists_of(own.coming(rows)); })
      .def(
          "resident", [](const SlotDirectory& own, bool dirty) { return lists_of(own.resident(dirty)); },
          nb::arg("dirty"))
      .def("clear_dirty", &SlotDirectory::clear_dirty)
      .def_prop_ro("num_free", &SlotDirectory::num_free)
      .def_prop_ro("counts", [](const SlotDirectory& own) {
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> found;
        for (const auto& c : own.counts()) {
          found.emplace_back(c.rows, c.hit_rows, c.read_rows, c.evicted_rows, c.written_rows);
        }
        return found;
      });
  m.def("make_slot_directory", &make_directory);
  m.def("make_caches", [] { return std::make_shared<Caches>(); });
}
