// The embedding and dense kernels as Python functions: checks shapes and pointers, releases the GIL, raises ValueError.
// Together with bindings_encode.cpp the only code that sees nanobind.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_encode(nb::module_& m);

NB_MODULE(_native, m) {
  m.doc() = "hotrow's kernels; call them through hotrow.ops and hotrow.data.native";
  bind_encode(m);
}
