// See hotrow/gathered_store.h.
#include <fcntl.h>
#include <hotrow/gathered_store.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cstring>
#include <utility>

namespace hotrow {
namespace {

constexpr uint16_t kNoPlace = 0xFFFF;
constexpr size_t kMostNamed = 4;  // rows that a message names

int64_t region_places(const BlockLayout& layout) { return kNoPlace / layout.page_rows() * layout.page_rows(); }
int64_t region_rows(const BlockLayout& layout) { return region_places(layout) / kPlacesPerRow; }

// Rows of a table that share places, both numbered from 0 on.
class Region {
 public:
  Region(const BlockLayout& layout, int64_t num_rows)
      : page_places_(layout.page_rows()),
        record_bytes_(static_cast<size_t>(layout.record_bytes)),
        pages_with_(static_cast<size_t>(page_places_) + 1) {
    const int64_t wanted = (kPlacesPerRow * num_rows + page_places_ - 1) / page_places_;
    const auto num_pages = static_cast<size_t>(std::min(wanted, kNoPlace / page_places_));
    place_of_.resize(static_cast<size_t>(num_rows), kNoPlace);
    pages_with_[static_cast<size_t>(page_places_)] = static_cast<uint16_t>(num_pages);
    num_free_.resize(num_pages, static_cast<uint8_t>(page_places_));
    is_free_.resize(num_pages * static_cast<size_t>(page_places_), true);
  }

  uint16_t place_of(size_t row) const { return place_of_[row]; }  // kNoPlace: it was never written

  // Prefetch where a row lies, and where its next record will go.
  void fetch(size_t row) const { __builtin_prefetch(&place_of_[row]); }
  void fetch_to_put(size_t row) const {
    __builtin_prefetch(&place_of_[row], 1);
    if (page_ && next_ < page_places_) {
      for (int64_t at = 0; at < static_cast<int64_t>(record_bytes_); at += kLineBytes) {
        __builtin_prefetch(record_at(next_) + at, 1);
      }
    }
  }

  // The record at this place if it is in the open page, else null.
  std::byte* held(uint16_t place) {
    const bool is_held = place / page_places_ == open_page_ && held_[static_cast<size_t>(place % page_places_)];
    return is_held ? record_at(place % page_places_) : nullptr;
  }

  // Memory for the newest record of a row. If the open page is full, its records are first passed to write_down(place,
  // record), in order.
  template <class WriteDown>
  std::byte* put(size_t row, const WriteDown& write_down) {
    const uint16_t old = place_of_[row];
    if (old != kNoPlace) {
      if (std::byte* record = held(old)) return record;
      is_free_[old] = true;
      count_free(old / page_places_, 1);
    }
    while (open_page_ < 0 || !find_free()) {
      close(write_down);
      open_emptiest();
    }
    const auto place = static_cast<uint16_t>(open_page_ * page_places_ + next_);
    is_free_[place] = false;
    count_free(open_page_, -1);
    place_of_[row] = place;
    held_.set(static_cast<size_t>(next_));
    return record_at(next_++);
  }

  // Calls reserve(first page, count) if no disk space has been requested for the open page yet.
  template <class Reserve>
  void reserve_ahead(const Reserve& reserve) {
    if (open_page_ < num_reserved_) return;
    const int64_t first = open_page_, last = std::min(first + kReservedPages, static_cast<int64_t>(num_free_.size()));
    reserve(first, last - first);
    num_reserved_ = last;
  }

  template <class WriteDown>
  void close(const WriteDown& write_down) {
    for (int64_t i = 0; i < page_places_ && held_.any(); ++i) {
      if (held_[static_cast<size_t>(i)]) write_down(open_page_ * page_places_ + i, record_at(i));
      held_.reset(static_cast<size_t>(i));
    }
    open_page_ = -1;
  }

  // Rows at places first to last, at most `most` of them.
  std::vector<int64_t> rows_at(int64_t first, int64_t last, size_t most) const {
    std::vector<int64_t> found;
    for (size_t row = 0; row < place_of_.size() && found.size() < most; ++row) {
      const uint16_t place = place_of_[row];
      if (place != kNoPlace && first <= place && place <= last) found.push_back(static_cast<int64_t>(row));
    }
    return found;
  }

