// Parsing, counting and encoding of raw rows as Python functions; see bindings_ops.cpp for the rules.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "hotrow/encode_count.h"
#include "hotrow/encode_hash.h"
#include "hotrow/encode_parse.h"
#include "hotrow/encode_vocabulary.h"
#include "hotrow/value_counts.h"

using namespace nb::literals;

namespace {

using namespace hotrow;

template <class T>
using Maybe = std::optional<In<T>>;

// OSError with the errno; EBADMSG means a damaged file, which in Python is a ValueError.
void raise_for(int error, const std::string& what) {
  if (error == 0) return;
  if (error == EBADMSG) throw std::invalid_argument(what + " is truncated or altered");
  errno = error;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, what.c_str());
  throw nb::python_error();
}
void raise_for(const Status& status) { raise_for(status.error, status.what); }

template <class T>
const T* data_or_null(const Maybe<T>& array) {
  return array ? array->data() : nullptr;
}

const uint8_t* mask_data(const Maybe<bool>& mask, size_t size, const char* message) {
  require(!mask || mask->shape(0) == size, message);
  return reinterpret_cast<const uint8_t*>(data_or_null(mask));
}

void check_strings(const In<uint8_t>& bytes, const In<int64_t>& offsets) {
  require(offsets.shape(0) >= 1, "offsets is empty; it must have one more entry than there are keys");
  const int64_t* at = offsets.data();
  bool rising = at[0] >= 0;
  for (size_t i = 1; i < offsets.shape(0); ++i) rising &= at[i - 1] <= at[i];
  require(rising && static_cast<size_t>(at[offsets.shape(0) - 1]) <= bytes.shape(0),
          "offsets must rise from at least 0 to at most the number of bytes");
}

void check_keys(size_t num_keys, bool has_bytes, const Maybe<uint8_t>& bytes, const Maybe<int64_t>& offsets) {
  require(bytes.has_value() == has_bytes && offsets.has_value() == has_bytes,
          "bytes and offsets must be given for byte-string keys, and only for those");
  if (!has_bytes) return;
  check_strings(*bytes, *offsets);
  require(offsets->shape(0) == num_keys + 1, "offsets must have one more entry than there are hashes");
}

nb::tuple parse(In<uint8_t> text, const std::string& delimiter, int num_ignored, bool has_label, size_t first_row,
                Array<float> label, Matrix<float> dense, Matrix<uint32_t> keys, Matrix<bool> valid, size_t num_rows) {
  require(delimiter.size() == 1, "delimiter must be one character");
  require(num_ignored >= 0, "num_ignored must not be negative");
  require(text.shape(0) == 0 || text.data()[text.shape(0) - 1] == '\n', "text must end with a newline");
  require(keys.shape(0) == valid.shape(0) && keys.shape(1) == valid.shape(1), "keys and valid differ in shape");
  require(first_row <= num_rows && num_rows <= dense.shape(0) && num_rows <= keys.shape(1) &&
              (!has_label || num_rows <= label.shape(0)),
          "num_rows does not fit the columns");
  const RowLayout layout{delimiter[0], num_ignored, has_label, static_cast<int>(dense.shape(1)),
                         static_cast<int>(keys.shape(0))};
  const RowColumns columns{label.data(),  dense.data(), keys.data(), reinterpret_cast<uint8_t*>(valid.data()),
                           keys.shape(1), num_rows};
  const RowResult result = without_gil([&] {
    return parse_rows(reinterpret_cast<const char*>(text.data()), text.shape(0), layout, first_row, columns);
  });
  return nb::make_tuple(result.num_rows, result.num_bytes, static_cast<int>(result.fault), result.column);
}

template <class Key>
void hash_numbers(In<Key> keys, uint64_t cap, Array<uint64_t> out) {
  require(out.shape(0) == keys.shape(0), "out must have one entry per key");
  nb::gil_scoped_release unlocked;
  hash_keys(keys.data(), keys.shape(0), cap, out.data());
}

void hash_strings(In<uint8_t> bytes, In<int64_t> offsets, uint64_t cap, Array<uint64_t> out) {
  check_strings(bytes, offsets);
  require(out.shape(0) + 1 == offsets.shape(0), "out must have one entry per key");
  nb::gil_scoped_release unlocked;
  hash_keys(bytes.data(), offsets.data(), out.shape(0), cap, out.data());
}

