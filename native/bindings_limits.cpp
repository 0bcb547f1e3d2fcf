// The limit loops as Python functions; see bindings_ops.cpp for the rules.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "hotrow/limits.h"

namespace nb = nanobind;
using hotrow::limits::Buffer;
using Index = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

void check(bool holds, const std::string& what) {
  if (!holds) throw nb::value_error(what.c_str());
}

double touch_rows(Buffer& buffer, const Index& index, int64_t row_floats, bool write, int threads, int distance) {
  check(row_floats >= 1 && threads >= 1 && distance >= 0,
        "row_floats and threads must be at least 1, distance at least 0");
  const int64_t num_rows = buffer.size() / row_floats;
  const int64_t n = static_cast<int64_t>(index.shape(0));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = index.data()[i];
    if (row < 0 || row >= num_rows)
      check(false, "index[" + std::to_string(i) + "] is " + std::to_string(row) + "; the buffer holds rows 0 to " +
                       std::to_string(num_rows - 1));
  }
  nb::gil_scoped_release release;
  return hotrow::limits::touch_rows(buffer, index.data(), n, row_floats, write, threads, distance);
}

double stream(Buffer& buffer, int64_t num_read, int64_t num_write, int threads) {
  check(num_read >= 0 && num_write >= 0 && num_read + num_write <= buffer.size() && threads >= 1,
        "num_read + num_write must fit the buffer's " + std::to_string(buffer.size()) + " floats, on 1 thread or more");
  nb::gil_scoped_release release;
  return hotrow::limits::stream(buffer, num_read, num_write, threads);
}

}  // namespace

void bind_limits(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Buffer>(m, "LimitBuffer", "Huge-page float memory for the limit loops.")
      .def(
          "__init__",
          [](Buffer* self, int64_t num_floats) {
            check(num_floats >= 1, "num_floats is " + std::to_string(num_floats) + "; it must be at least 1");
            new (self) Buffer(num_floats);
          },
          "num_floats"_a)
      .def("touch_rows", &touch_rows, "index"_a, nb::kw_only(), "row_floats"_a, "write"_a, "threads"_a, "distance"_a,
           "Seconds to read, or add to, the rows of `index` in order; `distance` rows ahead are prefetched.")
      .def("stream", &stream, nb::kw_only(), "num_read"_a, "num_write"_a, "threads"_a,
           "Seconds to read `num_read` floats and write the next `num_write`.");
}
