// Which units of a table wait to be written, and with which bytes; see engine.h.
#include "engine.h"

namespace hotrow {
namespace {

constexpr size_t kImagesInSlab = 64;

size_t known_words(const BlockLayout& layout) { return static_cast<size_t>((layout.unit_rows + 63) / 64); }

// A unit's image, then its bits.
size_t image_bytes(const BlockLayout& layout) {
  return static_cast<size_t>(layout.unit_bytes) + known_words(layout) * sizeof(uint64_t);
}

}  // namespace

Dirty* Table::find(int64_t unit) {
  if (dirty.empty()) return nullptr;
  const auto found = dirty.find(unit);
  return found == dirty.end() ? nullptr : &found->second;
}

std::pair<Dirty*, bool> Table::make(int64_t unit) {
  const auto [place, is_new] = dirty.try_emplace(unit);
  Dirty& made = place->second;
  if (!is_new) return {&made, false};
  const size_t bytes = image_bytes(file.layout);
  if (free_images.empty()) {
    slabs.push_back(std::make_unique<std::byte[]>(kImagesInSlab * bytes));
    for (size_t i = 0; i < kImagesInSlab; ++i) free_images.push_back(slabs.back().get() + i * bytes);
  }
  std::byte* image = free_images.back();
  free_images.pop_back();
  uint64_t* known = reinterpret_cast<uint64_t*>(image + file.layout.unit_bytes);
  std::memset(known, 0, known_words(file.layout) * sizeof(uint64_t));
  made = {this, unit, image, known, 0, false};
  return {&made, true};
}

void Table::drop(Dirty* unit) {
  free_images.push_back(unit->image);
  dirty.erase(unit->unit);
}

const std::byte* Table::waiting_bytes_of(int64_t row) {
  const BlockLayout& layout = file.layout;
  const Dirty* unit = find(layout.unit_of(row));
  return unit && unit->knows(row % layout.unit_rows) ? unit->image + layout.place_in_unit(row) : nullptr;
}

void Table::put(Dirty& unit, int64_t row, const std::byte* record) {
  const BlockLayout& layout = file.layout;
  const int64_t place = row % layout.unit_rows;
  std::memcpy(unit.image + layout.place_in_unit(row), record, static_cast<size_t>(layout.record_bytes));
  unit.num_known += !unit.knows(place);
  unit.known[place / 64] |= uint64_t{1} << (place % 64);
  unit.changed = true;
}

void Table::complete(Dirty& unit, const std::byte* on_disk) {
  const BlockLayout& layout = file.layout;
  for (int64_t place = 0; place < layout.unit_rows; ++place) {
    if (!unit.knows(place)) {
      const int64_t at = place * layout.record_bytes;
      std::memcpy(unit.image + at, on_disk + at, static_cast<size_t>(layout.record_bytes));
      unit.known[place / 64] |= uint64_t{1} << (place % 64);
    }
  }
  unit.num_known = layout.unit_rows;
}

}  // namespace hotrow