size_t codes_count(In<int64_t> codes, Maybe<bool> mask, Array<uint32_t> counts, Array<int64_t> appeared) {
  const size_t num_entries = counts.shape(0);
  const uint8_t* mask_begin = mask_data(mask, codes.shape(0), "mask must have one entry per code");
  require(appeared.shape(0) >= std::min(codes.shape(0), num_entries), "appeared is too small");
  nb::gil_scoped_release unlocked;
  bool inside = true;
  for (size_t i = 0; i < codes.shape(0); ++i) inside &= static_cast<uint64_t>(codes.data()[i]) < num_entries;
  require(inside, "codes must be at least 0 and below the number of counts");
  return count_codes(codes.data(), codes.shape(0), mask_begin, counts.data(), appeared.data());
}

const uint8_t* bytes_of(const In<bool>& flags, size_t size) {
  require(flags.shape(0) == size, "flags must have one entry per hash");
  return reinterpret_cast<const uint8_t*>(flags.data());
}

const uint8_t* folds_of(const Maybe<uint8_t>& folds, size_t size, size_t num_folds) {
  require(!folds || folds->shape(0) == size, "folds must have one entry per hash");
  bool inside = true;
  for (size_t i = 0; folds && i < size; ++i) inside &= folds->data()[i] < num_folds;
  require(inside, "folds must be below the number of folds");
  return data_or_null(folds);
}

void values_add(ValueCounts& values, In<uint64_t> hashes, In<bool> labels, In<bool> counted, Maybe<uint8_t> folds) {
  const size_t n = hashes.shape(0);
  const uint8_t *label_data = bytes_of(labels, n), *counted_data = bytes_of(counted, n);
  const uint8_t* fold_data = folds_of(folds, n, values.num_folds());
  nb::gil_scoped_release unlocked;
  values.add(hashes.data(), n, label_data, counted_data, fold_data);
}

void values_put(ValueCounts& values, In<uint64_t> hashes, Matrix<const uint32_t> counts, size_t first_fold, int zeros) {
  const size_t n = hashes.shape(0), num_folds = counts.shape(1) / 2;
  require(counts.shape(0) == n && counts.shape(1) % 2 == 0 && first_fold + num_folds <= values.num_folds(),
          "counts must be [hashes, 2 folds]");
  require(zeros >= 0 && zeros < 64, "zeros must be between 0 and 63");
  nb::gil_scoped_release unlocked;
  values.put(hashes.data(), n, num_folds, counts.data(), first_fold, zeros);
}

void values_get(const ValueCounts& values, In<uint64_t> hashes, Maybe<bool> own, Maybe<uint8_t> folds,
                Matrix<uint32_t> out) {
  const size_t n = hashes.shape(0);
  require(own.has_value() == folds.has_value(), "pass both own and folds, or neither");
  require(out.shape(0) == n && out.shape(1) == 2, "out must be [hashes, 2]");
  const uint8_t *own_data = own ? bytes_of(*own, n) : nullptr, *fold_data = folds_of(folds, n, values.num_folds());
  nb::gil_scoped_release unlocked;
  values.get(hashes.data(), n, own_data, fold_data, out.data());
}

void values_before(ValueCounts& values, In<uint64_t> hashes, In<bool> labels, In<bool> trains, Maybe<int64_t> times,
                   const ValueCounts& after, Matrix<uint32_t> out) {
  const size_t n = hashes.shape(0);
  require(!times || times->shape(0) == n, "times must have one entry per hash");
  require(values.num_folds() == 1 && after.num_folds() == 1, "counts in the order of time have one fold");
  require(out.shape(0) == n && out.shape(1) == 2, "out must be [hashes, 2]");
  const uint8_t *label_data = bytes_of(labels, n), *train_data = bytes_of(trains, n);
  nb::gil_scoped_release unlocked;
  values.before(hashes.data(), n, label_data, train_data, data_or_null(times), after, out.data());
}

void values_items(const ValueCounts& values, Array<uint64_t> hashes, Matrix<uint32_t> counts) {
  const size_t n = values.size();
  require(hashes.shape(0) == n && counts.shape(0) == n && counts.shape(1) == 2 * values.num_folds(),
          "hashes must be [values], counts [values, 2 folds]");
  values.items(hashes.data(), counts.data());
}