  int64_t num_held() const { return static_cast<int64_t>(held_.count()); }
  int64_t num_bytes() const {
    const size_t page_bytes = page_ ? static_cast<size_t>(page_places_) * record_bytes_ : 0;
    return static_cast<int64_t>(sizeof(*this) + place_of_.capacity() * sizeof(uint16_t) + num_free_.capacity() +
                                pages_with_.capacity() * sizeof(uint16_t) + is_free_.capacity() / 8 + page_bytes);
  }

 private:
  std::byte* record_at(int64_t in_page) const { return page_.get() + static_cast<size_t>(in_page) * record_bytes_; }

  bool find_free() {
    const size_t first = static_cast<size_t>(open_page_ * page_places_);
    while (next_ < page_places_ && !is_free_[first + static_cast<size_t>(next_)]) ++next_;
    return next_ < page_places_;
  }

  void count_free(int64_t page, int num) {
    uint8_t& free = num_free_[static_cast<size_t>(page)];
    --pages_with_[free];
    free = static_cast<uint8_t>(free + num);
    ++pages_with_[free];
  }

  // Opens the page with the most free places. There is one: places are twice as many as rows, and the row to be put has
  // none. Among equally empty pages, takes the first after the page opened last, which is found soonest.
  void open_emptiest() {
    if (!page_) page_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(page_places_) * record_bytes_);
    int most = static_cast<int>(page_places_);
    while (pages_with_[static_cast<size_t>(most)] == 0) --most;
    const uint8_t* pages = num_free_.data();
    const auto find = [&](size_t first, size_t last) { return std::memchr(pages + first, most, last - first); };
    const void* emptiest = find(last_opened_, num_free_.size());
    if (!emptiest) emptiest = find(0, last_opened_);
    open_page_ = static_cast<const uint8_t*>(emptiest) - pages;
    last_opened_ = static_cast<size_t>(open_page_);
    next_ = 0;
  }

  const int64_t page_places_;
  const size_t record_bytes_;
  std::vector<uint16_t> place_of_;
  std::vector<uint8_t> num_free_;     // of each page
  std::vector<uint16_t> pages_with_;  // so many free places
  std::vector<bool> is_free_;
  int64_t open_page_ = -1, next_ = 0;  // in it, where to look for a free place
  size_t last_opened_ = 0;
  int64_t num_reserved_ = 0;           // pages that room was asked for
  std::bitset<kMostPackedRows> held_;  // of the open page's places, those whose record lies in page_
  std::unique_ptr<std::byte[]> page_;
};

// Where the rows of a table lie. Hold `mutex` to change it or to ask for names. The engine's thread asks for names when
// an I/O fails, so never call the lower store with the lock held.
class RowPlaces final : public RowNames {
 public:
  RowPlaces(const BlockLayout& layout, int64_t num_rows)
      : layout_(layout),
        region_rows_(region_rows(layout)),
        region_places_(region_places(layout)),
        num_rows_(num_rows),
        regions_(static_cast<size_t>((num_rows + region_rows_ - 1) / region_rows_)) {}

  mutable std::mutex mutex;

  int64_t num_rows() const { return num_rows_; }
  size_t in_region(int64_t row) const { return static_cast<size_t>(row % region_rows_); }
  int64_t first_place_of(int64_t row) const { return row / region_rows_ * region_places_; }
  Region* find(int64_t row) const { return regions_[static_cast<size_t>(row / region_rows_)].get(); }
  Region& make(int64_t row) {
    const auto r = static_cast<size_t>(row / region_rows_);
    if (!regions_[r]) regions_[r] = std::make_unique<Region>(layout_, rows_of(r));
    return *regions_[r];
  }
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (size_t r = 0; r < regions_.size(); ++r) {
      if (regions_[r]) visit(*regions_[r], static_cast<int64_t>(r) * region_places_);
    }
  }

