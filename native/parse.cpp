// Parses Criteo-like text into columns; see encode_parse.h. A row is some 40 short fields, and what it costs is
// branches on a field's length and characters that come one by one. So the usual field, at most 7 digits or exactly 8
// hex digits, is read as one word of 8 characters; every other field takes the path of characters.
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "hotrow/encode_parse.h"

namespace hotrow {
namespace {

// ---- eight characters as one word, the first in the lowest byte

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t each(uint8_t byte) { return byte * 0x0101010101010101ULL; }
constexpr uint64_t kHighBits = each(0x80);

inline uint64_t load_word(const char* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// The high bit of every byte that equals `c`.
inline uint64_t equals(uint64_t word, char c) {
  const uint64_t differs = word ^ each(static_cast<uint8_t>(c));
  return ~(((differs & ~kHighBits) + ~kHighBits) | differs) & kHighBits;
}

// The high bit of every byte that is at least `least`, for bytes below 0x80.
constexpr uint64_t at_least(uint64_t word, uint8_t least) { return (word + each(0x80 - least)) & kHighBits; }

inline bool all_hex(uint64_t word) {
  const uint64_t lower = word | each(0x20);
  const uint64_t digits = at_least(word, '0') & ~at_least(word, '9' + 1);
  const uint64_t letters = at_least(lower, 'a') & ~at_least(lower, 'f' + 1);
  return ((digits | letters) & ~word & kHighBits) == kHighBits;
}

// The number that eight hex digits write.
inline uint32_t hex_value(uint64_t word) {
  const uint64_t nibbles = (word & each(0x0F)) + 9 * (word >> 6 & each(1));
  uint64_t bytes = (nibbles << 4 | nibbles >> 8) & 0x00FF00FF00FF00FFULL;
  bytes = (bytes | bytes >> 8) & 0x0000FFFF0000FFFFULL;
  return __builtin_bswap32(static_cast<uint32_t>(bytes | bytes >> 16));
}

// The number that eight bytes 0 to 9 write: pairs of digits, then pairs of pairs.
inline uint32_t decimal_value(uint64_t digits) {
  const uint64_t pairs = digits * 10 + (digits >> 8);
  const uint64_t high = (pairs & 0x000000FF000000FFULL) * (100 + (1000000ULL << 32));
  const uint64_t low = (pairs >> 16 & 0x000000FF000000FFULL) * (1 + (10000ULL << 32));
  return static_cast<uint32_t>((high + low) >> 32);
}

// ---- characters

constexpr uint8_t kNoDigit = 0xff;

constexpr std::array<uint8_t, 256> make_hex_digits() {
  std::array<uint8_t, 256> table{};
  table.fill(kNoDigit);
  for (int i = 0; i < 10; ++i) table['0' + i] = static_cast<uint8_t>(i);
  for (int i = 0; i < 6; ++i) table['a' + i] = table['A' + i] = static_cast<uint8_t>(10 + i);
  return table;
}
constexpr std::array<uint8_t, 256> kHexDigits = make_hex_digits();

inline uint8_t hex_digit(char c) { return kHexDigits[static_cast<uint8_t>(c)]; }
inline bool is_digit(char c) { return static_cast<uint8_t>(c - '0') < 10; }

// Reads one line. `at` is the next unread character; a line's '\n' is always within the text, so it ends every loop.
struct Cursor {
  const char* at;
  const char* text_end;
  char delimiter;

  // A field ends at the delimiter, at the end of line, or at a '\r' that the end of line follows.
  bool at_field_end() const { return *at == delimiter || *at == '\n' || (*at == '\r' && at[1] == '\n'); }
  void skip_field() {
    while (!at_field_end()) ++at;
  }
};

// Whether [first, last) is -?(digits[.digits] | .digits)([eE][+-]?digits)?: no "nan", no "inf", no hex floats.
bool is_decimal(const char* first, const char* last, bool* integer) {
  const auto digits = [&] {
    const char* start = first;
    while (first != last && is_digit(*first)) ++first;
    return first != start;
  };
  if (first != last && *first == '-') ++first;
  bool any = digits();
  *integer = first == last;
  if (first != last && *first == '.') any |= (++first, digits());
  if (!any) return false;
  if (first == last) return true;
  if (*first != 'e' && *first != 'E') return false;
  if (++first != last && (*first == '+' || *first == '-')) ++first;
  return digits() && first == last;
}

// The whole field as a number, rounded once to double and once to float.
RowFault parse_decimal(const char* first, const char* last, float* out) {
  bool integer;
  if (!is_decimal(first, last, &integer)) return RowFault::kNotNumber;
  if (integer) {
    int64_t exact = 0;
    if (std::from_chars(first, last, exact).ec == std::errc::result_out_of_range) return RowFault::kOverflow;
    *out = static_cast<float>(exact);
    return RowFault::kNone;
  }
  double value = 0;
#if defined(__cpp_lib_to_chars)
  const bool in_range = std::from_chars(first, last, value).ec == std::errc();
#else
  const bool in_range = false;
#endif
  if (!in_range) value = std::strtod(std::string(first, last).c_str(), nullptr);  // becomes 0 or infinity
  *out = static_cast<float>(value);
  return std::isfinite(*out) ? RowFault::kNone : RowFault::kOverflow;
}

// Reads an integer of fewer than eight characters, or nothing, and the delimiter behind it, and says whether it could.
inline bool parse_short_dense(Cursor& cursor, float* out) {
  if (cursor.text_end - cursor.at < 8) return false;
  uint64_t word = load_word(cursor.at);
  const uint64_t ends = equals(word, cursor.delimiter);
  if (ends == 0) return false;
  const int length = std::countr_zero(ends) / 8;
  const bool negative = (word & 0xFF) == '-';
  word ^= negative ? '-' ^ '0' : 0;
  // Zeros go before the digits; in two shifts, because a word cannot be shifted by 64 at once.
  const uint64_t digits = (word ^ each('0')) << 1 << (63 - 8 * length);
  if ((((digits + each(0x80 - 10)) | digits) & kHighBits) != 0 || (negative && length == 1)) return false;
  const auto value = static_cast<int32_t>(decimal_value(digits));
  *out = length == 0 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(negative ? -value : value);
  cursor.at += length + 1;
  return true;
}

// Reads up to 18 digits with a sign; parse_decimal reads anything else.
inline RowFault parse_dense(Cursor& cursor, float* out) {
  const char* first = cursor.at;
  const char* p = first;
  const bool negative = *p == '-';
  p += negative;
  const char* digits = p;
  int64_t value = 0;
  while (is_digit(*p) && p - digits < 18) value = value * 10 + (*p++ - '0');
  cursor.at = p;
  if (p != digits && cursor.at_field_end()) {
    *out = static_cast<float>(negative ? -value : value);
    return RowFault::kNone;
  }
  if (p == first && cursor.at_field_end()) {
    *out = std::numeric_limits<float>::quiet_NaN();
    return RowFault::kNone;
  }
  cursor.skip_field();
  return parse_decimal(first, cursor.at, out);
}

// 0 or 1, also written 0.0 or 1.0.
inline RowFault parse_label(Cursor& cursor, float* out) {
  const char digit = *cursor.at;
  if (digit != '0' && digit != '1') return RowFault::kLabel;
  *out = static_cast<float>(digit - '0');
  if (*++cursor.at == '.') {
    while (*++cursor.at == '0') {
    }
  }
  return RowFault::kNone;
}

// Reads eight hex digits and `end` behind them, and says whether it could.
inline bool parse_whole_category(Cursor& cursor, char end, uint32_t* key, uint8_t* valid) {
  if (cursor.text_end - cursor.at < 9 || cursor.at[8] != end) return false;
  const uint64_t word = load_word(cursor.at);
  if (!all_hex(word)) return false;
  *key = hex_value(word);
  *valid = 1;
  cursor.at += 9;
  return true;
}

inline RowFault parse_category(Cursor& cursor, uint32_t* key, uint8_t* valid) {
  const char* p = cursor.at;
  uint32_t value = 0;
  for (uint8_t digit; (digit = hex_digit(*p)) != kNoDigit; ++p) {
    if (p - cursor.at == 8) {
      cursor.at = p;
      return RowFault::kTooLong;
    }
    value = value << 4 | digit;
  }
  *key = value;
  *valid = p != cursor.at;
  cursor.at = p;
  return RowFault::kNone;
}

// Steps over the end of field `column`; `garbage` is the fault if the field holds more than was read.
inline RowFault end_field(Cursor& cursor, int column, int num_columns, RowFault garbage) {
  const bool last = column + 1 == num_columns;
  if (!last && *cursor.at == cursor.delimiter) {
    ++cursor.at;
    return RowFault::kNone;
  }
  if (!cursor.at_field_end()) return garbage;
  if (!last || *cursor.at == cursor.delimiter) return RowFault::kColumnCount;
  cursor.at += (*cursor.at == '\r') + 1;
  return RowFault::kNone;
}

// Parses one line into row `row`; on a fault, *column is its 0-based column.
inline RowFault parse_row(Cursor& cursor, const RowLayout& layout, const RowColumns& out, size_t row, int* column) {
  const int num_columns = layout.num_ignored + layout.has_label + layout.num_dense + layout.num_categories;
  int& c = *column;
  RowFault fault = RowFault::kNone;
  for (c = 0; c < layout.num_ignored; ++c) {
    cursor.skip_field();
    if ((fault = end_field(cursor, c, num_columns, RowFault::kColumnCount)) != RowFault::kNone) return fault;
  }
  if (layout.has_label) {
    if ((fault = parse_label(cursor, out.label + row)) != RowFault::kNone) return fault;
    if ((fault = end_field(cursor, c, num_columns, RowFault::kLabel)) != RowFault::kNone) return fault;
    ++c;
  }
  float* dense = out.dense + row * layout.num_dense;
  for (int i = 0; i < layout.num_dense; ++i, ++c) {
    if (c + 1 < num_columns && parse_short_dense(cursor, dense + i)) continue;
    if ((fault = parse_dense(cursor, dense + i)) != RowFault::kNone) return fault;
    if ((fault = end_field(cursor, c, num_columns, RowFault::kNotNumber)) != RowFault::kNone) return fault;
  }
  uint32_t* key = out.keys + row;
  uint8_t* valid = out.valid + row;
  for (int i = 0; i < layout.num_categories; ++i, ++c, key += out.stride, valid += out.stride) {
    if (parse_whole_category(cursor, c + 1 < num_columns ? cursor.delimiter : '\n', key, valid)) continue;
    if ((fault = parse_category(cursor, key, valid)) != RowFault::kNone) return fault;
    if ((fault = end_field(cursor, c, num_columns, RowFault::kNotHex)) != RowFault::kNone) return fault;
  }
  return RowFault::kNone;
}

}  // namespace

RowResult parse_rows(const char* text, size_t num_bytes, const RowLayout& layout, size_t first_row,
                     const RowColumns& out) {
  Cursor cursor{text, text + num_bytes, layout.delimiter};
  RowResult result{0, 0, RowFault::kNone, 0};
  size_t row = first_row;
  for (; row < out.capacity && cursor.at != cursor.text_end; ++row) {
    result.fault = parse_row(cursor, layout, out, row, &result.column);
    if (result.fault != RowFault::kNone) break;
    result.num_bytes = static_cast<size_t>(cursor.at - text);
  }
  result.num_rows = row - first_row;
  if (result.fault == RowFault::kNone) result.column = 0;
  return result;
}

}  // namespace hotrow
