// The embedding kernels as Python functions: checks shapes and pointers, releases the GIL, raises ValueError. Only this
// file and the other bindings_*.cpp use nanobind.
#include <hotrow/dispatch.h>
#include <hotrow/embedding.h>
#include <hotrow/finite.h>
#include <hotrow/halves.h>
#include <hotrow/limit.h>
#include <hotrow/memory.h>
#include <hotrow/parallel.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"

using namespace hotrow;

void bind_encode(nb::module_& m);
void bind_cells(nb::module_& m);
void bind_dense(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_cache(nb::module_& m);

namespace {

using GradMatrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using LowHalves = nb::ndarray<int16_t, nb::c_contig, nb::device::cpu>;

// The part of a lookup that never changes: which table a feature reads, which output columns it fills, and how.
struct Feature {
  size_t table;
  int64_t column;
  Pooling pooling;
};

// The features of a collection that a lookup serves, at their positions among all features; none: not served.
struct Layout {
  std::vector<std::optional<Feature>> features;
  explicit Layout(const std::vector<std::optional<std::tuple<size_t, int64_t, bool>>>& specs) {
    for (const auto& spec : specs) {
      if (!spec) {
        features.emplace_back();
        continue;
      }
      const auto& [table, column, mean] = *spec;
      require(column >= 0, "negative column");
      features.push_back(Feature{table, column, mean ? Pooling::mean : Pooling::sum});
    }
  }
};

std::optional<Storage> storage_of(const Memory& array) {
  const nb::dlpack::dtype bfloat16{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  const nb::dlpack::dtype float16{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  if (array.dtype() == nb::dtype<float>()) return Storage::float32;
  if (array.dtype() == float16) return Storage::float16;
  if (array.dtype() == bfloat16) return Storage::split;
  return std::nullopt;
}

// Arrays of a collection, one per table: weights [N, D] (float32, float16, or bfloat16 with their lower halves), or
// optimizer state, float32. Keeps their memory alive.
struct Arrays {
  std::vector<Memory> arrays;
  std::vector<std::optional<LowHalves>> low;

  Rows rows(size_t table) const {
    require(table < arrays.size() && arrays[table].ndim() == 2, "no [N, D] array for this table");
    const Memory& array = arrays[table];
    const std::optional<Storage> storage = storage_of(array);
    require(storage.has_value(), "weights must be float32, float16 or bfloat16");
    const LowHalves* halves = table < low.size() && low[table] ? &*low[table] : nullptr;
    require((storage == Storage::split) == (halves != nullptr) && (!halves || size(*halves) == size(array)),
            "bfloat16 weights, and only they, have as many lower halves");
    return {array.data(), halves ? reinterpret_cast<uint16_t*>(halves->data()) : nullptr, extent(array, 0),
            extent(array, 1), *storage};
  }
  float* state(size_t table, int64_t num_floats) const {
    require(table < arrays.size(), "no state for this table");
    require(storage_of(arrays[table]) == Storage::float32, "state must be float32");
    require(size(arrays[table]) == num_floats, "state does not fit its table");
    return static_cast<float*>(arrays[table].data());
  }
};

// The bags of a batch as the kernels see them: feature f of the layout has bags starts[f] .. starts[f] + num_bags; a
// feature that is not in the layout starts at 0.
struct Batch {
  Ids ids;
  std::optional<In<int64_t>> offsets;
  std::optional<ConstFloats> weights;
  std::vector<int64_t> starts;
  int64_t num_bags;
  std::vector<int64_t> parts;  // where micro-batches begin among the bags of a feature, and the end of the last
  bool wide;

  Batch(Ids i, std::optional<In<int64_t>> o, std::optional<ConstFloats> w, std::vector<int64_t> s, int64_t n,
        std::vector<int64_t> p)
      : ids(std::move(i)),
        offsets(std::move(o)),
        weights(std::move(w)),
        starts(std::move(s)),
        num_bags(n),
        parts(p.empty() ? std::vector<int64_t>{0, n} : std::move(p)) {
    wide = is_wide(ids);
    require(!weights || size(*weights) == size(ids), "weights must be as many as ids");
    const int64_t total = offsets ? size(*offsets) - 1 : size(ids);
    require(num_bags >= 0, "negative number of bags");
    for (const int64_t start : starts) require(0 <= start && start + num_bags <= total, "bags beyond the batch");
    require(parts.front() == 0 && parts.back() == num_bags && std::is_sorted(parts.begin(), parts.end()),
            "parts must rise from 0 to the number of bags");
  }

  size_t num_parts() const { return parts.size() - 1; }

  Bags bags(size_t feature, Pooling pooling) const {
    const int64_t start = starts[feature];
    return {ids.data(),
            offsets ? offsets->data() + start : nullptr,
            weights ? weights->data() : nullptr,
            size(ids),
            num_bags,
            start,
            pooling,
            wide};
  }
};

std::vector<FeatureBags> join(const Layout& layout, const Arrays& weights, const Batch& batch, int64_t width) {
  require(batch.starts.size() == layout.features.size(), "batch and layout differ in features");
  std::vector<FeatureBags> features;
  for (size_t f = 0; f < layout.features.size(); ++f) {
    if (!layout.features[f]) continue;
    const Feature& feature = *layout.features[f];
    const Rows rows = weights.rows(feature.table);
    require(feature.column + rows.dim <= width, "feature columns beyond the matrix");
    features.push_back({rows, batch.bags(f, feature.pooling), feature.column});
  }
  return features;
}

int64_t row_stride(const GradMatrix& grad, int64_t num_bags) {
  require(extent(grad, 0) == num_bags, "grad must have one row per sample");
  // Strides of a matrix without values have no meaning.
  require(grad.size() == 0 || grad.shape(1) <= 1 || grad.stride(1) == 1, "grad rows must be contiguous");
  return grad.stride(0);
}

bool bind_lookup(const Layout& layout, const Arrays& weights, const Batch& batch, Matrix<float> out, int num_threads) {
  require(extent(out, 0) == batch.num_bags, "out must have one row per sample");
  const auto features = join(layout, weights, batch, extent(out, 1));
  nb::gil_scoped_release release;
  return lookup(features, out.data(), extent(out, 1), num_threads);
}

bool bind_weight_gradient(const Layout& layout, const Arrays& weights, const Batch& batch, GradMatrix grad, Floats out,
                          int num_threads) {
  const int64_t stride = row_stride(grad, batch.num_bags);
  require(size(out) == size(batch.ids), "out must be as long as ids");
  const auto features = join(layout, weights, batch, extent(grad, 1));
  nb::gil_scoped_release release;
  return weight_gradient(features, grad.data(), stride, out.data(), num_threads);
}

// (algorithm, lr, eps, beta1, rest1, beta2, rest2, beta, l1, l2)
using RuleNumbers = std::tuple<int, float, float, float, float, float, float, float, float, float>;

Rule rule_of(const RuleNumbers& numbers) {
  const auto [algorithm, lr, eps, beta1, rest1, beta2, rest2, beta, l1, l2] = numbers;
  require(0 <= algorithm && algorithm <= static_cast<int>(Algorithm::ftrl), "no such algorithm");
  return {static_cast<Algorithm>(algorithm), lr, eps, beta1, rest1, beta2, rest2, beta, l1, l2};
}

States states_of(const std::vector<const Arrays*>& states, size_t table, Algorithm algorithm, const Rows& rows) {
  States found{};
  const size_t count = static_cast<size_t>(num_states(algorithm));
  require(states.size() >= count, "too few states");
  for (size_t s = 0; s < count; ++s) {
    found.data[s] = states[s]->state(table, rows.num_rows * state_dim(algorithm, rows.dim));
  }
  return found;
}

// Lookups whose gradients are known, in forward order.
using Pending = std::vector<std::tuple<const Layout*, const Batch*, GradMatrix>>;
// Subtrees: first leaf and number of leaves.
using Nodes = std::vector<std::pair<int32_t, int32_t>>;

size_t count_parts(const Pending& pending) {
  const size_t num_parts = pending.empty() ? 1 : std::get<1>(pending.front())->num_parts();
  for (const auto& [layout, batch, grad] : pending) {
    require(batch->num_parts() == num_parts, "batches are cut into different numbers of parts");
  }
  return num_parts;
}

int32_t node_of(const Nodes& nodes, int32_t leaf) {
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].first <= leaf && leaf < nodes[n].first + nodes[n].second) return static_cast<int32_t>(n);
  }
  throw nb::value_error("more parts than leaves");
}

// Part `p` of a feature's bags, and of the gradient of their pooled rows.
Segment part_of(const Batch& batch, size_t p, const Bags& bags, const float* grad, int64_t stride) {
  const int64_t first = batch.parts[p];
  Bags own = bags;
  if (own.offsets) own.offsets += first;
  own.start += first;
  own.num_bags = batch.parts[p + 1] - first;
  return {own, grad + first * stride, stride};
}

// Adds the segments of all lookups to their tables: micro-batch after micro-batch, in each feature after feature.
// Micro-batch p is leaf `leaf` + p.
void add_segments(std::vector<TableUpdate>& tables, size_t num_features, const Pending& pending, int32_t leaf,
                  const Nodes& nodes) {
  const size_t num_parts = count_parts(pending);
  for (size_t p = 0; p < num_parts; ++p, ++leaf) {
    const int32_t node = node_of(nodes, leaf);
    for (size_t f = 0; f < num_features; ++f) {
      for (const auto& [layout, batch, grad] : pending) {
        require(layout->features.size() == num_features && batch->starts.size() == num_features,
                "batch and layout differ in features");
        if (!layout->features[f]) continue;
        const auto [table, column, pooling] = *layout->features[f];
        require(table < tables.size(), "no such table");
        require(column + tables[table].table.dim <= extent(grad, 1), "feature columns beyond grad");
        Segment segment =
            part_of(*batch, p, batch->bags(f, pooling), grad.data() + column, row_stride(grad, batch->num_bags));
        segment.leaf = leaf;
        segment.node = node;
        tables[table].segments.push_back(segment);
      }
    }
  }
}

// Sums of rows as ranks sent them: slots, table by table and in each piece by piece; by table and piece their number,
// and where their sums begin among the words of the piece's message; by piece its leaf and its message.
using SentSums = std::tuple<Ids, In<int64_t>, In<int64_t>, std::vector<int32_t>, std::vector<In<int32_t>>>;

void add_sums(std::vector<TableUpdate>& tables, const SentSums& sums, const Nodes& nodes) {
  const auto& [slots, counts, starts, leaves, messages] = sums;
  const size_t num_pieces = leaves.size(), num_counts = tables.size() * num_pieces;
  require(messages.size() == num_pieces && counts.size() == num_counts && starts.size() == num_counts,
          "one message per piece, one count per table and piece");
  const bool wide = is_wide(slots);
  int64_t first = 0;
  for (size_t i = 0; i < num_counts; ++i) {
    TableUpdate& table = tables[i / num_pieces];
    const In<int32_t>& words = messages[i % num_pieces];
    const int64_t n = counts.data()[i], at = starts.data()[i], dim = table.table.dim;
    require(0 <= n && first + n <= size(slots), "fewer slots than counts say");
    require(n == 0 || (0 <= at && at + n * dim <= size(words)), "sums beyond their message");
    const Bags bags{slots.data(), nullptr, nullptr, size(slots), n, first, Pooling::sum, wide};
    Segment segment{bags, n ? reinterpret_cast<const float*>(words.data() + at) : nullptr, dim};
    segment.leaf = leaves[i % num_pieces];
    segment.node = node_of(nodes, segment.leaf);
    if (n) table.segments.push_back(segment);
    first += n;
  }
}

int bind_update(size_t num_features, const Arrays& weights, const std::vector<const Arrays*>& states,
                const Pending& pending, const std::vector<RuleNumbers>& rules, const std::optional<SentSums>& sums,
                int num_threads) {
  require(rules.size() == weights.arrays.size(), "one rule per table");
  std::vector<TableUpdate> tables;
  for (size_t t = 0; t < weights.arrays.size(); ++t) {
    const Rows rows = weights.rows(t);
    const Rule rule = rule_of(rules[t]);
    tables.push_back({rows, states_of(states, t, rule.algorithm, rows), rule, {}});
  }
  const bool in_parts = sums || count_parts(pending) > 1;
  if (sums) add_sums(tables, *sums, {{0, INT32_MAX}});
  add_segments(tables, num_features, pending, 0, {{0, INT32_MAX}});
  nb::gil_scoped_release release;
  return static_cast<int>(update(tables, num_threads, in_parts));
}

// An array on kept pages, which it gives back when it is freed.
template <class T>
nb::ndarray<nb::numpy, T> kept_array(std::unique_ptr<KeptPages> pages, int64_t size) {
  T* data = reinterpret_cast<T*>(pages->bytes());
  return array_on(data, {static_cast<size_t>(size)}, std::move(pages));
}

// How many rows by node and table, then rows and sums of all of them end to end.
using Summed =
    std::tuple<std::vector<std::vector<int64_t>>, nb::ndarray<nb::numpy, int64_t>, nb::ndarray<nb::numpy, float>>;

// Nothing if an id or offset is out of range.
std::optional<Summed> bind_sum_rows(size_t num_features, const Arrays& weights, const Pending& pending, int32_t leaf,
                                    const Nodes& nodes, const std::optional<SentSums>& sums, int num_threads) {
  std::vector<TableUpdate> tables;
  for (size_t t = 0; t < weights.arrays.size(); ++t) tables.push_back({weights.rows(t), {}, {}, {}});
  if (sums) add_sums(tables, *sums, nodes);
  add_segments(tables, num_features, pending, leaf, nodes);
  SummedRows out;
  const auto result = without_gil([&] { return sum_rows(tables, nodes.size(), num_threads, out); });
  if (result != UpdateResult::done) return std::nullopt;
  return std::optional<Summed>{std::in_place, std::move(out.num_rows),
                               kept_array<int64_t>(std::move(out.rows), out.total_rows),
                               kept_array<float>(std::move(out.sums), out.total_floats)};
}

// By table its first id, end of its ids; in the tables' order.
using Spans = std::vector<std::tuple<size_t, int64_t, int64_t>>;
using Numbers = nb::ndarray<nb::numpy, int64_t>;

// Returns counts by table and group, rows, their numbers in shards, places; nothing if an id is out of range.
std::optional<std::tuple<std::vector<int64_t>, Numbers, Numbers, Numbers>> bind_distinct_rows(
    Ids ids, const Spans& spans, const std::vector<int64_t>& num_rows, const Shares& shares, int num_threads) {
  const bool wide = is_wide(ids);
  require(shares.prefix.size() == num_rows.size() && shares.owner.size() == num_rows.size(), "one share per table");
  require(shares.num_ranks > 0 && 0 <= shares.rank && shares.rank < shares.num_ranks, "no such rank");
  for (const int64_t owner : shares.owner) require(owner < shares.num_ranks, "no such owner");
  std::vector<TableUpdate> tables;
  for (const int64_t n : num_rows) tables.push_back({{nullptr, nullptr, n, 1, Storage::float32}, {}, {}, {}});
  size_t before = 0;
  for (const auto& [table, start, stop] : spans) {
    require(before <= table && table < tables.size(), "tables of spans must rise");
    require(0 <= start && start <= stop && stop <= size(ids), "span beyond the ids");
    const Bags bags{ids.data(), nullptr, nullptr, size(ids), stop - start, start, Pooling::sum, wide};
    tables[table].segments.push_back({bags, nullptr, 0});
    before = table;
  }
  DistinctRows out;
  const auto result = without_gil([&] { return distinct_rows(tables, shares, num_threads, out); });
  if (result != UpdateResult::done) return std::nullopt;
  return std::tuple{std::move(out.counts), kept_array<int64_t>(std::move(out.rows), out.total_rows),
                    kept_array<int64_t>(std::move(out.local), out.total_rows),
                    kept_array<int64_t>(std::move(out.places), out.total_ids)};
}

// By node its counts by table, its rows and its sums.
using GivenSums = std::vector<std::tuple<std::vector<int64_t>, In<int64_t>, ConstFloats>>;
using Words = nb::ndarray<nb::numpy, int32_t>;

// row_of: empty if rows have no homes. Returns messages, and how many words of each are keys.
std::vector<std::pair<Words, int64_t>> bind_pack_sums(const GivenSums& given, const std::vector<In<int64_t>>& row_of,
                                                      const std::vector<int64_t>& first_keys,
                                                      const std::vector<int64_t>& dims, const Shares& shares,
                                                      int num_threads) {
  const size_t num_tables = dims.size();
  const bool has_homes = !row_of.empty();
  require(first_keys.size() == num_tables + 1, "a first key for each table, and their end");
  require(!has_homes || (row_of.size() == num_tables && shares.prefix.size() == num_tables &&
                         shares.owner.size() == num_tables && shares.num_ranks > 0),
          "one of each per table");
  Homes homes{{}, shares};
  for (const In<int64_t>& rows : row_of) homes.row_of.push_back(rows.data());
  std::vector<NodeSums> nodes;
  for (const auto& [counts, rows, sums] : given) {
    require(counts.size() == num_tables, "one count per table");
    int64_t num_rows = 0, num_floats = 0;
    for (size_t t = 0; t < num_tables; ++t) {
      require(counts[t] >= 0 && num_rows + counts[t] <= size(rows), "fewer rows than counts say");
      const int64_t end = has_homes ? size(row_of[t]) : first_keys[t + 1] - first_keys[t];
      for (int64_t i = num_rows; i < num_rows + counts[t]; ++i) {
        require(0 <= rows.data()[i] && rows.data()[i] < end, "row out of range");
        require(!has_homes || row_of[t].data()[rows.data()[i]] >= 0, "negative row");
      }
      num_rows += counts[t];
      num_floats += counts[t] * dims[t];
    }
    require(num_floats == size(sums), "a sum for each row");
    nodes.push_back({counts, rows.data(), sums.data()});
  }
  std::vector<SumsMessage> messages =
      without_gil([&] { return pack_sums(nodes, has_homes ? &homes : nullptr, first_keys, dims, num_threads); });
  std::vector<std::pair<Words, int64_t>> found;
  for (SumsMessage& each : messages) {
    found.emplace_back(kept_array<int32_t>(std::move(each.words), each.num_words), each.num_key_words);
  }
  return found;
}

// messages: words, number of nodes, and which rows to take. Returns counts and starts by table and piece, rows; nothing
// for words that pack_sums does not make.
std::optional<std::tuple<std::vector<int64_t>, std::vector<int64_t>, Numbers>> bind_unpack_sums(
    const std::vector<std::tuple<In<int32_t>, int64_t, int>>& given,
    const std::vector<std::pair<size_t, size_t>>& pieces, const std::vector<int64_t>& first_keys,
    const std::vector<int64_t>& dims, const std::vector<int64_t>& prefix) {
  require(first_keys.size() == dims.size() + 1 && prefix.size() == dims.size(), "one of each per table");
  std::vector<ComingSums> messages;
  for (const auto& [words, num_nodes, taken] : given) {
    require(num_nodes >= 0 && 0 <= taken && taken <= 2, "no such rows");
    messages.push_back({words.data(), size(words), num_nodes, static_cast<Taken>(taken)});
  }
  for (const auto& [m, k] : pieces) {
    require(m < messages.size() && static_cast<int64_t>(k) < messages[m].num_nodes, "no such node");
  }
  UnpackedSums out;
  const bool good = without_gil([&] { return unpack_sums(messages, pieces, first_keys, dims, prefix, out); });
  if (!good) return std::nullopt;
  return std::tuple{std::move(out.counts), std::move(out.starts),
                    kept_array<int64_t>(std::move(out.rows), out.total_rows)};
}

// The bytes of a row of a table's array.
int64_t row_bytes_of(const Arrays& arrays, size_t table) {
  require(table < arrays.arrays.size() && arrays.arrays[table].ndim() == 2, "no [N, D] array for this table");
  return extent(arrays.arrays[table], 1) * static_cast<int64_t>(arrays.arrays[table].itemsize());
}

// Rows in messages, table after table, and beside them in an array of slots: of table t, group by group from slot
// firsts[t] on.
struct RowMessages {
  const Arrays& slots;
  const std::vector<int64_t>& firsts;
  const In<int64_t>& counts;  // by table and group; group 1 + r is that of message r, others are not copied
  size_t num_groups;
  const std::vector<Array<uint8_t>>& messages;
  std::vector<int64_t> at;  // by message, the end of what is in it

  RowMessages(const Arrays& s, const std::vector<int64_t>& f, const In<int64_t>& c,
              const std::vector<Array<uint8_t>>& m)
      : slots(s), firsts(f), counts(c), num_groups(0), messages(m), at(m.size()) {
    const size_t num_tables = slots.arrays.size();
    require(num_tables && firsts.size() == num_tables && counts.size() % num_tables == 0, "one count per group");
    num_groups = counts.size() / num_tables;
    require(num_groups > messages.size(), "a group for each message");
    for (size_t i = 0; i < counts.size(); ++i) require(counts.data()[i] >= 0, "negative count");
  }

  int64_t count(size_t table, size_t group) const { return counts.data()[table * num_groups + group]; }
  std::byte* in_message(size_t message, int64_t bytes) {
    require(at[message] + bytes <= size(messages[message]), "message too short");
    std::byte* found = reinterpret_cast<std::byte*>(messages[message].data()) + at[message];
    at[message] += bytes;
    return found;
  }
  std::byte* in_slots(size_t table, int64_t first, int64_t num_rows) const {
    require(0 <= first && first + num_rows <= extent(slots.arrays[table], 0), "too few slots");
    return static_cast<std::byte*>(slots.arrays[table].data()) + first * row_bytes_of(slots, table);
  }
};

// rows: of `weights`, table by table, in each group by group. Copies those of group 0 into slots, others into messages.
void bind_pack_rows(const Arrays& weights, In<int64_t> rows, In<int64_t> counts, const Arrays& slots,
                    const std::vector<int64_t>& firsts, const std::vector<Array<uint8_t>>& messages, int num_threads) {
  RowMessages to(slots, firsts, counts, messages);
  require(weights.arrays.size() == slots.arrays.size(), "as many tables as arrays of slots");
  std::vector<RowCopy> copies;
  const int64_t* next = rows.data();
  for (size_t t = 0; t < weights.arrays.size(); ++t) {
    const int64_t row_bytes = row_bytes_of(weights, t);
    const auto* from = static_cast<const std::byte*>(weights.arrays[t].data());
    for (size_t g = 0; g < to.num_groups; ++g) {
      const int64_t n = to.count(t, g);
      require(n <= rows.data() + rows.size() - next, "fewer rows than counts say");
      if (g <= messages.size()) {
        require(n == 0 || row_bytes == row_bytes_of(slots, t), "slots are not of their table");
        for (int64_t i = 0; i < n; ++i) {
          require(0 <= next[i] && next[i] < extent(weights.arrays[t], 0), "row out of range");
        }
        std::byte* place = g ? to.in_message(g - 1, n * row_bytes) : to.in_slots(t, firsts[t], n);
        copies.push_back({from, next, n, row_bytes, place});
      }
      next += n;
    }
  }
  nb::gil_scoped_release release;
  copy_rows(copies, num_threads);
}

// Copies the rows in messages into slots, behind those of group 0.
void bind_unpack_rows(const std::vector<Array<uint8_t>>& messages, In<int64_t> counts, const Arrays& slots,
                      const std::vector<int64_t>& firsts, int num_threads) {
  RowMessages from(slots, firsts, counts, messages);
  std::vector<RowCopy> copies;
  for (size_t t = 0; t < slots.arrays.size(); ++t) {
    const int64_t row_bytes = row_bytes_of(slots, t);
    int64_t first = firsts[t] + from.count(t, 0);
    for (size_t r = 0; r < messages.size(); ++r) {
      const int64_t n = from.count(t, 1 + r);
      copies.push_back({from.in_message(r, n * row_bytes), nullptr, n, row_bytes, from.in_slots(t, first, n)});
      first += n;
    }
  }
  nb::gil_scoped_release release;
  copy_rows(copies, num_threads);
}

int64_t bind_first_nonfinite(GradMatrix values, int num_threads) {
  const int64_t stride = row_stride(values, extent(values, 0));
  nb::gil_scoped_release release;
  return first_nonfinite(values.data(), extent(values, 0), extent(values, 1), stride, num_threads);
}

bool bind_are_upper_halves(ConstFloats weights, int num_threads) {
  nb::gil_scoped_release release;
  return are_upper_halves(weights.data(), size(weights), num_threads);
}

uint16_t* low_of(const Floats& weights, const LowHalves& low) {
  require(size(low) == size(weights), "a lower half for each weight");
  return reinterpret_cast<uint16_t*>(low.data());
}

void bind_split_halves(Floats weights, LowHalves low, int num_threads) {
  uint16_t* halves = low_of(weights, low);
  nb::gil_scoped_release release;
  split_halves(weights.data(), halves, size(weights), num_threads);
}

// For each weight, its lower half and its gradient.
void bind_split_sgd(std::vector<Floats> weights, std::vector<LowHalves> low, std::vector<ConstFloats> grads, float rate,
                    float decay, int num_threads) {
  require(low.size() == weights.size() && grads.size() == weights.size(),
          "lower halves and a gradient for each weight");
  std::vector<uint16_t*> halves;
  for (size_t k = 0; k < weights.size(); ++k) {
    require(size(grads[k]) == size(weights[k]), "gradients differ from weights");
    halves.push_back(low_of(weights[k], low[k]));
  }
  nb::gil_scoped_release release;
  for (size_t k = 0; k < weights.size(); ++k)
    split_sgd(weights[k].data(), halves[k], grads[k].data(), size(weights[k]), rate, decay, num_threads);
}

void bind_flush_denormals(const std::vector<Floats>& weights, int num_threads) {
  nb::gil_scoped_release release;
  for (const Floats& own : weights) flush_denormals(own.data(), size(own), num_threads);
}

void bind_fill_uniform(uint64_t key, int64_t first_row, int64_t step, int64_t column, Matrix<float> out, float bound,
                       int64_t zero_rows, int num_threads) {
  require(first_row >= 0 && step >= 1, "negative row, or rows that do not rise");
  require(column >= 0 && column % 4 == 0, "the first column must be a multiple of 4");
  nb::gil_scoped_release release;
  fill_uniform(key, first_row, step, extent(out, 0), column, extent(out, 1), bound, zero_rows, out.data(), num_threads);
}

void bind_fill_uniform_rows(uint64_t key, In<int64_t> rows, Matrix<float> out, float bound, int64_t zero_rows,
                            int num_threads) {
  const int64_t count = extent(out, 0);
  require(extent(rows, 0) == count, "as many rows as values");
  require(count == 0 || *std::min_element(rows.data(), rows.data() + count) >= 0, "negative row");
  nb::gil_scoped_release release;
  fill_uniform_rows(key, rows.data(), count, extent(out, 1), bound, zero_rows, out.data(), num_threads);
}

size_t num_bytes(const std::vector<size_t>& shape) {
  size_t bytes = sizeof(float);
  for (const size_t n : shape) {
    require(n == 0 || bytes <= SIZE_MAX / 2 / n, "array too large");
    bytes *= n;
  }
  return bytes;
}

// Returns a zeroed array, and whether the system took the request for huge pages.
// sparse: most of it will never be touched, so it may be larger than memory.
std::pair<nb::ndarray<nb::numpy, float>, bool> bind_allocate(const std::vector<size_t>& shape, bool sparse) {
  const Pages pages = allocate_pages(num_bytes(shape), sparse);
  if (!pages.data) throw std::bad_alloc();
  const std::shared_ptr<void> owner(pages.data, [pages](void*) { free_pages(pages); });
  return {array_on(static_cast<float*>(pages.data), shape, owner), pages.huge};
}

// Returns an uninitialized array, whose pages are kept for the next one.
nb::ndarray<nb::numpy, float> bind_take(const std::vector<size_t>& shape) {
  auto pages = std::make_unique<KeptPages>(num_bytes(shape));
  float* data = pages->floats();
  return array_on(data, shape, std::move(pages));
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (int i = 0; i < num_kernels(); ++i) names.emplace_back(kernels_at(i).isa);
  return names;
}

double bind_touch_rows(Matrix<float> rows, In<int64_t> ids, int64_t distance, bool into_l2, bool write,
                       int num_threads) {
  const int64_t row_bytes = extent(rows, 1) * static_cast<int64_t>(sizeof(float));
  require(row_bytes % 8 == 0, "rows must be a multiple of 8 bytes");
  for (int64_t i = 0; i < size(ids); ++i) {
    require(0 <= ids.data()[i] && ids.data()[i] < extent(rows, 0), "id out of range");
  }
  const RowPass pass{reinterpret_cast<char*>(rows.data()), row_bytes, ids.data(), size(ids), distance, into_l2, write};
  nb::gil_scoped_release release;
  return touch_rows(pass, num_threads);
}

}  // namespace

