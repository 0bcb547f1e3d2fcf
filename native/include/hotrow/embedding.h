// The embedding ops of a whole batch: all tables in one call, divided into tasks for `num_threads` threads. The leaf
// kernels (kernels.h) state the arithmetic; nothing here can change a bit of a result.
#pragma once

#include <hotrow/kernels.h>

#include <vector>

namespace hotrow {

// One feature of a batch: its bags, and the table and output columns to which they belong.
struct FeatureBags {
  Rows table;
  Bags bags;
  int64_t column;
};

// Writes columns [column, column + dim) of every feature to out[B, stride]. False if an id or offset is out of range.
bool lookup(const std::vector<FeatureBags>& features, float* out, int64_t stride, int num_threads);

// out is indexed by position in the batch's ids; positions that belong to no feature are left alone. False as above.
bool weight_gradient(const std::vector<FeatureBags>& features, const float* grad, int64_t stride, float* out,
                     int num_threads);

// One feature in one forward pass: bags and the gradient of their pooled rows (grad points at the feature's column).
struct Segment {
  Bags bags;
  const float* grad;
  int64_t stride;
};

struct TableUpdate {
  Rows table;
  States states;
  Rule rule;
  std::vector<Segment> segments;  // in the order in which their occurrences are taken
};

// The result of an update; after a failure no row has changed.
enum class UpdateResult { done, out_of_range, too_large };

// Brings the occurrences of every table into row order (stable), then applies the rule row by row. too_large: a table's
// row and occurrence numbers do not fit 63 bits together (beyond any memory). Throws std::bad_alloc.
UpdateResult update(const std::vector<TableUpdate>& tables, int num_threads);

// Writes the initial rows [first, first + count) of a table to out[count, dim].
void fill_uniform(uint64_t key, int64_t first, int64_t count, int64_t dim, float bound, int64_t zero_rows, float* out,
                  int num_threads);

}  // namespace hotrow
