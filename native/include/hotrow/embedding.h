// The embedding ops of a whole batch: all tables in one call, divided into tasks for `num_threads` threads. The leaf
// kernels (kernels.h) state the arithmetic; nothing here can change a bit of a result.
#pragma once

#include <hotrow/kernels.h>
#include <hotrow/memory.h>

#include <memory>
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

// One feature in one forward pass, or one micro-batch of it: bags and the gradient of their pooled rows (grad points at
// the feature's column).
struct Segment {
  Bags bags;
  const float* grad;
  int64_t stride;
  int32_t leaf = 0;  // rising over the segments of a table
  int32_t node = 0;
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
// row and occurrence numbers do not fit 63 bits together (beyond any memory). in_parts: segments have leaves, all of
// node 0; a row's gradients are first summed by sum_rows, and the rule is applied to the sum. Throws std::bad_alloc.
UpdateResult update(const std::vector<TableUpdate>& tables, int num_threads, bool in_parts = false);

// The sums of all nodes and tables end to end: node by node, in each table by table.
struct SummedRows {
  std::vector<std::vector<int64_t>> num_rows;  // by node, by table
  int64_t total_rows = 0, total_floats = 0;
  std::unique_ptr<KeptPages> rows, sums;  // int64, float
};

// Sums the gradients of every row by sum_rows; rules and states play no part. Failures and exceptions as for update.
UpdateResult sum_rows(const std::vector<TableUpdate>& tables, size_t num_nodes, int num_threads, SummedRows& out);

// Writes the initial rows first + k * step of a table, k < count, to out[count, dim].
void fill_uniform(uint64_t key, int64_t first, int64_t step, int64_t count, int64_t dim, float bound, int64_t zero_rows,
                  float* out, int num_threads);

}  // namespace hotrow
