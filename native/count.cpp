// Hashes and counts of raw ids; see encode_hash.h and encode_count.h.
#include <algorithm>
#include <bit>
#include <cstring>

#include "hotrow/encode_count.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "hotrow/encode_hash.h"
#include "hotrow/encode_stream.h"

namespace hotrow {

void hash_keys(const uint32_t* keys, size_t num_keys, uint64_t cap, uint64_t* out) {
  const auto narrow_cap = static_cast<uint32_t>(cap);  // a 32-bit division is several times faster
  if (cap == 0 || cap > 0xffffffff) {
    for (size_t i = 0; i < num_keys; ++i) out[i] = mix64(keys[i]);
  } else {
    for (size_t i = 0; i < num_keys; ++i) out[i] = mix64(keys[i] % narrow_cap);
  }
}

void hash_keys(const int64_t* keys, size_t num_keys, uint64_t cap, uint64_t* out) {
  const auto signed_cap = static_cast<int64_t>(cap);
  for (size_t i = 0; i < num_keys; ++i) {
    int64_t key = keys[i];
    if (cap != 0) {
      key %= signed_cap;
      key += key < 0 ? signed_cap : 0;
    }
    out[i] = mix64(static_cast<uint64_t>(key));
  }
}

void hash_keys(const uint8_t* bytes, const int64_t* offsets, size_t num_keys, uint64_t cap, uint64_t* out) {
  for (size_t i = 0; i < num_keys; ++i) {
    const uint64_t h = hash_string(bytes + offsets[i], static_cast<size_t>(offsets[i + 1] - offsets[i]));
    out[i] = cap == 0 ? h : mix64(h % cap);
  }
}

namespace {
constexpr size_t kBatch = 64;  // keys in flight: enough to hide a memory access, few enough for the first-level cache
constexpr size_t kAhead = 16;  // how far a loop over entries prefetches
constexpr size_t kMaxEntries = 0xffffffff - 1;
constexpr size_t kWriteBuffer = size_t{1} << 18;

inline uint32_t slot_entry(uint64_t slot) { return static_cast<uint32_t>(slot) - 1; }
inline uint64_t make_slot(uint64_t hash, size_t entry) { return (hash & 0xffffffff00000000ULL) | (entry + 1); }
// Probes go to random pages: with 4 KiB pages each would also miss the TLB.
inline void advise_huge_pages(void* block, size_t num_bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(block) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(block) + num_bytes) & ~(kHuge - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)block, (void)num_bytes;
#endif
}

inline bool same_tag(uint64_t slot, uint64_t hash) { return (slot ^ hash) >> 32 == 0; }
}  // namespace

int write_run_header(int fd, RunHeader header) {
  std::memcpy(header.magic, kRunMagic, sizeof(kRunMagic));
  header.version = kRunVersion;
  Crc32 crc;
  crc.update(&header, offsetof(RunHeader, header_crc));
  header.header_crc = crc.value();
  Writer out(fd, 0, sizeof(RunHeader));
  out.put(header);
  return out.flush();
}

size_t count_codes(const int64_t* codes, size_t num_rows, const uint8_t* mask, uint32_t* counts, int64_t* appeared) {
  size_t num_appeared = 0;
  for (size_t i = 0; i < num_rows; ++i) {
    if (mask != nullptr && !mask[i]) continue;
    if (counts[codes[i]]++ == 0) appeared[num_appeared++] = codes[i];
  }
  return num_appeared;
}

size_t Counter::slots_for(size_t num_keys) {
  return num_keys == 0 ? 0 : std::bit_ceil(std::max<size_t>(64, num_keys + num_keys / 3 + 1));  // at most 3/4 full
}

size_t Counter::num_bytes() const {
  return num_slots_ * sizeof(uint64_t) + entries_.num_bytes() + key_ends_.num_bytes() + arena_.num_bytes();
}

size_t Counter::num_bytes_after(size_t num_more, size_t num_key_bytes) const {
  const size_t n = entries_.size() + num_more;
  if (n > kMaxEntries) return ~size_t{0};
  size_t bytes = std::max(slots_for(n), num_slots_) * sizeof(uint64_t);
  bytes += std::max(GrowArray<Entry>::capacity_for(n, 0), entries_.capacity()) * sizeof(Entry);
  if (has_bytes_) {
    bytes += std::max(GrowArray<uint64_t>::capacity_for(n, 0), key_ends_.capacity()) * sizeof(uint64_t);
    bytes += std::max(GrowArray<uint8_t>::capacity_for(arena_.size() + num_key_bytes, 0), arena_.capacity());
  }
  return bytes;
}

bool Counter::same_key(uint32_t entry, uint64_t hash, const uint8_t* key, size_t key_bytes) const {
  if (entries_[entry].hash != hash) return false;
  if (!has_bytes_) return true;
  const uint64_t start = entry == 0 ? 0 : key_ends_[entry - 1];
  return key_ends_[entry] - start == key_bytes &&
         (key_bytes == 0 || std::memcmp(arena_.data() + start, key, key_bytes) == 0);
}