  std::string text(int64_t first, int64_t last) const override {
    const std::lock_guard lock(mutex);
    const int64_t r = first / region_places_, offset = r * region_places_;
    const Region* region = static_cast<size_t>(r) < regions_.size() ? regions_[static_cast<size_t>(r)].get() : nullptr;
    std::vector<int64_t> rows;
    if (region) rows = region->rows_at(first - offset, last - offset, kMostNamed + 1);
    std::string text = rows.size() == 1 ? "row " : rows.empty() ? "no row" : "rows ";
    for (size_t i = 0; i < std::min(rows.size(), kMostNamed); ++i) {
      text += i ? ", " : "";
      text += std::to_string(r * region_rows_ + rows[i]);
    }
    return rows.size() > kMostNamed ? text + " and others" : text;
  }

 private:
  int64_t rows_of(size_t r) const { return std::min(region_rows_, num_rows_ - static_cast<int64_t>(r) * region_rows_); }

  const BlockLayout layout_;
  const int64_t region_rows_, region_places_, num_rows_;
  std::vector<std::unique_ptr<Region>> regions_;  // made when a row of theirs is first written
};

// Records being collected for one write to the store below.
class Piece {
 public:
  explicit Piece(int64_t record_bytes) : record_bytes_(record_bytes) {}
  bool is_full() const { return static_cast<int64_t>(bytes_.size()) >= kPieceBytes; }
  auto from(int64_t first_place) {
    return [this, first_place](int64_t place, const std::byte* record) {
      moves_.push_back({first_place + place, static_cast<int64_t>(moves_.size())});
      bytes_.insert(bytes_.end(), record, record + record_bytes_);
    };
  }
  void write_to(Store& store) {
    if (!moves_.empty()) store.write(moves_, Slots{.parts = {Part{bytes_.data(), record_bytes_}}});
    moves_.clear();
    bytes_.clear();
  }

 private:
  const int64_t record_bytes_;
  std::vector<Move> moves_;
  std::vector<std::byte> bytes_;
};

class GatheredStore final : public BlockStore {
 public:
  GatheredStore(std::shared_ptr<Engine> engine, TableFile file)
      : layout_(file.layout),
        table_(file.table),
        path_(file.path),
        places_(std::make_shared<RowPlaces>(file.layout, file.num_rows)),
        fd_(file.fd) {
    file.num_rows = num_places(layout_, file.num_rows);
    file.names = places_;
    lower_ = open_block_store(std::move(engine), std::move(file));
  }

