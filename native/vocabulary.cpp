// Merges runs, ranks keys, writes and searches vocabularies; see encode_vocabulary.h.
#include <algorithm>
#include <cstring>
#include <optional>

#include "hotrow/encode_count.h"
#include "hotrow/encode_sort.h"
#include "hotrow/encode_stream.h"
#include "hotrow/encode_vocabulary.h"

namespace hotrow {
namespace {

constexpr size_t kWriteBuffer = size_t{1} << 18;
constexpr size_t kMinReadBuffer = size_t{1} << 12;
constexpr size_t kMaxReadBuffer = size_t{1} << 22;

// One key of a run, or the sum over runs.
struct KeyCount {
  uint64_t hash;
  uint64_t count;
  uint64_t first;
  std::vector<uint8_t> bytes;

  int compare(const KeyCount& other) const {
    if (hash != other.hash) return hash < other.hash ? -1 : 1;
    const size_t common = std::min(bytes.size(), other.bytes.size());
    const int order = common == 0 ? 0 : std::memcmp(bytes.data(), other.bytes.data(), common);
    return order != 0 ? order : bytes.size() < other.bytes.size() ? -1 : bytes.size() > other.bytes.size();
  }
};

void put_key(Writer& out, bool has_bytes, const KeyCount& key) {
  out.put(key.hash);
  out.put(key.count);
  out.put(key.first);
  if (!has_bytes) return;
  out.put(static_cast<uint32_t>(key.bytes.size()));
  out.put(key.bytes.data(), key.bytes.size());
}

// Reads a run from its start; any damage ends it with the error EBADMSG.
class RunReader {
 public:
  RunReader(int fd, bool has_bytes, size_t buffer_bytes)
      : head_(fd, 0, sizeof(RunHeader), sizeof(RunHeader)), has_bytes_(has_bytes), body_(fd, sizeof(RunHeader), 0, 0) {
    if (!head_.get(&header_) || !header_fits()) {
      head_.fail(EBADMSG);
      return;
    }
    left_ = header_.num_keys;
    body_ = Reader(fd, sizeof(RunHeader), header_.payload_bytes, buffer_bytes);
  }

  bool next(KeyCount* key) {
    if (left_ == 0) {
      if (body_.error() == 0 && (body_.num_bytes_left() != 0 || body_.crc() != header_.payload_crc) &&
          head_.error() == 0)
        body_.fail(EBADMSG);
      return false;
    }
    --left_;
    if (!body_.get(&key->hash) || !body_.get(&key->count) || !body_.get(&key->first)) return damaged();
    uint32_t num_bytes = 0;
    if (has_bytes_) {
      if (!body_.get(&num_bytes) || num_bytes > body_.num_bytes_left()) return damaged();
      key->bytes.resize(num_bytes);
      if (!body_.get(key->bytes.data(), num_bytes)) return damaged();
    }
    return true;
  }
  const RunHeader& header() const { return header_; }
  int error() const { return head_.error() != 0 ? head_.error() : body_.error(); }

 private:
  bool header_fits() const {
    Crc32 crc;
    crc.update(&header_, offsetof(RunHeader, header_crc));
    return std::memcmp(header_.magic, kRunMagic, sizeof(kRunMagic)) == 0 && header_.version == kRunVersion &&
           header_.has_bytes == has_bytes_ && crc.value() == header_.header_crc;
  }
  bool damaged() {
    body_.fail(EBADMSG);
    left_ = 0;
    return false;
  }

  Reader head_;
  bool has_bytes_;
  RunHeader header_{};
  uint64_t left_ = 0;
  Reader body_;
};

// All runs as one ascending sequence of distinct keys with summed counts and the earliest first appearance.
class RunMerger {
 public:
  RunMerger(const std::vector<int>& fds, bool has_bytes, size_t memory_bytes) {
    const size_t share = memory_bytes / std::max<size_t>(fds.size(), 1);
    for (int fd : fds) readers_.emplace_back(fd, has_bytes, std::clamp(share, kMinReadBuffer, kMaxReadBuffer));
    heads_.resize(readers_.size());
    for (size_t r = 0; r < readers_.size(); ++r) {
      const RunHeader& header = readers_[r].header();
      missing_count_ += header.missing_count;
      missing_first_ = std::min(missing_first_, header.missing_count == 0 ? kNeverMissing : header.missing_first);
      if (readers_[r].next(&heads_[r])) heap_.add({heads_[r].hash, &heads_[r]});
    }
  }

