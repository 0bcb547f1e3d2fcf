// See hotrow/cached_store.h.
#include <hotrow/cached_store.h>

#include <algorithm>
#include <utility>

namespace hotrow {
namespace {

constexpr uint32_t kNoRow = 0xFFFFFFFF;
constexpr int64_t kNone = -1;
constexpr size_t kAhead = 12;  // moves whose set is fetched before it is needed

class CachedStore final : public Store {
 public:
  CachedStore(std::shared_ptr<Store> middle, std::shared_ptr<Store> lower, std::string table)
      : middle_(std::move(middle)),
        lower_(std::move(lower)),
        table_(std::move(table)),
        ways_(std::min(kSetPlaces, middle_->num_rows())),
        num_sets_(middle_->num_rows() / ways_),
        piece_rows_(std::max<int64_t>(1, kPieceBytes / lower_->record_bytes())),
        row_at_(static_cast<size_t>(num_sets_ * ways_), kNoRow),
        state_of_(row_at_.size()),
        hands_(static_cast<size_t>(num_sets_)) {}

  // The destructor of the lower store flushes what it was given. After `fail` nothing is written down.
  ~CachedStore() override {
    if (failure_.in_opening_process()) write_all_down();
  }

  void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) override {
    if (moves.empty()) return;
    PendingReads asked(ticket, 1);
    if (!in_opening_process()) return;
    const std::lock_guard lock(mutex_);
    if (failure()) return;
    std::vector<Move> here, below;
    for (size_t i = 0; i < moves.size(); ++i) {
      fetch(moves, i + kAhead);
      const Move& move = moves[i];
      const int64_t place = find(move.row);
      place == kNone ? below.push_back(move) : here.push_back({place, move.slot});
    }
    // Starts the slow reads first; the rest is copied meanwhile.
    if (!below.empty()) lower_->read(below, slots, ticket);
    if (!here.empty()) middle_->read(here, slots, ticket);
    hits_ += static_cast<int64_t>(here.size());
    if (!report_middle_failure("reading", moves)) asked.done();  // the two stores count the rows that they read
  }

  void write(std::span<const Move> moves, const Slots& slots) override {
    if (!in_opening_process()) return;
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < moves.size() && !failure(); ++i) {
      fetch(moves, i + kAhead);
      const Move& move = moves[i];
      int64_t place = find(move.row);
      if (place == kNone) {
        place = give_place(move.row, slots);
      } else {
        state_of_[place] |= kAgain;
      }
      state_of_[place] |= kNewer | kArriving;
      arriving_.push_back({place, move.slot});
    }
    exchange(slots);
  }

  bool flush() override {
    if (!in_opening_process()) return false;
    const std::lock_guard lock(mutex_);
    return write_all_down() && lower_->flush() && !failure();
  }

  void fail(const char* why) override {
    failure_.set(table_, why);
    lower_->fail(why);
  }

  const Failure* failure() const override { return failure_.get() ? failure_.get() : lower_->failure(); }
  int64_t record_bytes() const override { return lower_->record_bytes(); }
  int64_t num_rows() const override { return lower_->num_rows(); }

  StoreCounters counters() const override {
    StoreCounters c = lower_->counters();
    const StoreCounters middle = middle_->counters();
    c.middle_hits += hits_;
    c.middle_rows += num_resident_;
    c.middle_read_bytes += middle.read_bytes;
    c.middle_written_bytes += middle.written_bytes;
    c.middle_map_bytes += static_cast<int64_t>(row_at_.size() * (sizeof(row_at_[0]) + 1) + hands_.size());
    return c;
  }

 private:
  // State bits of a place. kNewer: dirty, newer than the lower store's image. kAgain: written again since the hand last
  // passed. kArriving: `exchange` has yet to copy the new image into it.
  enum State : uint8_t { kNewer = 1, kAgain = 2, kArriving = 4 };

  int64_t first_of(int64_t row) const {
    return static_cast<int64_t>(static_cast<uint64_t>(row) % static_cast<uint64_t>(num_sets_)) * ways_;
  }
  void fetch(std::span<const Move> moves, size_t i) const {
    if (i < moves.size()) __builtin_prefetch(&row_at_[static_cast<size_t>(first_of(moves[i].row))]);
  }
  int64_t find(int64_t row) const {
    const int64_t first = first_of(row);
    for (int64_t place = first; place < first + ways_; ++place) {
      if (row_at_[place] == static_cast<uint32_t>(row)) return place;
    }
    return kNone;
  }

