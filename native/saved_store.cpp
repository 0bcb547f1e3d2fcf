// See hotrow/saved_store.h.
#include <fcntl.h>
#include <hotrow/saved_store.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

namespace hotrow {
namespace {

constexpr int64_t kBlockRows = 1 << 16;
constexpr size_t kMostListed = 4096;     // rows of a block in a list; more take a bit each
constexpr int64_t kIdsAtOnce = 1 << 15;  // ids that are read together
constexpr int64_t kMostGapBytes = 4096;  // between records that one I/O brings: less than what another I/O costs
constexpr int64_t kMostReadBytes = 256 << 10;

// Returns 0, an errno, or -1 if the file ends too early.
int read_all(int fd, std::byte* to, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t moved = pread(fd, to, static_cast<size_t>(bytes), static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : -1;
    to += moved;
    bytes -= moved;
    offset += moved;
  }
  return 0;
}

// Reads without blocking: true if the page cache had all bytes.
bool read_now(int fd, std::byte* to, int64_t bytes, int64_t offset) {
#if defined(RWF_NOWAIT)
  const iovec whole{to, static_cast<size_t>(bytes)};
  return preadv2(fd, &whole, 1, static_cast<off_t>(offset), RWF_NOWAIT) == bytes;
#else
  (void)fd, (void)to, (void)bytes, (void)offset;
  return false;
#endif
}

// Starts readahead.
void will_need(int fd, int64_t bytes, int64_t offset) {
#if defined(POSIX_FADV_WILLNEED)
  posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
#else
  (void)fd, (void)bytes, (void)offset;
#endif
}

std::string why(int error) {
  return error < 0 ? "the file ends before them; something truncated it" : std::strerror(error);
}

// The position of each row in a rising list of rows.
class SavedPlaces {
 public:
  void add(int64_t row) {
    const int64_t block = row / kBlockRows;
    if (block != open_) {
      close();
      blocks_.resize(static_cast<size_t>(block) + 1, Block{-1, {}, {}, {}});
      blocks_.back().first = num_rows_;
      open_ = block;
    }
    listed_.push_back(static_cast<uint16_t>(row % kBlockRows));
    ++num_rows_;
  }

  // After the last row.
  void close() {
    if (open_ < 0) return;
    Block& block = blocks_.back();
    if (listed_.size() == kBlockRows) {  // place = first + row
    } else if (listed_.size() <= kMostListed) {
      block.listed = {listed_.begin(), listed_.end()};
    } else {
      block.bits.resize(kBlockRows / 64);
      for (const uint16_t row : listed_) block.bits[row / 64u] |= uint64_t{1} << (row % 64);
      uint16_t before = 0;
      for (const uint64_t word : block.bits) {
        block.before.push_back(before);
        before = static_cast<uint16_t>(before + std::popcount(word));
      }
    }
    listed_.clear();
    open_ = -1;
  }

  // -1: it is not there.
  int64_t find(int64_t row) const {
    const auto at = static_cast<size_t>(row / kBlockRows);
    if (at >= blocks_.size() || blocks_[at].first < 0) return -1;
    const Block& block = blocks_[at];
    const auto low = static_cast<uint16_t>(row % kBlockRows);
    if (!block.bits.empty()) {
      const uint64_t word = block.bits[low / 64u], bit = uint64_t{1} << (low % 64);
      return word & bit ? block.first + block.before[low / 64u] + std::popcount(word & (bit - 1)) : -1;
    }
    if (block.listed.empty()) return block.first + low;
    const auto found = std::lower_bound(block.listed.begin(), block.listed.end(), low);
    return found != block.listed.end() && *found == low ? block.first + (found - block.listed.begin()) : -1;
  }

  int64_t num_bytes() const {
    size_t bytes = blocks_.capacity() * sizeof(Block);
    for (const Block& block : blocks_) {
      bytes += 2 * (block.listed.capacity() + block.before.capacity()) + 8 * block.bits.capacity();
    }
    return static_cast<int64_t>(bytes);
  }