  bool next(KeyCount* sum) {
    if (heap_.empty() || failed_) return false;
    sum->count = 0;
    sum->first = ~uint64_t{0};
    for (bool begun = false; !heap_.empty() && (!begun || sum->compare(*heap_.top().key) == 0); begun = true) {
      KeyCount& head = *heap_.top().key;
      sum->count += head.count;
      sum->first = std::min(sum->first, head.first);
      sum->hash = head.hash;
      sum->bytes.swap(head.bytes);
      RunReader& reader = readers_[static_cast<size_t>(&head - heads_.data())];
      if (reader.next(&head)) {
        heap_.top().hash = head.hash;
        heap_.settle_top();
      } else {
        failed_ = failed_ || reader.error() != 0;
        heap_.drop_top();
      }
    }
    return true;
  }

  Status status() const {
    if (failed_ || heap_.empty())
      for (size_t r = 0; r < readers_.size(); ++r)
        if (readers_[r].error() != 0) return {readers_[r].error(), "run " + std::to_string(r)};
    return {};
  }
  uint64_t missing_count() const { return missing_count_; }
  uint64_t missing_first() const { return missing_first_; }

 private:
  struct Head {
    uint64_t hash;  // copy of key->hash for comparisons
    KeyCount* key;
    bool operator<(const Head& other) const {
      return hash != other.hash ? hash < other.hash : key->compare(*other.key) < 0;
    }
  };

  std::vector<RunReader> readers_;
  std::vector<KeyCount> heads_;
  MergeHeap<Head> heap_;
  uint64_t missing_count_ = 0;
  uint64_t missing_first_ = kNeverMissing;
  bool failed_ = false;
};

// A candidate for a row, ordered by popularity: falling count, ties by first appearance.
struct Candidate {
  uint64_t count;
  uint64_t
      first;  // twice the first-appearance number, plus 1 for keys: a missing value precedes the key with its number
  uint64_t index;  // index in hash order, or kMissing
  bool operator<(const Candidate& other) const {
    return count != other.count ? count > other.count : first < other.first;
  }
};
constexpr uint64_t kMissing = ~uint64_t{0};

struct IndexRow {
  uint64_t index;
  uint64_t row;
  bool operator<(const IndexRow& other) const { return index < other.index; }
};

void put_index(Writer& out, uint64_t value, bool wide) {
  if (wide)
    out.put(value);
  else
    out.put(static_cast<uint32_t>(value));
}

}  // namespace

Status merge_runs(const std::vector<int>& run_fds, int out_fd, size_t memory_bytes) {
  uint32_t has_bytes = 0;
  if (!run_fds.empty()) {
    RunHeader first{};
    Reader(run_fds[0], 0, sizeof(first), sizeof(first)).get(&first);
    has_bytes = first.has_bytes;
  }
  RunMerger runs(run_fds, has_bytes != 0, memory_bytes);
  Writer out(out_fd, sizeof(RunHeader), kWriteBuffer);
  RunHeader header{};
  header.has_bytes = has_bytes;
  KeyCount key{};
  for (; runs.next(&key); ++header.num_keys) put_key(out, has_bytes != 0, key);
  if (Status status = runs.status(); !status.ok()) return status;
  int error = out.flush();
  header.missing_count = runs.missing_count();
  header.missing_first = runs.missing_first();
  header.payload_bytes = out.num_bytes();
  header.payload_crc = out.crc();
  if (error == 0) error = write_run_header(out_fd, header);
  return {error, "merged run"};
}

struct VocabularyBuilder::State {
  State(bool bytes, std::string folder, size_t memory)
      : has_bytes(bytes),
        tmp_dir(std::move(folder)),
        memory_bytes(memory),
        keys(tmp_dir),
        by_rank(std::in_place, tmp_dir, memory / 2) {}