NB_MODULE(_native, m) {
  // Objects still alive when the interpreter exits (a collection in a script's globals) are not leaks of ours.
  nb::set_leak_warnings(false);
  watch_forks();
  m.def(
      "min_parallel_bytes", [](int64_t work) { return min_parallel_bytes.exchange(work); }, nb::arg("work"),
      "For tests: sets the least work of a region that threads share, returns what it was (hotrow/parallel.h).");
  m.doc() = "hotrow's kernels; call them through hotrow.kernels.ops and hotrow.data.native";
  nb::class_<Layout>(m, "Layout").def(nb::init<std::vector<std::optional<std::tuple<size_t, int64_t, bool>>>>());
  nb::class_<Arrays>(m, "Arrays")
      .def(
          "__init__",
          [](Arrays* self, std::vector<Memory> arrays, std::vector<std::optional<LowHalves>> low) {
            new (self) Arrays{std::move(arrays), std::move(low)};
          },
          nb::arg().noconvert(), nb::arg().noconvert());
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<Ids, std::optional<In<int64_t>>, std::optional<ConstFloats>, std::vector<int64_t>, int64_t,
                    std::vector<int64_t>>(),
           nb::arg("ids"), nb::arg("offsets").none(), nb::arg("weights").none(), nb::arg("starts"), nb::arg("num_bags"),
           nb::arg("parts") = std::vector<int64_t>());
  define(m, "lookup", bind_lookup);
  define(m, "weight_gradient", bind_weight_gradient);
  define(m, "update", bind_update);
  define(m, "sum_rows", bind_sum_rows);
  nb::class_<Shares>(m, "Shares")
      .def("__init__",
           [](Shares* self, std::vector<int64_t> prefix, std::vector<int64_t> owner, int64_t rank, int64_t num_ranks) {
             new (self) Shares{std::move(prefix), std::move(owner), rank, num_ranks};
           });
  define(m, "distinct_rows", bind_distinct_rows);
  define(m, "pack_sums", bind_pack_sums);
  define(m, "unpack_sums", bind_unpack_sums);
  define(m, "pack_rows", bind_pack_rows);
  define(m, "unpack_rows", bind_unpack_rows);
  define(m, "first_nonfinite", bind_first_nonfinite);
  define(m, "are_upper_halves", bind_are_upper_halves);
  define(m, "split_halves", bind_split_halves);
  define(m, "split_sgd", bind_split_sgd);
  define(m, "flush_denormals", bind_flush_denormals);
  define(m, "fill_uniform", bind_fill_uniform);
  define(m, "fill_uniform_rows", bind_fill_uniform_rows);
  m.def("allocate", bind_allocate, nb::arg("shape"), nb::arg("sparse") = false);
  define(m, "take", bind_take);
  define(m, "touch_rows", bind_touch_rows);
  m.def("isas", isas);
  m.def("num_runnable", num_runnable);
  m.def("in_forked_child", in_forked_child);
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("use_isa", [](int index) {
    require(0 <= index && index < num_kernels(), "no such instruction set on this machine");
    use_kernels(index);
  });
  bind_dense(m);
  bind_encode(m);
  bind_cells(m);
  bind_memory(m);
  bind_cache(m);
}
