// Cells of requests, Python objects, to numbers, hashes and rows of tables: all columns of a request in one call.
//
// Only cells whose meaning is beyond doubt are read, and columns of one kind: text, whole numbers, floats, None. For
// anything else `read` returns false, and the readers of data/sources, which define what a cell means, take the
// request.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "bindings.h"
#include "hotrow/encode_hash.h"
#include "hotrow/encode_vocabulary.h"

using namespace nb::literals;

namespace {

using namespace hotrow;

constexpr uint64_t kMissingHash = 0x9e3779b97f4a7c15ULL;
constexpr int64_t kMostExact = int64_t{1} << 53;

enum class Encoding { kInt, kUint64, kHex, kBytes };
enum Kind : unsigned { kText = 1, kWhole = 2, kFloat = 4 };

// Whether a column has text and something else: what it then means depends on all of its cells.
bool mixed(unsigned kinds) { return (kinds & kText) != 0 && kinds != kText; }

bool is_digit(char c) { return c >= '0' && c <= '9'; }

size_t digits_from(std::string_view text, size_t at) {
  while (at < text.size() && is_digit(text[at])) ++at;
  return at;
}

// -?D+(.D+)?([eE][+-]?D+)?, which every reader of numbers reads alike.
bool parse_number(std::string_view text, double* out) {
  const size_t first = !text.empty() && text[0] == '-';
  size_t at = digits_from(text, first);
  if (at == first) return false;
  if (at < text.size() && text[at] == '.') {
    const size_t end = digits_from(text, at + 1);
    if (end == at + 1) return false;
    at = end;
  }
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    size_t begin = at + 1;
    if (begin < text.size() && (text[begin] == '+' || text[begin] == '-')) ++begin;
    const size_t end = digits_from(text, begin);
    if (end == begin) return false;
    at = end;
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return at == text.size() && error == std::errc() && end == text.data() + text.size();
}

// 0|-?[1-9]D{0,17}, or up to eight hex digits.
bool parse_id(std::string_view text, Encoding encoding, int64_t* out) {
  const bool hex = encoding == Encoding::kHex;
  const size_t sign = encoding == Encoding::kInt && !text.empty() && text[0] == '-';
  const size_t length = text.size() - sign;
  if (length == 0 || length > (hex ? 8 : 18) || text[sign] == '-') return false;
  if (!hex && text[sign] == '0' && text.size() > 1) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, hex ? 16 : 10);
  return error == std::errc() && end == text.data() + text.size();
}

template <class Index>
struct VocabularyArrays {
  In<Index> directory, rows;
  In<uint64_t> hashes;
  std::optional<In<uint64_t>> key_offsets;
  std::optional<In<uint8_t>> key_bytes;
  uint32_t bits;

  LookupTable<Index> table() const {
    return {bits,
            0,
            directory.shape(0) - 1,
            directory.data(),
            hashes.data(),
            rows.data(),
            key_offsets ? key_offsets->data() : nullptr,
            key_bytes ? key_bytes->data() : nullptr};
  }
};

struct IdColumn {
  nb::str name;
  Encoding encoding;
  uint64_t cap, missing_row;
  std::vector<double> boundaries;  // of buckets: a number's id is how many of them are at most the number
  std::variant<VocabularyArrays<uint32_t>, VocabularyArrays<uint64_t>> arrays;
};

// The ids of one column of a request: all of its rows, or the one that they share.
struct ReadIds {
  std::vector<int64_t> values;   // of whole numbers
  std::vector<uint8_t> bytes;    // of text, one after another
  std::vector<int64_t> offsets;  // [cells + 1]
  std::vector<uint8_t> valid;
};

class CellReader {
 public:
  explicit CellReader(std::vector<std::string> missing) : missing_(std::move(missing)) {}

  void add_numbers(nb::str name) { numbers_.push_back(std::move(name)); }

  template <class Index>
  void add_ids(nb::str name, int encoding, std::vector<double> boundaries, uint64_t cap, uint64_t missing_row,
               uint32_t bits, In<Index> directory, In<uint64_t> hashes, In<Index> rows,
               std::optional<In<uint64_t>> key_offsets, std::optional<In<uint8_t>> key_bytes) {
    require(0 <= encoding && encoding <= 3 && (boundaries.empty() || encoding == 0),
            "encoding must be 0 to 3, and 0 for buckets");
    require(1 <= bits && bits <= 40 && directory.shape(0) == (size_t{1} << bits) + 1 &&
                directory.data()[directory.shape(0) - 1] == hashes.shape(0) && rows.shape(0) == hashes.shape(0),
            "directory, hashes and rows do not fit together");
    const bool stored = encoding == 3 && cap == 0;
    require(key_offsets.has_value() == stored && key_bytes.has_value() == stored &&
                (!stored || key_offsets->shape(0) == hashes.shape(0) + 1),
            "key_offsets and key_bytes do not fit the hashes");
    ids_.push_back(
        {std::move(name), static_cast<Encoding>(encoding), cap, missing_row, std::move(boundaries),
         VocabularyArrays<Index>{directory, rows, hashes, std::move(key_offsets), std::move(key_bytes), bits}});
  }

