#include "hotrow/value_counts.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hotrow {
namespace {
constexpr size_t kAhead = 16;  // how far loops over rows prefetch
constexpr uint32_t kMost = 0xffffffff;

uint64_t word_at(const uint32_t* entry) {
  uint64_t word;
  std::memcpy(&word, entry, sizeof word);
  return word;
}

void add_to(uint32_t* counts, uint32_t rows, uint32_t positives) {
  const auto sum = [](uint32_t a, uint32_t b) { return a + b < a ? kMost : a + b; };
  if (counts[0] == kMost) return;
  counts[0] = sum(counts[0], rows);
  counts[1] = sum(counts[1], positives);
}
}  // namespace

ValueCounts::ValueCounts(size_t num_folds, size_t max_values, bool strict)
    : num_folds_(num_folds), max_values_(max_values), stride_(2 + 2 * num_folds + (strict ? 4 : 0)) {}

void ValueCounts::prefetch(uint64_t hash) const {
  if (!slots_.empty()) __builtin_prefetch(slots_.data() + (hash & (slots_.size() - 1)));
}

const uint32_t* ValueCounts::find(uint64_t hash) const {
  if (slots_.empty()) return nullptr;
  const size_t wrap = slots_.size() - 1;
  for (size_t s = hash & wrap; slots_[s] != 0; s = (s + 1) & wrap) {
    if ((slots_[s] ^ hash) >> 32 != 0) continue;
    const uint32_t* entry = words_.data() + (static_cast<uint32_t>(slots_[s]) - 1) * stride_;
    if (word_at(entry) == hash) return entry + 2;
  }
  return nullptr;
}

uint32_t* ValueCounts::enter(uint64_t hash) {
  if (!counts(hash)) return nullptr;
  if (const uint32_t* found = find(hash)) return const_cast<uint32_t*>(found);
  if (size() == max_values_) {
    leave_out(zeros_ + 1);
    return enter(hash);
  }
  if (4 * (size() + 1) > 3 * slots_.size()) rebuild(std::max<size_t>(64, 2 * slots_.size()));
  const size_t entry = size(), wrap = slots_.size() - 1;
  size_t s = hash & wrap;
  while (slots_[s] != 0) s = (s + 1) & wrap;
  words_.resize(words_.size() + stride_);
  slots_[s] = (hash & 0xffffffff00000000ULL) | (entry + 1);
  std::memcpy(words_.data() + entry * stride_, &hash, sizeof hash);
  return words_.data() + entry * stride_ + 2;
}

void ValueCounts::rebuild(size_t num_slots) {
  slots_.assign(num_slots, 0);
  for (size_t entry = 0; entry < size(); ++entry) {
    const uint64_t hash = word_at(words_.data() + entry * stride_);
    size_t s = hash & (num_slots - 1);
    while (slots_[s] != 0) s = (s + 1) & (num_slots - 1);
    slots_[s] = (hash & 0xffffffff00000000ULL) | (entry + 1);
  }
}

void ValueCounts::leave_out(int zeros) {
  if (zeros <= zeros_) return;
  zeros_ = zeros;
  uint32_t* end = words_.data();
  for (size_t entry = 0; entry < size(); ++entry) {
    const uint32_t* from = words_.data() + entry * stride_;
    if (counts(word_at(from))) end = std::copy(from, from + stride_, end);
  }
  words_.resize(static_cast<size_t>(end - words_.data()));
  rebuild(slots_.size());
}

void ValueCounts::add(const uint64_t* hashes, size_t num_rows, const uint8_t* labels, const uint8_t* counted,
                      const uint8_t* folds) {
  for (size_t i = 0; i < num_rows; ++i) {
    if (i + kAhead < num_rows) prefetch(hashes[i + kAhead]);
    if (!counted[i]) continue;
    if (uint32_t* found = enter(hashes[i])) add_to(found + 2 * (folds == nullptr ? 0 : folds[i]), 1, labels[i]);
  }
}

void ValueCounts::put(const uint64_t* hashes, size_t n, size_t num_folds, const uint32_t* counts, size_t first_fold,
                      int zeros) {
  leave_out(zeros);
  for (size_t i = 0; i < n; ++i, counts += 2 * num_folds) {
    uint32_t* found = enter(hashes[i]);
    for (size_t k = 0; found != nullptr && k < num_folds; ++k)
      add_to(found + 2 * (first_fold + k), counts[2 * k], counts[2 * k + 1]);
  }
}

void ValueCounts::get(const uint64_t* hashes, size_t num_rows, const uint8_t* own, const uint8_t* folds,
                      uint32_t* out) const {
  for (size_t i = 0; i < num_rows; ++i) {
    if (i + kAhead < num_rows) prefetch(hashes[i + kAhead]);
    uint32_t sum[2] = {0, 0};
    if (const uint32_t* found = counts(hashes[i]) ? find(hashes[i]) : nullptr)
      for (size_t k = 0; k < num_folds_; ++k)
        if (own == nullptr || !own[i] || k != folds[i]) add_to(sum, found[2 * k], found[2 * k + 1]);
    std::copy(sum, sum + 2, out + 2 * i);
  }
}

void ValueCounts::before(const uint64_t* hashes, size_t num_rows, const uint8_t* labels, const uint8_t* trains,
                         const int64_t* times, const ValueCounts& after, uint32_t* out) {
  const bool strict = times != nullptr && stride_ > 4;
  for (size_t i = 0; i < num_rows; ++i, out += 2) {
    if (i + kAhead < num_rows) (trains[i + kAhead] ? *this : after).prefetch(hashes[i + kAhead]);
    out[0] = out[1] = 0;
    if (!after.counts(hashes[i])) continue;
    if (!trains[i]) {
      if (const uint32_t* found = after.find(hashes[i])) std::copy(found, found + 2, out);
      continue;
    }
    uint32_t* found = enter(hashes[i]);
    if (found == nullptr) continue;
    uint32_t* held = strict ? found + 2 : found;  // rows of the time at held + 2, which those of that time do not see
    if (strict && word_at(held + 2) != static_cast<uint64_t>(times[i])) {
      add_to(found, held[0], held[1]);
      held[0] = held[1] = 0;
      std::memcpy(held + 2, times + i, sizeof(int64_t));
    }
    std::copy(found, found + 2, out);
    add_to(held, 1, labels[i]);
  }
}

void ValueCounts::items(uint64_t* hashes, uint32_t* counts) const {
  for (size_t entry = 0; entry < size(); ++entry) {
    const uint32_t* from = words_.data() + entry * stride_;
    hashes[entry] = word_at(from);
    std::copy(from + 2, from + 2 + 2 * num_folds_, counts + entry * 2 * num_folds_);
  }
}

}  // namespace hotrow