 private:
  struct Block {
    int64_t first;                 // the place of its first row; -1: it has none
    std::vector<uint16_t> listed;  // its rows, if they are few
    std::vector<uint64_t> bits;    // else, and how many there are before each word; both empty if all are there
    std::vector<uint16_t> before;
  };
  std::vector<Block> blocks_;
  int64_t num_rows_ = 0, open_ = -1;
  std::vector<uint16_t> listed_;  // of the open block, which is the last
};

class SavedStore final : public Store {
 public:
  SavedStore(std::shared_ptr<Store> lower, std::vector<SavedLink> links, std::vector<int64_t> part_bytes,
             std::string table)
      : lower_(std::move(lower)),
        links_(std::move(links)),
        part_bytes_(std::move(part_bytes)),
        table_(std::move(table)),
        places_(links_.size()),
        written_here_(lower_->num_rows()) {}

  // Returns why the ids are wrong, or an empty string.
  std::string take_ids(RowBits& rows, int64_t num_rows) {
    std::vector<int64_t> ids(static_cast<size_t>(kIdsAtOnce));
    for (size_t k = 0; k < links_.size(); ++k) {
      const SavedValues& from = links_[k].ids;
      int64_t last = -1;
      for (int64_t first = 0; first < links_[k].num_rows; first += kIdsAtOnce) {
        const int64_t n = std::min(kIdsAtOnce, links_[k].num_rows - first);
        const int error =
            read_all(from.file->fd, reinterpret_cast<std::byte*>(ids.data()), 8 * n, from.offset + 8 * first);
        if (error) return from.file->path + ": the ids of its rows cannot be read: " + why(error);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t row = ids[static_cast<size_t>(i)];
          if (row <= last || row >= num_rows) return from.file->path + ": its rows do not rise";
          places_[k].add(row);
          rows.add(static_cast<uint32_t>(row));
          last = row;
        }
      }
      places_[k].close();
      index_bytes_ += places_[k].num_bytes();
    }
    return {};
  }

  void read(std::span<const Move> moves, const Slots& slots, Ticket& ticket) override {
    std::vector<Move> here;
    std::vector<Saved> saved;
    {
      const std::lock_guard lock(mutex_);
      const int64_t num_rows = lower_->num_rows();
      for (const Move& move : moves) {
        const bool below = move.row < 0 || move.row >= num_rows || written_here_.has(static_cast<uint32_t>(move.row));
        const Saved found = below ? Saved{} : find(move);
        found.place < 0 ? here.push_back(move) : saved.push_back(found);
      }
    }
    PendingReads asked(ticket, static_cast<int64_t>(saved.size()));
    if (failure_.get()) return;
    // Starts the slow reads first; the rest is copied meanwhile.
    if (!here.empty()) lower_->read(here, slots, ticket);
    if (bring(saved, slots)) asked.done();
  }

  void write(std::span<const Move> moves, const Slots& slots) override {
    if (failure_.get()) return;
    lower_->write(moves, slots);
    if (lower_->failure()) return;
    const std::lock_guard lock(mutex_);
    for (const Move& move : moves) written_here_.add(static_cast<uint32_t>(move.row));
  }

  bool flush() override { return !failure_.get() && lower_->flush(); }

  void fail(const char* text) override {
    failure_.set(table_, text);
    lower_->fail(text);
  }

  const Failure* failure() const override { return failure_.get() ? failure_.get() : lower_->failure(); }
  int64_t record_bytes() const override { return lower_->record_bytes(); }
  int64_t num_rows() const override { return lower_->num_rows(); }

  StoreCounters counters() const override {
    StoreCounters c = lower_->counters();
    c.reads += reads_;
    c.read_rows += read_rows_;
    c.read_bytes += read_bytes_;
    c.saved_rows = read_rows_;
    const std::lock_guard lock(mutex_);
    c.saved_index_bytes = index_bytes_ + written_here_.num_bytes();
    return c;
  }

 private:
  struct Saved {
    size_t link = 0;
    int64_t place = -1, slot = 0, row = 0;
  };
  struct Read {
    size_t part;
    const SavedValues* from;
    int64_t offset, bytes;
    std::span<const Saved> rows;
  };

