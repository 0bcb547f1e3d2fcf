// What the files of bindings share: array types, and the check that becomes a ValueError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace nb = nanobind;

namespace hotrow {

using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline void require(bool good, const char* message) {
  if (!good) throw nb::value_error(message);
}

inline int64_t size(const auto& array) { return static_cast<int64_t>(array.size()); }
inline int64_t extent(const auto& array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); }

}  // namespace hotrow
