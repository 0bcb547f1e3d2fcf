// Calls into the engine: copies what a call needs and hands it over; see hotrow/block_store.h.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "engine.h"

namespace hotrow {
namespace {

class BlockStoreClient final : public BlockStore {
 public:
  BlockStoreClient(std::shared_ptr<Engine> engine, TableFile file)
      : engine_(std::move(engine)), table_(std::make_unique<Table>(std::move(file))) {
    ask(Call::Kind::attach);
  }

  ~BlockStoreClient() override {
    if (table_->failure.in_opening_process()) {
      flush();
      ask(Call::Kind::detach);
    }
    close(table_->file.fd);
  }

  void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) override {
    if (moves.empty()) return;
    PendingReads asked(ticket, static_cast<int64_t>(moves.size()));
    std::vector<Move> sorted(moves.begin(), moves.end());
    const auto before = [](const Move& a, const Move& b) { return a.row < b.row; };
    if (!std::is_sorted(sorted.begin(), sorted.end(), before)) std::sort(sorted.begin(), sorted.end(), before);
    if (!is_usable()) return;
    engine_->push({Call::Kind::read, table_.get(), std::move(sorted), slots, nullptr, &ticket});
    asked.hand_on();
  }

  void write(std::span<const Move> moves, const Slots& slots) override {
    if (moves.empty() || !is_usable()) return;
    // By row, and moves of one row as they were given: the last counts. An order takes less memory than sorted moves.
    std::vector<uint32_t> order(moves.size());
    std::iota(order.begin(), order.end(), 0u);
    const auto before = [&](uint32_t a, uint32_t b) {
      return moves[a].row < moves[b].row || (moves[a].row == moves[b].row && a < b);
    };
    if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
    const BlockLayout& layout = table_->file.layout;
    const auto unit_at = [&](size_t i) { return layout.unit_of(moves[order[i]].row); };
    int64_t num_units = 1;
    for (size_t i = 1; i < order.size(); ++i) {
      const int64_t unit = unit_at(i - 1), next = unit_at(i);
      num_units += layout.joins(unit, next) ? next - unit : unit != next;
    }

    const int64_t dirty_bytes = table_->dirty_bytes();
    int64_t at = unit_at(0);
    for (size_t i = 0; num_units > 0;) {
      const WriteBuffer::Units place = engine_->write_buffer().take(dirty_bytes, num_units, table_->failure);
      bump(table_->counted.blocked_ns, place.blocked_ns);
      if (place.count == 0) return;
      DirtyUnit* last = nullptr;
      for (int64_t n = 0; n < place.count; ++n) {
        DirtyUnit* unit = table_->make(place.bytes + n * dirty_bytes, place.chunk, at);
        for (; i < order.size() && unit_at(i) == at; ++i) {
          Table::put(*unit, moves[order[i]].row, slots, moves[order[i]].slot);
        }
        if (i < order.size()) at = layout.joins(at, unit_at(i)) ? at + 1 : unit_at(i);
        if (last) last->next = unit;
        last = unit;
      }
      num_units -= place.count;
      bump(table_->counted.waiting_bytes, place.count * dirty_bytes);
      engine_->push({Call::Kind::write, table_.get(), {}, {}, reinterpret_cast<DirtyUnit*>(place.bytes), nullptr});
    }
    bump(table_->counted.written_rows, static_cast<int64_t>(moves.size()));
  }

  bool flush() override { return is_usable() && ask(Call::Kind::flush); }
  // The engine drops what waits for a table that has failed.
  void fail(const char* why) override { table_->failure.set(table_->file.table, why); }

  const Failure* failure() const override { return table_->failure.get(); }
  int64_t record_bytes() const override { return table_->file.layout.record_bytes; }
  int64_t num_rows() const override { return table_->file.num_rows; }

  StoreCounters counters() const override {
    const TableCounters& c = table_->counted;
    const int64_t own = c.reads + c.writes, all = engine_->num_ios();
    const bool here = table_->failure.in_opening_process();
    const double share = all && here ? static_cast<double>(own) / static_cast<double>(all) : 0.0;
    const auto cpu_ns = here ? static_cast<int64_t>(share * static_cast<double>(engine_->cpu_ns())) : 0;
    return {c.reads,         c.read_rows,         c.read_bytes,         c.writes,     c.written_rows,
            c.written_bytes, c.served_from_queue, c.read_modify_writes, c.blocked_ns, c.waiting_bytes,
            cpu_ns};
  }

  void inject(bool write, int64_t after, int error) override {
    table_->inject_write = write;
    table_->inject_error = error;
    table_->inject_after.store(after);
  }

 private:
  bool ask(Call::Kind kind) {
    Ticket ticket;
    ticket.add(1);
    engine_->push({kind, table_.get(), {}, {}, nullptr, &ticket});
    return ticket.wait();
  }

  // A failed store takes no calls; nor does a store in a forked child, whose parent has the thread.
  bool is_usable() {
    return table_->failure.check_process(table_->file.table, table_->file.path) && !table_->failure.get();
  }

  std::shared_ptr<Engine> engine_;
  std::unique_ptr<Table> table_;
};

}  // namespace

std::unique_ptr<BlockStore> open_block_store(std::shared_ptr<Engine> engine, TableFile file) {
  return std::make_unique<BlockStoreClient>(std::move(engine), std::move(file));
}

}  // namespace hotrow