  // Fills the rows of every column; returns whether all cells could be read. user: a dict of cells that all rows share.
  // items: a list of dicts, or a dict of lists. Of `user` and absent columns, rows are copies of one cell.
  bool read(nb::dict user, nb::object items, Matrix<double> numbers, Matrix<uint64_t> hashes, Matrix<int64_t> rows,
            Matrix<bool> missing) const {
    const size_t n = rows.shape(1);
    require(numbers.shape(0) == numbers_.size() && numbers.shape(1) == n && rows.shape(0) == ids_.size() &&
                hashes.shape(0) == ids_.size() && hashes.shape(1) == n && missing.shape(0) == ids_.size() &&
                missing.shape(1) == n,
            "arrays must be [columns, rows]");
    for (size_t i = 0; i < numbers_.size(); ++i) {
      double* out = numbers.data() + i * n;
      unsigned kinds = 0;
      size_t count = 0;
      const auto take = [&](PyObject* cell) { return take_number(cell, &kinds, out + count++); };
      if (!each_cell(user, items, numbers_[i], n, take) || mixed(kinds)) return false;
      if (count == 1 && n > 1) std::fill(out + 1, out + n, out[0]);
    }
    std::vector<ReadIds> found(ids_.size());
    for (size_t f = 0; f < ids_.size(); ++f) {
      ReadIds& own = found[f];
      unsigned kinds = 0;
      if (ids_[f].encoding == Encoding::kBytes) own.offsets.push_back(0);
      const auto take = [&](PyObject* cell) {
        if (ids_[f].boundaries.empty()) return take_id(cell, ids_[f].encoding, &kinds, &own);
        return take_bucket(cell, ids_[f].boundaries, &kinds, &own);
      };
      if (!each_cell(user, items, ids_[f].name, n, take) || mixed(kinds)) return false;
    }
    nb::gil_scoped_release unlocked;
    for (size_t f = 0; f < ids_.size(); ++f)
      look_up(ids_[f], found[f], n, hashes.data() + f * n, rows.data() + f * n, missing.data() + f * n);
    return true;
  }

 private:
  // Calls take(cell) for each row of a column, or once if the rows share a cell; returns whether it always returned
  // true.
  template <class Take>
  static bool each_cell(const nb::dict& user, const nb::object& items, const nb::str& name, size_t n,
                        const Take& take) {
    if (PyObject* cell = PyDict_GetItemWithError(user.ptr(), name.ptr())) return take(cell);
    if (PyErr_Occurred()) throw nb::python_error();
    if (PyDict_CheckExact(items.ptr())) {
      PyObject* column = PyDict_GetItemWithError(items.ptr(), name.ptr());
      if (column == nullptr) return !PyErr_Occurred() && take(Py_None);
      if (!PyList_CheckExact(column) || static_cast<size_t>(PyList_Size(column)) != n) return false;
      for (size_t i = 0; i < n; ++i)
        if (!take(PyList_GetItem(column, static_cast<Py_ssize_t>(i)))) return false;
      return true;
    }
    if (!PyList_CheckExact(items.ptr()) || static_cast<size_t>(PyList_Size(items.ptr())) != n) return false;
    for (size_t i = 0; i < n; ++i) {
      PyObject* item = PyList_GetItem(items.ptr(), static_cast<Py_ssize_t>(i));
      if (!PyDict_CheckExact(item)) return false;
      PyObject* cell = PyDict_GetItemWithError(item, name.ptr());
      if (cell == nullptr && PyErr_Occurred()) throw nb::python_error();
      if (!take(cell == nullptr ? Py_None : cell)) return false;
    }
    return true;
  }