  // Gives the next place in turn to `row`, and evicts the row that was there.
  int64_t give_place(int64_t row, const Slots& slots) {
    const int64_t first = first_of(row);
    uint8_t& hand = hands_[first / ways_];
    const auto next = [&] { return first + std::exchange(hand, static_cast<uint8_t>((hand + 1) % ways_)); };
    int64_t place = next();
    for (; state_of_[place] & kAgain; place = next()) state_of_[place] &= static_cast<uint8_t>(~kAgain);
    if (state_of_[place] & kArriving) exchange(slots);
    if (state_of_[place] & kNewer) leaving_.push_back({row_at_[place], place});
    num_resident_ += row_at_[place] == kNoRow;
    row_at_[place] = static_cast<uint32_t>(row);
    state_of_[place] = 0;
    if (static_cast<int64_t>(leaving_.size()) == piece_rows_) exchange(slots);
    return place;
  }

  // Writes evicted rows down, then copies arriving rows into their places.
  void exchange(const Slots& slots) {
    if (write_down(leaving_) && !arriving_.empty()) {
      middle_->write(arriving_, slots);
      std::vector<Move> rows;
      if (middle_->failure()) {
        for (const Move& move : arriving_) rows.push_back({row_at_[move.row], 0});
        report_middle_failure("writing", rows);
      }
    }
    for (const Move& move : arriving_) state_of_[move.row] &= static_cast<uint8_t>(~kArriving);
    arriving_.clear();
    leaving_.clear();
  }

  // moves: rows, and the places in which they lie. False when a store has failed.
  bool write_down(std::span<const Move> moves) {
    if (failure()) return false;
    if (moves.empty()) return true;
    const int64_t bytes = lower_->record_bytes();
    const auto records = std::make_unique_for_overwrite<std::byte[]>(moves.size() * static_cast<size_t>(bytes));
    const Slots piece{.parts = {Part{records.get(), bytes}}};
    std::vector<Move> from, to;
    for (const Move& move : moves) {
      const auto slot = static_cast<int64_t>(to.size());
      from.push_back({move.slot, slot});
      to.push_back({move.row, slot});
    }
    Ticket ticket;
    middle_->read(from, piece, ticket);
    if (report_middle_failure("reading", moves)) return false;
    lower_->write(to, piece);
    return !failure();
  }

  // In the order of sets, so that a piece holds neighbouring rows of the lower store.
  bool write_all_down() {
    std::vector<Move> piece;
    for (int64_t place = 0; place < num_sets_ * ways_; ++place) {
      if (state_of_[place] & kNewer) {
        piece.push_back({row_at_[place], place});
        state_of_[place] &= static_cast<uint8_t>(~kNewer);
      }
      const bool is_last = place + 1 == num_sets_ * ways_;
      if (!is_last && static_cast<int64_t>(piece.size()) < piece_rows_) continue;
      if (!write_down(piece)) return false;
      piece.clear();
    }
    return true;
  }

  bool in_opening_process() { return failure_.check_process(table_); }

  // Whether the middle has failed. Its message names places, so the rows are put in front.
  bool report_middle_failure(const char* operation, std::span<const Move> moves) {
    const Failure* failed = middle_->failure();
    if (!failed) return false;
    const auto [first, last] =
        std::minmax_element(moves.begin(), moves.end(), [](const Move& a, const Move& b) { return a.row < b.row; });
    const std::string rows = first->row == last->row
                                 ? "row " + std::to_string(first->row)
                                 : "rows " + std::to_string(first->row) + " to " + std::to_string(last->row);
    failure_.set(std::string(operation) + " " + rows + " of table '" + table_ +
                 "' in the tier before its disk: " + failed->what);
    return true;
  }

  const std::shared_ptr<Store> middle_, lower_;
  const std::string table_;
  const int64_t ways_, num_sets_, piece_rows_;
  FailureSlot failure_;
  std::atomic<int64_t> hits_{0}, num_resident_{0};

  std::mutex mutex_;  // of what follows
  std::vector<uint32_t> row_at_;
  std::vector<uint8_t> state_of_;
  std::vector<uint8_t> hands_;
  std::vector<Move> arriving_;  // places, and the slots of this call
  std::vector<Move> leaving_;   // rows, and the places in which they still lie
};

}  // namespace

std::unique_ptr<Store> open_cached_store(std::shared_ptr<Store> middle, std::shared_ptr<Store> lower,
                                         std::string table) {
  return std::make_unique<CachedStore>(std::move(middle), std::move(lower), std::move(table));
}

}  // namespace hotrow
