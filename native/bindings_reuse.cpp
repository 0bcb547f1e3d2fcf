// Stack distances as a Python class; see bindings_ops.cpp for the rules.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>

#include "hotrow/reuse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace hotrow;

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Id>
void add(StackDistances& distances, Array<const Id> ids, bool once) {
  nb::gil_scoped_release unlocked;
  try {
    distances.add(ids.data(), ids.shape(0), once);
  } catch (const std::length_error& error) {
    throw std::invalid_argument(error.what());  // becomes ValueError
  }
}

void copy_to(const auto& numbers, Array<uint64_t> out) {
  if (out.shape(0) != numbers.size()) throw std::invalid_argument("out has another size than what is copied");
  std::copy(numbers.begin(), numbers.end(), out.data());
}

}  // namespace

void bind_reuse(nb::module_& m) {
  nb::class_<StackDistances>(m, "StackDistances")
      .def(nb::init<uint64_t, uint64_t>(), "threshold"_a, "seed"_a)
      .def("add", &add<int32_t>, "ids"_a.noconvert(), "once"_a)
      .def("add", &add<int64_t>, "ids"_a.noconvert(), "once"_a)
      .def_prop_ro("num_accesses", &StackDistances::num_accesses)
      .def_prop_ro("num_rows", &StackDistances::num_rows)
      .def_prop_ro("num_distinct", &StackDistances::num_distinct)
      .def_prop_ro("histogram_size", [](const StackDistances& d) { return d.histogram().size(); })
      .def(
          "histogram", [](const StackDistances& d, Array<uint64_t> out) { copy_to(d.histogram(), out); },
          "out"_a.noconvert())
      .def("gaps", [](const StackDistances& d, Array<uint64_t> out) { copy_to(d.gaps(), out); }, "out"_a.noconvert());
}
