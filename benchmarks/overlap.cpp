// What the update of a batch does with ids alone, apart from the rest, for benchmarks/overlap.py. The sources themselves
// are included, so that what is timed is what runs; of them only the ordering of keys is called.
#include "../native/batch_update.cpp"
#include "../native/fork.cpp"
#include "../native/memory.cpp"

namespace hotrow {
const Kernels& kernels() { std::abort(); }  // rows are not touched
}  // namespace hotrow

// Keys of num_tables tables in row order; table t has num_rows[t] rows and its bags read the ids from t * num_bags *
// lookups on. Returns 0 where an id is out of range.
extern "C" int order_keys(const int64_t* ids, int64_t num_tables, const int64_t* num_rows, int64_t num_bags,
                          int64_t lookups, int algorithm, int num_threads) {
  using namespace hotrow;
  std::vector<int64_t> offsets;
  for (int64_t b = 0; b <= num_bags; ++b) offsets.push_back(b * lookups);
  std::vector<TableUpdate> tables;
  const int64_t num_ids = num_bags * lookups;
  for (int64_t t = 0; t < num_tables; ++t) {
    const Bags bags{ids + t * num_ids, offsets.data(), nullptr, num_ids, num_bags, 0, Pooling::sum, true};
    const Rows rows{nullptr, nullptr, num_rows[t], 64, Storage::float32};
    const Rule rule{.algorithm = static_cast<Algorithm>(algorithm)};
    tables.push_back({rows, {}, rule, {{bags, nullptr, 0}}});
  }
  std::vector<TablePlan> plans;
  for (const TableUpdate& table : tables) plans.push_back(plan_table(table));
  const auto lay_out_all = [&](Arena arena) {
    for (TablePlan& plan : plans) lay_out(arena, plan);
    return arena.used;
  };
  const KeptPages scratch(lay_out_all({nullptr}));
  lay_out_all({scratch.bytes()});
  if (!make_all_keys(plans, num_threads)) return 0;
  sort_all(plans, num_threads);
  return 1;
}