void Counter::rebuild(size_t num_slots) {
  std::free(
      slots_);  // before the new one is allocated: entries have all that is needed, and both together would be the peak
  num_slots_ = 0;
  slots_ = static_cast<uint64_t*>(std::calloc(num_slots, sizeof(uint64_t)));
  if (slots_ == nullptr && num_slots != 0) throw std::bad_alloc();
  advise_huge_pages(slots_, num_slots * sizeof(uint64_t));
  num_slots_ = num_slots;
  const size_t mask = num_slots_ - 1;
  for (size_t e = 0; e < entries_.size(); ++e) {
    if (e + kAhead < entries_.size()) __builtin_prefetch(slots_ + (entries_[e + kAhead].hash & mask), 1);
    size_t s = entries_[e].hash & mask;
    while (slots_[s] != 0) s = (s + 1) & mask;
    slots_[s] = make_slot(entries_[e].hash, e);
  }
}

void Counter::reserve(size_t num_more) {
  const size_t n = entries_.size() + num_more;
  if (n > kMaxEntries) throw std::bad_alloc();
  entries_.reserve(n);
  if (has_bytes_) key_ends_.reserve(n);
  if (slots_for(n) > num_slots_) rebuild(slots_for(n));
}

void Counter::add(const uint64_t* hashes, size_t num_keys, const uint8_t* valid, const uint32_t* counts,
                  const uint8_t* bytes, const int64_t* offsets) {
  for (size_t base = 0; base < num_keys; base += kBatch) {
    const size_t n = std::min(kBatch, num_keys - base);
    reserve(n);
    const size_t wrap = num_slots_ - 1;
    for (size_t i = base; i < base + n; ++i) __builtin_prefetch(slots_ + (hashes[i] & wrap), 1);
    for (size_t i = base; i < base + n; ++i) {
      const uint64_t slot = slots_[hashes[i] & wrap];
      if (slot != 0) __builtin_prefetch(entries_.data() + slot_entry(slot), 1);
    }
    for (size_t i = base; i < base + n; ++i) {
      const uint64_t count = counts == nullptr ? 1 : counts[i];
      if (count == 0) continue;
      if (valid != nullptr && !valid[i]) {
        if (missing_count_ == 0) missing_first_ = order();
        missing_count_ += count;
        continue;
      }
      const uint64_t h = hashes[i];
      const uint8_t* key = has_bytes_ ? bytes + offsets[i] : nullptr;
      const size_t key_bytes = has_bytes_ ? static_cast<size_t>(offsets[i + 1] - offsets[i]) : 0;
      size_t s = h & wrap;
      while (slots_[s] != 0 && !(same_tag(slots_[s], h) && same_key(slot_entry(slots_[s]), h, key, key_bytes)))
        s = (s + 1) & wrap;
      if (slots_[s] != 0) {
        entries_[slot_entry(slots_[s])].count += count;
        continue;
      }
      if (has_bytes_) {
        arena_.reserve(arena_.size() + key_bytes);
        arena_.append(key, key_bytes);
        const uint64_t end = arena_.size();
        key_ends_.append(&end, 1);
      }
      slots_[s] = make_slot(h, entries_.size());
      const Entry entry{h, count};
      entries_.append(&entry, 1);
    }
  }
}

bool Counter::before(uint32_t a, uint32_t b) const {
  if (entries_[a].hash != entries_[b].hash) return entries_[a].hash < entries_[b].hash;
  if (!has_bytes_) return a < b;
  const uint64_t start_a = a == 0 ? 0 : key_ends_[a - 1], start_b = b == 0 ? 0 : key_ends_[b - 1];
  const size_t bytes_a = key_ends_[a] - start_a, bytes_b = key_ends_[b] - start_b;
  const size_t common = std::min(bytes_a, bytes_b);
  const int order = common == 0 ? 0 : std::memcmp(arena_.data() + start_a, arena_.data() + start_b, common);
  return order != 0 ? order < 0 : bytes_a < bytes_b;
}

// Packs the used slots to the front and sorts them by (hash, key), in the memory of the index itself.
void Counter::sort_slots() {
  uint64_t* end = std::remove(slots_, slots_ + num_slots_, uint64_t{0});
  std::sort(slots_, end);
  for (uint64_t* first = slots_; first != end;) {
    uint64_t* last = first + 1;
    while (last != end && same_tag(*first, *last)) ++last;
    if (last - first > 1)
      std::sort(first, last, [this](uint64_t a, uint64_t b) { return before(slot_entry(a), slot_entry(b)); });
    first = last;
  }
}

int Counter::drain(int fd) {
  sort_slots();
  Writer out(fd, sizeof(RunHeader), kWriteBuffer);
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (i + kAhead < entries_.size()) __builtin_prefetch(entries_.data() + slot_entry(slots_[i + kAhead]));
    const uint32_t e = slot_entry(slots_[i]);
    out.put(entries_[e].hash);
    out.put(entries_[e].count);
    out.put(order_ + e);
    if (has_bytes_) {
      const uint64_t start = e == 0 ? 0 : key_ends_[e - 1];
      out.put(static_cast<uint32_t>(key_ends_[e] - start));
      out.put(arena_.data() + start, key_ends_[e] - start);
    }
  }
  int error = out.flush();
  RunHeader header{};
  header.has_bytes = has_bytes_;
  header.num_keys = entries_.size();
  header.missing_count = missing_count_;
  header.missing_first = missing_first_;
  header.payload_bytes = out.num_bytes();
  header.payload_crc = out.crc();
  if (error == 0) error = write_run_header(fd, header);
  if (error != 0) {
    rebuild(num_slots_);
    return error;
  }
  order_ += entries_.size();
  entries_.clear();
  key_ends_.clear();
  arena_.clear();
  missing_count_ = 0;
  missing_first_ = kNeverMissing;
  std::free(slots_);
  slots_ = nullptr;
  num_slots_ = 0;
  return 0;
}

}  // namespace hotrow
