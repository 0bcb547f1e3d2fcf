// Parser of Criteo-like text: one row per line,
//
//   [ignored d ...] [label d] dense_0 d ... dense_{I-1} d category_0 d ... category_{C-1} [\r]\n        d: tab or comma
//
// dense: an integer of at most 64 bits or a finite decimal number, empty = NaN. category: 1 to 8 hex digits, empty =
// missing (valid 0, key 0). Ignored fields may hold anything. Integers become the nearest float32: exact up to 2^24.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

struct RowLayout {
  char delimiter;
  int num_ignored;
  bool has_label;
  int num_dense;
  int num_categories;
};

// Columns being filled, with room for `capacity` rows: label[row], dense[row * num_dense + i],
// keys[c * stride + row], valid[c * stride + row].
struct RowColumns {
  float* label;
  float* dense;
  uint32_t* keys;
  uint8_t* valid;
  size_t stride;
  size_t capacity;
};

enum class RowFault : int {
  kNone = 0,
  kColumnCount,  // fewer or more columns than the layout has
  kLabel,        // not 0 or 1
  kNotNumber,    // dense: not a finite decimal number
  kOverflow,     // dense: beyond int64, or beyond float32
  kNotHex,       // category: a character that is not a hex digit
  kTooLong,      // category: more than 8 hex digits
};

struct RowResult {
  size_t num_rows;   // rows stored by this call
  size_t num_bytes;  // bytes of whole lines consumed, up to the start of the faulty line if there is one
  RowFault fault;
  int column;  // 0-based column of the faulty value
};

// Parses lines of text[0 : num_bytes] into rows first_row, first_row + 1, ... until the end of the text, the capacity
// or a faulty line. The last byte must be '\n'. Never reads outside the text; stores no row for a faulty line, but may
// have overwritten the memory of that row.
RowResult parse_rows(const char* text, size_t num_bytes, const RowLayout& layout, size_t first_row,
                     const RowColumns& out);

}  // namespace hotrow
