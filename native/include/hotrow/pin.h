// Which cores the threads of parallel_for run on.
#pragma once

#include <vector>

namespace hotrow {

// From now on thread i of a team of cores.size() threads runs on one of the cores cores[i] alone; thread 0 is the
// caller, and what it starts afterwards inherits its cores. Returns how many threads were moved: fewer than asked where
// the system refuses (no such call, a core outside the process's own) or the build has no lasting threads to move.
int pin_threads(const std::vector<std::vector<int>>& cores);

}  // namespace hotrow
