// The embedding ops of a whole batch: all tables in one call, divided into tasks for `num_threads` threads. The leaf
// kernels (kernels.h) state the arithmetic; nothing here can change a bit of a result.
#pragma once

#include <hotrow/kernels.h>
#include <hotrow/memory.h>

#include <cstddef>
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

// Applies the rule to every row, its occurrences in order; ids must not change meanwhile. too_large: a table's row and
// occurrence numbers do not fit 63 bits together (beyond any memory). in_parts: segments have leaves, all of node 0; a
// row's gradients are first summed by sum_rows, and the rule is applied to the sum. Throws std::bad_alloc.
UpdateResult update(const std::vector<TableUpdate>& tables, int num_threads, bool in_parts = false);

// The sums of all nodes and tables end to end: node by node, in each table by table.
struct SummedRows {
  std::vector<std::vector<int64_t>> num_rows;  // by node, by table
  int64_t total_rows = 0, total_floats = 0;
  std::unique_ptr<KeptPages> rows, sums;  // int64, float
};

// Sums the gradients of every row by sum_rows; rules and states play no part. Failures and exceptions as for update.
UpdateResult sum_rows(const std::vector<TableUpdate>& tables, size_t num_nodes, int num_threads, SummedRows& out);

// How ranks share the rows of tables: those below a table's prefix lie on every rank; of the others, all on its owner
// or, if that is -1, row prefix + k on rank k mod num_ranks. A rank numbers the rows it holds by rising row.
struct Shares {
  std::vector<int64_t> prefix, owner;  // by table
  int64_t rank, num_ranks;

  struct Place {
    int64_t rank;   // -1: all
    int64_t local;  // the row's number in the shard
  };
  Place place_of(size_t table, int64_t row) const {
    const int64_t beyond = row - prefix[table];
    if (beyond < 0) return {-1, row};
    if (owner[table] >= 0) return {owner[table], row};
    const int64_t turn = beyond / num_ranks;
    return {beyond - turn * num_ranks, prefix[table] + turn};
  }
};

// The distinct rows of a batch: table by table, in each group by group, rising. Group 0 is what the rank itself holds,
// group 1 + r what rank r holds instead.
struct DistinctRows {
  std::vector<int64_t> counts;             // rows by table and group
  int64_t total_rows = 0, total_ids = 0;   // lengths of the arrays below, all of int64
  std::unique_ptr<KeptPages> rows, local;  // by row: its number in the table, and in the shard of who holds it
  std::unique_ptr<KeptPages> places;       // by id, segment after segment: its row's place among the table's
};

// Finds the distinct rows of segments whose bags hold one id each; only the number of rows of a table counts. Failures
// and exceptions as for update.
UpdateResult distinct_rows(const std::vector<TableUpdate>& tables, const Shares& shares, int num_threads,
                           DistinctRows& out);

// Sums of rows over some micro-batches: counts[t] of table 0, then of table 1, ...
struct NodeSums {
  std::vector<int64_t> counts;
  const int64_t* rows;  // slots, if rows have homes
  const float* sums;
};

// Who gets the sum of which row: row_of[t][slot] is the row in a slot of table t. The home of a row on every rank is
// its number mod num_ranks.
struct Homes {
  std::vector<const int64_t*> row_of;
  Shares shares;
};

// A message of sums: for each node the keys of its rows, then for each node their sums.
struct SumsMessage {
  std::unique_ptr<KeptPages> words;  // int32
  int64_t num_words, num_key_words;
};

// Returns a message for each rank, of the rows whose home it is; without homes one message of all rows. A key is
// first_keys[t] and the row's number in the shard of its home.
std::vector<SumsMessage> pack_sums(const std::vector<NodeSums>& nodes, const Homes* homes,
                                   const std::vector<int64_t>& first_keys, const std::vector<int64_t>& dims,
                                   int num_threads);

// Which rows of a message to take: all, those below their table's prefix, or the others.
enum class Taken : int { all, below_prefix, from_prefix };

struct ComingSums {
  const int32_t* words;
  int64_t num_words, num_nodes;
  Taken taken;
};

struct UnpackedSums {
  std::vector<int64_t> counts;  // by table and piece
  std::vector<int64_t> starts;  // likewise, where sums begin among the words of their message
  std::unique_ptr<KeptPages> rows;
  int64_t total_rows = 0;
};

// Takes messages apart. pieces: a message and a node of it each. Rows come out table by table, in each piece by
// piece. False if a message is not one that pack_sums makes.
bool unpack_sums(const std::vector<ComingSums>& messages, const std::vector<std::pair<size_t, size_t>>& pieces,
                 const std::vector<int64_t>& first_keys, const std::vector<int64_t>& dims,
                 const std::vector<int64_t>& prefix, UnpackedSums& out);

// Rows to copy one behind another to `to`: rows[0], rows[1], ... of `from`, or, if rows is null, its first ones.
struct RowCopy {
  const std::byte* from;
  const int64_t* rows;
  int64_t count, row_bytes;
  std::byte* to;
};

// Copies rows; no two copies write the same bytes.
void copy_rows(const std::vector<RowCopy>& copies, int num_threads);

// Writes the initial rows first + k * step of a table, k < count, to out[count, dim]: their columns from `column` on, a
// multiple of 4.
void fill_uniform(uint64_t key, int64_t first, int64_t step, int64_t count, int64_t column, int64_t dim, float bound,
                  int64_t zero_rows, float* out, int num_threads);

// The same of rows in any order, rows[count], and their first columns.
void fill_uniform_rows(uint64_t key, const int64_t* rows, int64_t count, int64_t dim, float bound, int64_t zero_rows,
                       float* out, int num_threads);

}  // namespace hotrow
