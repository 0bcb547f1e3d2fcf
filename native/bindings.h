// What the files of bindings share: types of arrays, contiguous and in the processors' memory, and the check that
// becomes a ValueError.
#pragma once

#include <hotrow/store.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace hotrow {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using In = Array<const T>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // int32 or int64, which is to be checked
using Memory = nb::ndarray<nb::c_contig, nb::device::cpu>;                    // of any type and shape
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

inline void require(bool good, const char* message) {
  if (!good) throw nb::value_error(message);
}

template <class T>
struct IsOutput : std::false_type {};
template <class T, class... Rest>
struct IsOutput<nb::ndarray<T, Rest...>> : std::bool_constant<!std::is_const_v<T> && !std::is_same_v<T, nb::ro>> {};
template <class T>
struct IsOutput<std::vector<T>> : IsOutput<T> {};
template <class T>
struct IsOutput<std::optional<T>> : IsOutput<T> {};

template <class T>
auto argument() {
  if constexpr (IsOutput<T>::value) {
    return nb::arg().noconvert();
  } else {
    return nb::arg();
  }
}

// Defines a function. Of an array of another type or layout nanobind makes a copy, in which an output would be lost:
// such outputs are refused.
template <class Result, class... Args>
void define(nb::module_& m, const char* name, Result (*function)(Args...)) {
  m.def(name, function, argument<std::remove_cvref_t<Args>>()...);
}

// Whether ids are int64.
inline bool is_wide(const Ids& ids) {
  const bool wide = ids.dtype() == nb::dtype<int64_t>();
  require(wide || ids.dtype() == nb::dtype<int32_t>(), "ids must be int32 or int64");
  return wide;
}

template <class Work>
auto without_gil(const Work& work) {
  nb::gil_scoped_release release;
  return work();
}

// An array of memory that `owner` keeps for as long as the array lives.
template <class T, class Owner>
nb::ndarray<nb::numpy, T> array_on(T* data, const std::vector<size_t>& shape, Owner owner) {
  auto kept = std::make_unique<Owner>(std::move(owner));
  nb::capsule capsule(kept.get(), [](void* p) noexcept { delete static_cast<Owner*>(p); });
  kept.release();
  return {data, shape.size(), shape.data(), capsule};
}
template <class T>
nb::ndarray<nb::numpy, T> array_of(std::vector<T>&& values) {
  T* data = values.data();
  const size_t length = values.size();
  return array_on(data, {length}, std::move(values));
}

inline int64_t size(const auto& array) { return static_cast<int64_t>(array.size()); }
inline int64_t extent(const auto& array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); }

// Arrays of slots, one per part of a record: [num_slots, ...]. Keeps their memory alive.
struct Records {
  std::vector<Memory> arrays;
  Slots slots;
  int64_t num_slots = 0;

  explicit Records(std::vector<Memory> given) : arrays(std::move(given)) {
    require(!arrays.empty(), "no arrays of slots");
    num_slots = extent(arrays[0], 0);
    for (const Memory& array : arrays) {
      require(array.ndim() >= 1 && extent(array, 0) == num_slots, "arrays of slots differ in their number of slots");
      const int64_t bytes = num_slots ? static_cast<int64_t>(array.nbytes()) / num_slots : 0;
      slots.parts.push_back({static_cast<std::byte*>(array.data()), bytes});
    }
  }
};

}  // namespace hotrow
