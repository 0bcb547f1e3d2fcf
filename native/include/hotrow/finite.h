// Looks for NaN and infinity, one pass over the values.
#pragma once

#include <cstdint>

namespace hotrow {

// The smallest row * num_columns + column for which values[row * stride + column] is NaN or infinite; -1 if none is.
int64_t first_nonfinite(const float* values, int64_t num_rows, int64_t num_columns, int64_t stride, int num_threads);

}  // namespace hotrow