void counter_add(Counter& counter, In<uint64_t> hashes, Maybe<bool> valid, Maybe<uint32_t> counts, Maybe<uint8_t> bytes,
                 Maybe<int64_t> offsets) {
  const size_t n = hashes.shape(0);
  check_keys(n, counter.has_bytes(), bytes, offsets);
  const uint8_t* valid_data = mask_data(valid, n, "valid must have one entry per key");
  require(!counts || counts->shape(0) == n, "counts must have one entry per key");
  nb::gil_scoped_release unlocked;
  counter.add(hashes.data(), n, valid_data, data_or_null(counts), data_or_null(bytes), data_or_null(offsets));
}

void counter_drain(Counter& counter, int fd) {
  raise_for(without_gil([&] { return counter.drain(fd); }), "run");
}

void merge(const std::vector<int>& run_fds, int out_fd, size_t memory_bytes) {
  raise_for(without_gil([&] { return merge_runs(run_fds, out_fd, memory_bytes); }));
}

void builder_merge(VocabularyBuilder& builder, const std::vector<int>& run_fds, uint64_t min_count) {
  raise_for(without_gil([&] { return builder.merge(run_fds, min_count); }));
}

void builder_rank(VocabularyBuilder& builder, uint64_t max_rows, int counts_fd, uint64_t offset, bool wide) {
  raise_for(without_gil([&] { return builder.rank(max_rows, counts_fd, offset, wide); }));
}

// Returns (num_bytes, crc32) of each section.
nb::list builder_write(VocabularyBuilder& builder, int fd, uint32_t directory_bits, bool wide,
                       const std::vector<uint64_t>& offsets) {
  require(offsets.size() == VocabularyBuilder::kNumSections, "offsets must have one entry per section");
  require(directory_bits >= 1 && directory_bits <= 40, "directory_bits must be 1 to 40");
  VocabularyBuilder::SectionInfo sections[VocabularyBuilder::kNumSections] = {};
  for (size_t i = 0; i < offsets.size(); ++i) sections[i].offset = offsets[i];
  raise_for(without_gil([&] { return builder.write(fd, directory_bits, wide, sections); }));
  nb::list result;
  for (const auto& section : sections) result.append(nb::make_tuple(section.num_bytes, section.crc));
  return result;
}

template <class Index, class Row>
void lookup(In<uint64_t> hashes, Maybe<bool> valid, Maybe<uint8_t> bytes, Maybe<int64_t> offsets,
            uint32_t directory_bits, uint64_t first_bucket, In<Index> directory, In<uint64_t> table_hashes,
            In<Index> rows, Maybe<uint64_t> key_offsets, Maybe<uint8_t> key_bytes, uint64_t missing_row,
            Array<Row> out) {
  const size_t n = hashes.shape(0);
  check_keys(n, key_offsets.has_value(), bytes, offsets);
  require(out.shape(0) == n, "out must have one entry per key");
  require(directory_bits >= 1 && directory_bits <= 40, "directory_bits must be 1 to 40");
  require(directory.shape(0) >= 1 && directory.data()[directory.shape(0) - 1] == table_hashes.shape(0) &&
              rows.shape(0) == table_hashes.shape(0),
          "directory, hashes and rows do not fit together");
  require(key_offsets.has_value() == key_bytes.has_value() &&
              (!key_offsets || key_offsets->shape(0) == table_hashes.shape(0) + 1),
          "key_offsets and key_bytes do not fit the hashes");
  const uint8_t* valid_data = mask_data(valid, n, "valid must have one entry per key");
  const LookupTable<Index> table{directory_bits,      first_bucket, directory.shape(0) - 1,    directory.data(),
                                 table_hashes.data(), rows.data(),  data_or_null(key_offsets), data_or_null(key_bytes)};
  nb::gil_scoped_release unlocked;
  lookup_rows(table, hashes.data(), valid_data, data_or_null(bytes), data_or_null(offsets), n, missing_row, out.data());
}

template <class Index, class Row>
void bind_lookup(nb::module_& m) {
  m.def("lookup_rows", &lookup<Index, Row>, "hashes"_a.noconvert(), "valid"_a.noconvert().none(),
        "bytes"_a.noconvert().none(), "offsets"_a.noconvert().none(), "directory_bits"_a, "first_bucket"_a,
        "directory"_a.noconvert(), "table_hashes"_a.noconvert(), "rows"_a.noconvert(),
        "key_offsets"_a.noconvert().none(), "key_bytes"_a.noconvert().none(), "missing_row"_a, "out"_a.noconvert());
}

}  // namespace

