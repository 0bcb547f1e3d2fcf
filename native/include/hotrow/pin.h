// Which cores the threads of parallel_for run on.
#pragma once

#include <vector>

namespace hotrow {

// Binds thread i of a team of cores.size() threads to the cores cores[i]; thread 0 is the caller, and threads that it
// starts later inherit its cores. Returns how many threads were moved: fewer than asked if the system refuses (no such
// call, a core that the process may not use) or if the build has no lasting threads to move.
int pin_threads(const std::vector<std::vector<int>>& cores);

}  // namespace hotrow
