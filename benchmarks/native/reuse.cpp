// LRU stack distances; see reuse.h.
#include "reuse.h"

#include <hotrow/encode_hash.h>

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace hotrow {

namespace {
constexpr size_t kAhead = 16;              // ids between a prefetch of an entry and its use
constexpr uint64_t kPlacesPerRow = 8;      // bits per row: compacting is then rare, at 1.5 bytes per row
constexpr uint64_t kMaxRows = 1ULL << 28;  // places stay below 2^32
}  // namespace

StackDistances::StackDistances(uint64_t threshold, uint64_t seed)
    : threshold_(threshold), salt_(mix64(seed + 1)), entries_(1024), bits_(64), tree_(65) {}

template <class Id>
void StackDistances::add(const Id* ids, size_t num_ids, bool once) {
  if (batch_ >= 0xfffffffe) throw std::length_error("more than 2^32 - 2 batches; pass more ids at a time");
  ++batch_;
  const auto hash_of = [&](Id id) { return mix64(static_cast<uint64_t>(id) ^ salt_); };
  for (size_t i = 0; i < num_ids; ++i) {
    if (i + kAhead < num_ids) __builtin_prefetch(&entries_[hash_of(ids[i + kAhead]) & (entries_.size() - 1)], 1);
    const uint64_t hash = hash_of(ids[i]);
    if (hash > threshold_) continue;
    Entry& entry = find(static_cast<uint64_t>(ids[i]), hash);
    if (entry.batch == batch_) {
      if (once) continue;
    } else {
      ++num_distinct_;
      const uint32_t gap = batch_ - entry.batch;
      if (entry.batch != 0 && gap <= kGaps) ++gaps_[gap - 1];
    }
    touch(entry);
  }
}

template void StackDistances::add(const int32_t*, size_t, bool);
template void StackDistances::add(const int64_t*, size_t, bool);

// The entry of `id`, made if there is none; after this there is room for it, and a place for its access.
StackDistances::Entry& StackDistances::find(uint64_t id, uint64_t hash) {
  if (next_place_ == bits_.size() * 64) compact();
  if (2 * (live_ + 1) > entries_.size()) grow();
  const size_t mask = entries_.size() - 1;
  size_t slot = hash & mask;
  while (entries_[slot].batch != 0 && entries_[slot].id != id) slot = (slot + 1) & mask;
  entries_[slot].id = id;
  return entries_[slot];
}

void StackDistances::touch(Entry& entry) {
  ++num_accesses_;
  if (entry.batch != 0) {
    const uint64_t distance = younger(entry.place);
    if (distance >= histogram_.size()) histogram_.resize(std::max(2 * histogram_.size(), distance + 1));
    ++histogram_[distance];
    flip(entry.place, ~0U);
  } else {
    if (live_ == kMaxRows) throw std::length_error("more than 2^28 different rows; lower the sampling rate");
    ++live_;
  }
  entry.place = static_cast<uint32_t>(next_place_++);
  entry.batch = batch_;
  flip(entry.place, 1);
}

// Set bits after `place`, whose own bit is set.
uint64_t StackDistances::younger(uint32_t place) const {
  const size_t word = place / 64;
  uint64_t up_to = static_cast<uint64_t>(std::popcount(bits_[word] << (63 - place % 64)));
  for (size_t i = word; i != 0; i &= i - 1) up_to += tree_[i];
  return live_ - up_to;
}

// difference: 1 or, to clear, -1.
void StackDistances::flip(uint32_t place, uint32_t difference) {
  bits_[place / 64] ^= uint64_t{1} << (place % 64);
  for (size_t i = place / 64 + 1; i < tree_.size(); i += i & (~i + 1)) tree_[i] += difference;
}

void StackDistances::grow() {
  std::vector<Entry> larger(entries_.size() * 2);
  const size_t mask = larger.size() - 1;
  for (const Entry& entry : entries_) {
    if (entry.batch == 0) continue;
    size_t slot = mix64(entry.id ^ salt_) & mask;
    while (larger[slot].batch != 0) slot = (slot + 1) & mask;
    larger[slot] = entry;
  }
  entries_ = std::move(larger);
}

void StackDistances::compact() {
  for (Entry& entry : entries_)
    if (entry.batch != 0) entry.place = static_cast<uint32_t>(live_ - younger(entry.place) - 1);
  const size_t num_words = std::max<size_t>(64, (kPlacesPerRow * live_ + 63) / 64);
  bits_.assign(num_words, 0);
  tree_.assign(num_words + 1, 0);
  for (uint64_t place = 0; place < live_; ++place) bits_[place / 64] |= uint64_t{1} << (place % 64);
  for (size_t i = 1; i <= num_words; ++i) {
    tree_[i] += static_cast<uint32_t>(std::popcount(bits_[i - 1]));
    const size_t above = i + (i & (~i + 1));
    if (above <= num_words) tree_[above] += tree_[i];
  }
  next_place_ = live_;
}

}  // namespace hotrow