  void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) override {
    if (moves.empty()) return;
    PendingReads asked(ticket, static_cast<int64_t>(moves.size()));
    if (!failure_.check_process(table_, path_)) return;
    const std::lock_guard lock(calls_);
    if (failure()) return;
    std::vector<Move> below;
    std::vector<std::byte> zeros;
    int64_t num_held = 0, num_unwritten = 0;
    for (size_t i = 0; i < moves.size(); ++i) {
      if (const Region* region = region_ahead(moves, i)) region->fetch(places_->in_region(moves[i + kAhead].row));
      const Move& move = moves[i];
      Region* region = places_->find(move.row);
      const uint16_t place = region ? region->place_of(places_->in_region(move.row)) : kNoPlace;
      if (place == kNoPlace) {
        zeros.resize(static_cast<size_t>(layout_.record_bytes));
        slots.scatter(zeros.data(), move.slot);
        ++num_unwritten;
      } else if (const std::byte* record = region->held(place)) {
        slots.scatter(record, move.slot);
        ++num_held;
      } else {
        below.push_back({places_->first_place_of(move.row) + place, move.slot});
      }
    }
    if (!below.empty()) lower_->read(below, slots, ticket);
    served_ += num_held;
    unwritten_ += num_unwritten;
    asked.done();  // the lower store counts the rows that it reads
  }

  void write(std::span<const Move> moves, const Slots& slots) override {
    if (moves.empty() || !failure_.check_process(table_, path_)) return;
    const std::lock_guard lock(calls_);
    Piece piece(layout_.record_bytes);
    std::vector<std::pair<int64_t, int64_t>> wanted;  // pages that need room: the first, and how many
    for (size_t i = 0; i < moves.size() && !failure();) {
      {
        const std::lock_guard changing(places_->mutex);
        for (; i < moves.size() && !piece.is_full(); ++i) {
          if (const Region* region = region_ahead(moves, i)) {
            region->fetch_to_put(places_->in_region(moves[i + kAhead].row));
            slots.fetch(moves[i + kAhead].slot);
          }
          const Move& move = moves[i];
          Region& region = places_->make(move.row);
          const int64_t held_before = region.num_held();
          slots.gather(move.slot,
                       region.put(places_->in_region(move.row), piece.from(places_->first_place_of(move.row))));
          num_held_ += region.num_held() - held_before;
          region.reserve_ahead([&](int64_t page, int64_t count) {
            wanted.emplace_back(places_->first_place_of(move.row) / layout_.page_rows() + page, count);
          });
        }
      }
      // Outside the lock: the file system may wait for writes whose completion needs that lock.
      for (const auto& [page, count] : wanted) reserve(page, count);
      wanted.clear();
      piece.write_to(*lower_);
    }
  }

  bool flush() override {
    if (!failure_.check_process(table_, path_)) return false;
    const std::lock_guard lock(calls_);
    return write_held() && lower_->flush() && !failure();
  }

  void fail(const char* why) override {
    failure_.set(table_, why);
    lower_->fail(why);
  }

  const Failure* failure() const override { return failure_.get() ? failure_.get() : lower_->failure(); }
  int64_t record_bytes() const override { return layout_.record_bytes; }
  int64_t num_rows() const override { return places_->num_rows(); }

  StoreCounters counters() const override {
    StoreCounters c = lower_->counters();
    c.read_rows += served_ + unwritten_;
    c.served_from_queue += served_;
    c.held_bytes += num_held_ * layout_.record_bytes;
    if (!failure_.in_opening_process()) return c;
    const std::lock_guard lock(places_->mutex);
    places_->for_each([&](const Region& region, int64_t) { c.places_bytes += region.num_bytes(); });
    return c;
  }

  void inject(bool write, int64_t after, int error) override { lower_->inject(write, after, error); }

 private:
  static constexpr size_t kAhead = 12;  // moves between a prefetch and its use

  // Requests disk space for pages of the file. A refusal is ignored here: each write then allocates its own, and
  // reports the error.
  void reserve(int64_t first_page, int64_t count) const {
#if defined(FALLOC_FL_KEEP_SIZE)
    const int64_t begin = layout_.offset_of(first_page * layout_.page_units);
    fallocate(fd_, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin), static_cast<off_t>(count * layout_.page_bytes));
#endif
  }

  // Writes down every open page. Their remaining free places stay unused for now.
  bool write_held() {
    Piece piece(layout_.record_bytes);
    places_->for_each([&](Region& region, int64_t first_place) {
      {
        const std::lock_guard changing(places_->mutex);
        num_held_ -= region.num_held();
        region.close(piece.from(first_place));
      }
      if (piece.is_full()) piece.write_to(*lower_);
    });
    piece.write_to(*lower_);
    return !failure();
  }

  const Region* region_ahead(std::span<const Move> moves, size_t i) const {
    return i + kAhead < moves.size() ? places_->find(moves[i + kAhead].row) : nullptr;
  }

  const BlockLayout layout_;
  const std::string table_, path_;
  FailureSlot failure_;
  std::atomic<int64_t> served_{0}, unwritten_{0}, num_held_{0};
  std::mutex calls_;  // before places_->mutex
  const std::shared_ptr<RowPlaces> places_;
  const int fd_;                       // the lower store's
  std::unique_ptr<BlockStore> lower_;  // destroyed before the names that it asks for
};

}  // namespace

bool can_gather(const BlockLayout& layout) {
  const int64_t rows = layout.page_rows();
  return layout.page_bytes <= kMostPackedPageBytes && kLeastPagePlaces <= rows && rows <= kMostPackedRows;
}

int64_t num_places(const BlockLayout& layout, int64_t num_rows) {
  return (num_rows + region_rows(layout) - 1) / region_rows(layout) * region_places(layout);
}

std::unique_ptr<BlockStore> open_gathered_store(std::shared_ptr<Engine> engine, TableFile file) {
  return std::make_unique<GatheredStore>(std::move(engine), std::move(file));
}

}  // namespace hotrow
