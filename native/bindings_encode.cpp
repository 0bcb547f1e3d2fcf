// Parsing, counting and encoding of raw rows as Python functions; see bindings_ops.cpp for the rules.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_encode(nb::module_& m) { (void)m; }
