// Stack distances as a Python class, the sketch of hot rows and the limit of arithmetic as functions: what only
// benchmarks use. benchmarks/compiled.py compiles it.
#include <algorithm>
#include <stdexcept>

#include "bindings.h"
#include "reuse.h"
#include "sketch.h"

using namespace nb::literals;

double multiply_adds_per_s(int num_threads);

namespace {

using namespace hotrow;

template <class Id>
void add(StackDistances& distances, In<Id> ids, bool once) {
  nb::gil_scoped_release unlocked;
  try {
    distances.add(ids.data(), ids.shape(0), once);
  } catch (const std::length_error& error) {
    throw std::invalid_argument(error.what());  // becomes ValueError
  }
}

void copy_to(const auto& numbers, Array<uint64_t> out) {
  require(out.shape(0) == numbers.size(), "out has another size than what is copied");
  std::copy(numbers.begin(), numbers.end(), out.data());
}

template <class Id>
void add_to_sketch(Array<uint64_t> slots, uint64_t seed, uint64_t first_key, uint64_t num_rows, In<Id> ids) {
  const size_t num_buckets = slots.shape(0) / kSketchSlots, n = ids.shape(0);
  require(slots.shape(0) % kSketchSlots == 0 && num_buckets > 0 && num_buckets < 0xffffffff,
          "slots must be four for each of 1 to 2^32 - 2 buckets");
  constexpr uint64_t kMostKeys = uint64_t{1} << 40;
  require(first_key > 0 && first_key < kMostKeys && num_rows <= kMostKeys - first_key, "keys must be below 2^40");
  nb::gil_scoped_release unlocked;
  bool inside = true;
  for (size_t i = 0; i < n; ++i) inside &= static_cast<uint64_t>(ids.data()[i]) < num_rows;
  require(inside, "ids must be at least 0 and below num_rows");
  sketch_add(slots.data(), num_buckets, seed, first_key, ids.data(), n);
}

}  // namespace

NB_MODULE(_yardsticks, m) {
  m.def("multiply_adds_per_s", multiply_adds_per_s, nb::call_guard<nb::gil_scoped_release>());
  m.def("sketch_add", &add_to_sketch<int32_t>, "slots"_a.noconvert(), "seed"_a, "first_key"_a, "num_rows"_a,
        "ids"_a.noconvert());
  m.def("sketch_add", &add_to_sketch<int64_t>, "slots"_a.noconvert(), "seed"_a, "first_key"_a, "num_rows"_a,
        "ids"_a.noconvert());
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