  Saved find(const Move& move) const {
    for (size_t k = links_.size(); k-- > 0;) {
      const int64_t place = places_[k].find(move.row);
      if (place >= 0) return {k, place, move.slot, move.row};
    }
    return {};
  }

  bool bring(std::vector<Saved>& saved, const Slots& slots) {
    std::sort(saved.begin(), saved.end(),
              [](const Saved& a, const Saved& b) { return a.link != b.link ? a.link < b.link : a.place < b.place; });
    std::vector<Read> waiting;
    std::vector<std::byte> read;
    const auto put = [&](const Read& one) {
      const int64_t length = part_bytes_[one.part];
      for (const Saved& row : one.rows) {
        std::memcpy(slots.parts[one.part].base + row.slot * length,
                    read.data() + (row.place - one.rows.front().place) * length, static_cast<size_t>(length));
      }
      ++reads_;
      read_bytes_ += one.bytes;
    };
    // Copies what is in the page cache at once, and asks for readahead of everything else before waiting for any of it.
    for_each_read(saved, [&](const Read& one) {
      read.resize(static_cast<size_t>(one.bytes));
      if (read_now(one.from->file->fd, read.data(), one.bytes, one.offset)) return put(one);
      will_need(one.from->file->fd, one.bytes, one.offset);
      waiting.push_back(one);
    });
    for (const Read& one : waiting) {
      read.resize(static_cast<size_t>(one.bytes));
      if (const int error = read_all(one.from->file->fd, read.data(), one.bytes, one.offset)) {
        failure_.set("reading row " + std::to_string(one.rows.front().row) + " of table '" + table_ + "' in " +
                     one.from->file->path + ": " + why(error) +
                     "; restore that checkpoint, then resume from the last one");
        return false;
      }
      put(one);
    }
    read_rows_ += static_cast<int64_t>(saved.size());
    return true;
  }

  // visit({part, from, offset, bytes, rows}) of each I/O.
  template <class Visit>
  void for_each_read(std::span<const Saved> saved, const Visit& visit) const {
    for (size_t part = 0; part < part_bytes_.size(); ++part) {
      const int64_t length = part_bytes_[part];
      for (size_t first = 0; first < saved.size();) {
        const Saved& begin = saved[first];
        size_t end = first + 1;
        while (end < saved.size() && saved[end].link == begin.link &&
               (saved[end].place - saved[end - 1].place - 1) * length <= kMostGapBytes &&
               (saved[end].place - begin.place + 1) * length <= kMostReadBytes) {
          ++end;
        }
        const SavedValues& from = links_[begin.link].parts[part];
        const int64_t bytes = (saved[end - 1].place - begin.place + 1) * length;
        visit(Read{part, &from, from.offset + begin.place * length, bytes, saved.subspan(first, end - first)});
        first = end;
      }
    }
  }

  const std::shared_ptr<Store> lower_;
  const std::vector<SavedLink> links_;
  const std::vector<int64_t> part_bytes_;
  const std::string table_;
  std::vector<SavedPlaces> places_;  // by link; does not change once the ids are taken
  int64_t index_bytes_ = 0;
  FailureSlot failure_;
  std::atomic<int64_t> reads_{0}, read_rows_{0}, read_bytes_{0};

  mutable std::mutex mutex_;  // of what follows
  RowBits written_here_;      // rows that were written to
};

}  // namespace

SavedFile::~SavedFile() { close(fd); }

std::unique_ptr<Store> open_saved_store(std::shared_ptr<Store> lower, std::vector<SavedLink> links,
                                        std::vector<int64_t> part_bytes, std::string table, int64_t num_rows,
                                        RowBits& rows, std::string& reason) {
#if defined(POSIX_FADV_RANDOM)
  // Rows are scattered over a file, so readahead would be wasted.
  for (const SavedLink& link : links) {
    for (const SavedValues& values : link.parts) posix_fadvise(values.file->fd, 0, 0, POSIX_FADV_RANDOM);
  }
#endif
  auto store =
      std::make_unique<SavedStore>(std::move(lower), std::move(links), std::move(part_bytes), std::move(table));
  reason = store->take_ids(rows, num_rows);
  if (!reason.empty()) return nullptr;
  return store;
}

}  // namespace hotrow