  // Gives the text of a cell; false if it is not valid Unicode.
  static bool text_of(PyObject* cell, std::string_view* out) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(cell, &size);
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    *out = {text, static_cast<size_t>(size)};
    return true;
  }

  // Whether text means a missing value, blanks around it aside.
  bool means_missing(std::string_view text) const {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    for (const std::string& each : missing_)
      if (text == each) return true;
    return false;
  }

  bool take_number(PyObject* cell, unsigned* kinds, double* out) const {
    *out = std::numeric_limits<double>::quiet_NaN();
    if (cell == Py_None) return true;
    if (PyFloat_CheckExact(cell)) {
      *kinds |= kFloat;
      *out = PyFloat_AsDouble(cell);
      if (std::isnan(*out)) return true;
    } else if (PyLong_CheckExact(cell)) {
      *kinds |= kWhole;
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(cell, &overflow);
      if (overflow != 0 || value > kMostExact || value < -kMostExact) return false;
      *out = static_cast<double>(value);
    } else if (PyUnicode_CheckExact(cell)) {
      *kinds |= kText;
      std::string_view text;
      if (!text_of(cell, &text)) return false;
      if (means_missing(text)) return true;
      if (!parse_number(text, out)) return false;
    } else {
      return false;
    }
    return std::isfinite(static_cast<float>(*out));
  }

  bool take_bucket(PyObject* cell, const std::vector<double>& boundaries, unsigned* kinds, ReadIds* out) const {
    double number = 0;
    if (!take_number(cell, kinds, &number)) return false;
    out->valid.push_back(!std::isnan(number));
    out->values.push_back(std::upper_bound(boundaries.begin(), boundaries.end(), number) - boundaries.begin());
    return true;
  }

  bool take_id(PyObject* cell, Encoding encoding, unsigned* kinds, ReadIds* out) const {
    const bool is_text = encoding == Encoding::kBytes;
    int64_t value = 0;
    std::string_view text;
    char digits[24];
    bool valid = true;
    if (cell == Py_None) {
      valid = false;
    } else if (PyUnicode_CheckExact(cell)) {
      *kinds |= kText;
      if (!text_of(cell, &text)) return false;
      valid = !means_missing(text);
      if (valid && !is_text && !parse_id(text, encoding, &value)) return false;
    } else if (PyLong_CheckExact(cell)) {
      *kinds |= kWhole;
      int overflow = 0;
      value = PyLong_AsLongLongAndOverflow(cell, &overflow);
      if (overflow != 0 || (encoding == Encoding::kUint64 && value < 0)) return false;
      text = {digits, static_cast<size_t>(std::to_chars(digits, digits + sizeof(digits), value).ptr - digits)};
    } else {
      return false;
    }
    out->valid.push_back(valid);
    if (is_text) {
      if (valid) out->bytes.insert(out->bytes.end(), text.begin(), text.end());
      out->offsets.push_back(static_cast<int64_t>(out->bytes.size()));
    } else {
      out->values.push_back(value);
    }
    return true;
  }

  // Hashes and looks up the cells of a column; the GIL is not needed.
  static void look_up(const IdColumn& column, const ReadIds& own, size_t n, uint64_t* hashes, int64_t* rows,
                      bool* missing) {
    const size_t count = own.valid.size();
    const bool is_text = column.encoding == Encoding::kBytes;
    const auto hash = [&](uint64_t cap, uint64_t* out) {
      is_text ? hash_keys(own.bytes.data(), own.offsets.data(), count, cap, out)
              : hash_keys(own.values.data(), count, cap, out);
    };
    hash(0, hashes);
    std::vector<uint64_t> capped(column.cap ? count : 0);
    if (column.cap) hash(column.cap, capped.data());
    const uint64_t* keys = column.cap ? capped.data() : hashes;
    std::visit(
        [&](const auto& arrays) {
          lookup_rows(arrays.table(), keys, own.valid.data(), own.bytes.data(), own.offsets.data(), count,
                      column.missing_row, rows);
        },
        column.arrays);
    for (size_t i = 0; i < count; ++i) {
      missing[i] = own.valid[i] == 0;
      if (missing[i]) hashes[i] = kMissingHash;
    }
    if (count == 1 && n > 1) {
      std::fill(hashes + 1, hashes + n, hashes[0]);
      std::fill(rows + 1, rows + n, rows[0]);
      std::fill(missing + 1, missing + n, missing[0]);
    }
  }

  std::vector<std::string> missing_;
  std::vector<nb::str> numbers_;
  std::vector<IdColumn> ids_;
};

template <class Index>
void bind_add_ids(nb::class_<CellReader>& reader) {
  reader.def("add_ids", &CellReader::add_ids<Index>, "name"_a, "encoding"_a, "boundaries"_a, "cap"_a, "missing_row"_a,
             "bits"_a, "directory"_a.noconvert(), "hashes"_a.noconvert(), "rows"_a.noconvert(),
             "key_offsets"_a.noconvert().none(), "key_bytes"_a.noconvert().none());
}

}  // namespace

void bind_cells(nb::module_& m) {
  nb::class_<CellReader> reader(m, "CellReader");
  reader.def(nb::init<std::vector<std::string>>(), "missing"_a).def("add_numbers", &CellReader::add_numbers, "name"_a);
  bind_add_ids<uint32_t>(reader);
  bind_add_ids<uint64_t>(reader);
  reader.def("read", &CellReader::read, "user"_a, "items"_a, "numbers"_a.noconvert(), "hashes"_a.noconvert(),
             "rows"_a.noconvert(), "missing"_a.noconvert());
}
