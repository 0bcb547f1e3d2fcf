// How the set of kernels is chosen; tests ask what a machine with other features would run.
#pragma once

#include <string>
#include <vector>

namespace hotrow {

// How many sets, narrowest first, a processor with these features ("avx2", "avx512f", ...) can run; at least one.
int num_runnable(const std::vector<std::string>& features);

}  // namespace hotrow
