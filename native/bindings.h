// What the files of bindings share: types of arrays, contiguous and in the processors' memory, and the check that
// becomes a ValueError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <type_traits>
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

inline int64_t size(const auto& array) { return static_cast<int64_t>(array.size()); }
inline int64_t extent(const auto& array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); }

}  // namespace hotrow