void bind_encode(nb::module_& m) {
  m.def("parse_rows", &parse, "text"_a.noconvert(), "delimiter"_a, "num_ignored"_a, "has_label"_a, "first_row"_a,
        "label"_a.noconvert(), "dense"_a.noconvert(), "keys"_a.noconvert(), "valid"_a.noconvert(), "num_rows"_a);
  m.def("hash_keys", &hash_numbers<uint32_t>, "keys"_a.noconvert(), "cap"_a, "out"_a.noconvert());
  m.def("hash_keys", &hash_numbers<int64_t>, "keys"_a.noconvert(), "cap"_a, "out"_a.noconvert());
  m.def("hash_strings", &hash_strings, "bytes"_a.noconvert(), "offsets"_a.noconvert(), "cap"_a, "out"_a.noconvert());
  m.def("merge_runs", &merge, "run_fds"_a, "out_fd"_a, "memory_bytes"_a);
  m.def("count_codes", &codes_count, "codes"_a.noconvert(), "mask"_a.noconvert().none(), "counts"_a.noconvert(),
        "appeared"_a.noconvert());
  nb::class_<ValueCounts>(m, "ValueCounts")
      .def(nb::init<size_t, size_t, bool>(), "num_folds"_a, "max_values"_a, "strict"_a)
      .def("add", &values_add, "hashes"_a.noconvert(), "labels"_a.noconvert(), "counted"_a.noconvert(),
           "folds"_a.noconvert().none())
      .def("put", &values_put, "hashes"_a.noconvert(), "counts"_a.noconvert(), "first_fold"_a, "zeros"_a)
      .def("get", &values_get, "hashes"_a.noconvert(), "own"_a.noconvert().none(), "folds"_a.noconvert().none(),
           "out"_a.noconvert())
      .def("before", &values_before, "hashes"_a.noconvert(), "labels"_a.noconvert(), "trains"_a.noconvert(),
           "times"_a.noconvert().none(), "after"_a, "out"_a.noconvert())
      .def("items", &values_items, "hashes"_a.noconvert(), "counts"_a.noconvert())
      .def_prop_ro("size", &ValueCounts::size)
      .def_prop_ro("zeros", &ValueCounts::zeros);
  nb::class_<Counter>(m, "Counter")
      .def(nb::init<bool, uint64_t>(), "has_bytes"_a, "order"_a)
      .def("add", &counter_add, "hashes"_a.noconvert(), "valid"_a.noconvert().none(), "counts"_a.noconvert().none(),
           "bytes"_a.noconvert().none(), "offsets"_a.noconvert().none())
      .def("drain", &counter_drain, "fd"_a)
      .def("num_bytes_after", &Counter::num_bytes_after, "num_keys"_a, "num_key_bytes"_a)
      .def_prop_ro("num_keys", &Counter::num_keys)
      .def_prop_ro("num_missing", &Counter::missing_count)
      .def_prop_ro("order", &Counter::order)
      .def_prop_ro("num_bytes", &Counter::num_bytes);
  nb::class_<VocabularyBuilder>(m, "VocabularyBuilder")
      .def(nb::init<bool, std::string, size_t>(), "has_bytes"_a, "tmp_dir"_a, "memory_bytes"_a)
      .def("merge", &builder_merge, "run_fds"_a, "min_count"_a)
      .def("rank", &builder_rank, "max_rows"_a, "counts_fd"_a, "offset"_a, "wide"_a)
      .def("write", &builder_write, "fd"_a, "directory_bits"_a, "wide"_a, "offsets"_a)
      .def_prop_ro("num_accesses", &VocabularyBuilder::num_accesses)
      .def_prop_ro("num_distinct", &VocabularyBuilder::num_distinct)
      .def_prop_ro("num_keys", &VocabularyBuilder::num_keys)
      .def_prop_ro("num_rows", &VocabularyBuilder::num_rows)
      .def_prop_ro("missing_row", &VocabularyBuilder::missing_row);
  bind_lookup<uint32_t, int32_t>(m);
  bind_lookup<uint32_t, int64_t>(m);
  bind_lookup<uint64_t, int32_t>(m);
  bind_lookup<uint64_t, int64_t>(m);
}