  bool has_bytes;
  std::string tmp_dir;
  size_t memory_bytes;
  TemporaryFile keys;  // candidates' hashes [and lengths and bytes] in hash order
  uint64_t keys_bytes = 0;
  std::optional<ExternalSorter<Candidate>> by_rank;
  std::optional<ExternalSorter<IndexRow>> by_hash;
  uint64_t num_accesses = 0, num_distinct = 0, num_keys = 0, num_rows = 1, missing_row = 0;
};

VocabularyBuilder::VocabularyBuilder(bool has_bytes, std::string tmp_dir, size_t memory_bytes)
    : state_(std::make_unique<State>(has_bytes, std::move(tmp_dir), memory_bytes)) {}
VocabularyBuilder::~VocabularyBuilder() = default;

uint64_t VocabularyBuilder::num_accesses() const { return state_->num_accesses; }
uint64_t VocabularyBuilder::num_distinct() const { return state_->num_distinct; }
uint64_t VocabularyBuilder::num_keys() const { return state_->num_keys; }
uint64_t VocabularyBuilder::num_rows() const { return state_->num_rows; }
uint64_t VocabularyBuilder::missing_row() const { return state_->missing_row; }

Status VocabularyBuilder::merge(const std::vector<int>& run_fds, uint64_t min_count) {
  State& s = *state_;
  if (s.keys.error() != 0) return {s.keys.error(), "temporary file in " + s.tmp_dir};
  RunMerger runs(run_fds, s.has_bytes, s.memory_bytes / 4);
  Writer keys(s.keys.fd(), 0, kWriteBuffer);
  uint64_t index = 0;
  KeyCount key{};
  while (runs.next(&key)) {
    ++s.num_distinct;
    s.num_accesses += key.count;
    if (key.count < min_count) continue;
    keys.put(key.hash);
    if (s.has_bytes) {
      keys.put(static_cast<uint32_t>(key.bytes.size()));
      keys.put(key.bytes.data(), key.bytes.size());
    }
    s.by_rank->push({key.count, 2 * key.first + 1, index++});
  }
  if (Status status = runs.status(); !status.ok()) return status;
  s.num_accesses += runs.missing_count();
  if (runs.missing_count() != 0 && runs.missing_count() >= min_count)
    s.by_rank->push({runs.missing_count(), 2 * runs.missing_first(), kMissing});
  s.keys_bytes = keys.num_bytes();
  return {keys.flush(), "temporary file in " + s.tmp_dir};
}

Status VocabularyBuilder::rank(uint64_t max_rows, int counts_fd, uint64_t offset, bool wide) {
  State& s = *state_;
  s.by_hash.emplace(s.tmp_dir, s.memory_bytes / 2);
  const size_t width = wide ? 8 : 4;
  Writer counts(counts_fd, offset + width, kWriteBuffer);
  uint64_t rare = s.num_accesses;
  const int error = s.by_rank->drain(s.memory_bytes / 4, [&](const Candidate& candidate) {
    if (max_rows != 0 && s.num_rows >= max_rows) return;
    const uint64_t row = s.num_rows++;
    rare -= candidate.count;
    put_index(counts, candidate.count, wide);
    if (candidate.index == kMissing) {
      s.missing_row = row;
    } else {
      ++s.num_keys;
      s.by_hash->push({candidate.index, row});
    }
  });
  s.by_rank.reset();
  if (error != 0) return {error, "temporary file in " + s.tmp_dir};
  Writer row_0(counts_fd, offset, width);
  put_index(row_0, rare, wide);
  int failed = counts.flush();
  if (failed == 0) failed = row_0.flush();
  return {failed, "counts file"};
}

Status VocabularyBuilder::write(int fd, uint32_t directory_bits, bool wide, SectionInfo sections[kNumSections]) {
  State& s = *state_;
  std::vector<Writer> out;
  for (int i = 0; i < kNumSections; ++i) out.emplace_back(fd, sections[i].offset, kWriteBuffer);
  Reader keys(s.keys.fd(), 0, s.keys_bytes, kWriteBuffer);
  uint64_t next_index = 0, place = 0, buckets_begun = 0, key_end = 0, hash = 0;
  uint32_t length = 0;
  std::vector<uint8_t> bytes;
  if (s.has_bytes) out[kKeyOffsets].put(key_end);
  const int error = s.by_hash->drain(s.memory_bytes / 4, [&](const IndexRow& pair) {
    for (; next_index <= pair.index; ++next_index) {
      keys.get(&hash);
      if (!s.has_bytes) continue;
      keys.get(&length);
      bytes.resize(length);
      keys.get(bytes.data(), length);
    }
    for (const uint64_t bucket = hash >> (64 - directory_bits); buckets_begun <= bucket; ++buckets_begun)
      put_index(out[kDirectory], place, wide);
    out[kHashes].put(hash);
    put_index(out[kRows], pair.row, wide);
    if (s.has_bytes) {
      out[kKeyBytes].put(bytes.data(), length);
      out[kKeyOffsets].put(key_end += length);
    }
    ++place;
  });
  s.by_hash.reset();
  if (error != 0 || keys.error() != 0) return {error != 0 ? error : keys.error(), "temporary file in " + s.tmp_dir};
  for (; buckets_begun <= uint64_t{1} << directory_bits; ++buckets_begun) put_index(out[kDirectory], place, wide);
  for (int i = 0; i < kNumSections; ++i) {
    if (const int failed = out[i].flush(); failed != 0) return {failed, "vocabulary file"};
    sections[i].num_bytes = out[i].num_bytes();
    sections[i].crc = out[i].crc();
  }
  return {};
}

// The first place from `first` on whose hash is not below `hash`. All hashes of a later bucket are above it, so the
// usual bucket, which has 2 to 4 keys, is searched without a branch that could be predicted wrongly.
static uint64_t first_not_below(const uint64_t* hashes, uint64_t first, uint64_t last, uint64_t num_keys,
                                uint64_t hash) {
  constexpr uint64_t kAtOnce = 8;
  if (last - first <= kAtOnce && first + kAtOnce <= num_keys) {
    uint64_t below = 0;
    for (uint64_t q = 0; q < kAtOnce; ++q) below += hashes[first + q] < hash;
    return first + below;
  }
  while (first < last && hashes[first] < hash) ++first;
  return first;
}

template <class Index, class Out>
void lookup_rows(const LookupTable<Index>& table, const uint64_t* hashes, const uint8_t* valid, const uint8_t* bytes,
                 const int64_t* offsets, size_t num_keys, uint64_t missing_row, Out* out) {
  constexpr size_t kBatch = 64;
  const uint32_t shift = 64 - table.directory_bits;
  const uint64_t num_places = table.directory[table.num_buckets];
  uint64_t first[kBatch], last[kBatch];
  // Whether place j has the hash of key i; if hashes are not one-to-one, several places may.
  const auto has_hash = [&](size_t i, uint64_t j, uint64_t end) { return j < end && table.hashes[j] == hashes[i]; };
  const auto key_matches = [&](size_t i, uint64_t j) {
    const auto length = static_cast<uint64_t>(offsets[i + 1] - offsets[i]);
    return table.key_offsets[j + 1] - table.key_offsets[j] == length &&
           (length == 0 || std::memcmp(table.key_bytes + table.key_offsets[j], bytes + offsets[i], length) == 0);
  };
  for (size_t base = 0; base < num_keys; base += kBatch) {
    const size_t n = std::min(kBatch, num_keys - base);
    for (size_t i = 0; i < n; ++i) {
      first[i] = (hashes[base + i] >> shift) - table.first_bucket;
      if (first[i] < table.num_buckets) __builtin_prefetch(table.directory + first[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t bucket = first[i];
      const bool inside = bucket < table.num_buckets;
      first[i] = inside ? table.directory[bucket] : 0;
      last[i] = inside ? table.directory[bucket + 1] : 0;
      __builtin_prefetch(table.hashes + first[i]);
      __builtin_prefetch(table.rows + first[i]);  // the few rows of a bucket are in this line or the next
    }
    for (size_t i = 0; i < n; ++i) {
      first[i] = first_not_below(table.hashes, first[i], last[i], num_places, hashes[base + i]);
    }
    if (table.key_offsets != nullptr) {
      const auto each_found = [&](const auto& visit) {
        for (size_t i = 0; i < n; ++i) {
          if (has_hash(base + i, first[i], last[i])) visit(i);
        }
      };
      each_found([&](size_t i) { __builtin_prefetch(table.key_offsets + first[i]); });
      each_found([&](size_t i) { __builtin_prefetch(table.key_bytes + table.key_offsets[first[i]]); });
      each_found([&](size_t i) {
        while (has_hash(base + i, first[i], last[i]) && !key_matches(base + i, first[i])) ++first[i];
      });
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t row = has_hash(base + i, first[i], last[i]) ? table.rows[first[i]] : 0;
      out[base + i] = static_cast<Out>(valid != nullptr && !valid[base + i] ? missing_row : row);
    }
  }
}

#define HOTROW_LOOKUP(Index, Out)                                                                                   \
  template void lookup_rows<Index, Out>(const LookupTable<Index>&, const uint64_t*, const uint8_t*, const uint8_t*, \
                                        const int64_t*, size_t, uint64_t, Out*);
HOTROW_LOOKUP(uint32_t, int32_t)
HOTROW_LOOKUP(uint32_t, int64_t)
HOTROW_LOOKUP(uint64_t, int32_t)
HOTROW_LOOKUP(uint64_t, int64_t)

}  // namespace hotrow
