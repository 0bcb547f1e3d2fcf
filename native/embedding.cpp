// Cuts the work of a batch into tasks for the leaf kernels; see hotrow/embedding.h. Compiled once, for the baseline.
#include <hotrow/embedding.h>
#include <hotrow/parallel.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>

namespace hotrow {
namespace {

// Below this a task costs more to hand out than its imbalance could.
constexpr int64_t kSmallestTaskBytes = 1 << 16;
// Tasks per thread: enough that a thread which lost its core for a while leaves little behind.
constexpr int64_t kTasksPerThread = 16;

int64_t task_bytes(int64_t total_bytes, int num_threads) {
  if (num_threads <= 1) return total_bytes + 1;
  return std::max(kSmallestTaskBytes, total_bytes / (num_threads * kTasksPerThread));
}

int64_t num_pieces(int64_t bytes, int64_t piece_bytes) {
  return std::max<int64_t>(1, (bytes + piece_bytes - 1) / piece_bytes);
}

struct Range {
  size_t owner;  // which feature, segment or table
  int64_t first, last;
};

int64_t count_ids(const Bags& bags) { return bags.begin(bags.num_bags) - bags.begin(0); }

// The first bag at which `target` rows (one per id, one per bag for its output) lie behind.
int64_t bag_at(const Bags& bags, int64_t target) {
  int64_t low = 0, high = bags.num_bags;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (bags.begin(middle) - bags.begin(0) + middle < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// All bags of `items`, cut into ranges of about equal bytes. Each item yields {bags, dim}.
template <class Items, class View>
std::vector<Range> cut_bags(const Items& items, int num_threads, const View& view) {
  const auto bytes = [&](const auto& item) {
    const auto [bags, dim] = view(item);
    return (count_ids(*bags) + bags->num_bags) * dim * static_cast<int64_t>(sizeof(float));
  };
  int64_t total = 0;
  for (const auto& item : items) total += bytes(item);
  const int64_t piece_bytes = task_bytes(total, num_threads);
  std::vector<Range> ranges;
  for (size_t f = 0; f < items.size(); ++f) {
    const Bags& bags = *view(items[f]).first;
    const int64_t pieces = num_pieces(bytes(items[f]), piece_bytes), rows = count_ids(bags) + bags.num_bags;
    int64_t first = 0;
    for (int64_t k = 1; k <= pieces; ++k) {
      const int64_t last = k == pieces ? bags.num_bags : bag_at(bags, rows / pieces * k);
      if (last > first) ranges.push_back({f, first, last});
      first = std::max(first, last);
    }
  }
  return ranges;
}

// Whether the ends of the offsets can be trusted for cutting; the kernels check every bag.
bool ends_in_range(const Bags& bags) {
  return 0 <= bags.begin(0) && bags.begin(0) <= bags.begin(bags.num_bags) && bags.begin(bags.num_bags) <= bags.num_ids;
}

std::pair<const Bags*, int64_t> view_feature(const FeatureBags& feature) { return {&feature.bags, feature.table.dim}; }

// Runs kernel(feature, range) over all bags of all features; false when any call says so.
template <class Kernel>
bool for_all_bags(const std::vector<FeatureBags>& features, int num_threads, const Kernel& kernel) {
  for (const FeatureBags& feature : features) {
    if (!ends_in_range(feature.bags)) return false;
  }
  const std::vector<Range> ranges = cut_bags(features, num_threads, view_feature);
  std::atomic<bool> good{true};
  parallel_for(static_cast<int64_t>(ranges.size()), num_threads, [&](int64_t task, int) {
    const Range& range = ranges[static_cast<size_t>(task)];
    if (!kernel(features[range.owner], range)) good.store(false, std::memory_order_relaxed);
  });
  return good.load();
}

}  // namespace

bool lookup(const std::vector<FeatureBags>& features, float* out, int64_t stride, int num_threads) {
  const Kernels& set = kernels();
  return for_all_bags(features, num_threads, [&](const FeatureBags& feature, const Range& range) {
    return set.lookup(feature.table, feature.bags, range.first, range.last, out + feature.column, stride);
  });
}

bool weight_gradient(const std::vector<FeatureBags>& features, const float* grad, int64_t stride, float* out,
                     int num_threads) {
  const Kernels& set = kernels();
  return for_all_bags(features, num_threads, [&](const FeatureBags& feature, const Range& range) {
    return set.weight_gradient(feature.table, feature.bags, range.first, range.last, grad + feature.column, stride,
                               out);
  });
}

void fill_uniform(uint64_t key, int64_t first, int64_t count, int64_t dim, float bound, int64_t zero_rows, float* out,
                  int num_threads) {
  const Kernels& set = kernels();
  const int64_t rows_per_task = std::max<int64_t>(1, (1 << 20) / (dim * static_cast<int64_t>(sizeof(float))));
  parallel_for((count + rows_per_task - 1) / rows_per_task, num_threads, [&](int64_t task, int) {
    const int64_t begin = task * rows_per_task, end = std::min(count, begin + rows_per_task);
    set.fill_uniform(key, first + begin, end - begin, dim, bound, zero_rows, out + begin * dim);
  });
}

namespace {

// Runs kernel(first, last, scratch of `scratch_floats`) over all samples; every thread has scratch of its own.
template <class Kernel>
void for_all_samples(int64_t num_samples, int64_t scratch_floats, int num_threads, const Kernel& kernel) {
  const int64_t samples_per_task = std::max<int64_t>(16, num_samples / (num_threads * kTasksPerThread));
  std::vector<float> scratch(static_cast<size_t>(scratch_floats * num_threads));
  parallel_for((num_samples + samples_per_task - 1) / samples_per_task, num_threads, [&](int64_t task, int worker) {
    const int64_t first = task * samples_per_task;
    kernel(first, std::min(num_samples, first + samples_per_task), scratch.data() + worker * scratch_floats);
  });
}

}  // namespace

void interact(const float* dense, const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim,
              float* out, int num_threads) {
  const Kernels& set = kernels();
  for_all_samples(num_samples, interact_scratch_floats(num_features, dim), num_threads,
                  [&](int64_t first, int64_t last, float* scratch) {
                    set.interact(dense, pooled, num_features, dim, first, last, out, scratch);
                  });
}

void interact_backward(const float* grad, const float* dense, const float* pooled, int64_t num_samples,
                       int64_t num_features, int64_t dim, float* grad_dense, float* grad_pooled, int num_threads) {
  const Kernels& set = kernels();
  for_all_samples(num_samples, interact_scratch_floats(num_features, dim), num_threads,
                  [&](int64_t first, int64_t last, float* scratch) {
                    set.interact_backward(grad, dense, pooled, num_features, dim, first, last, grad_dense, grad_pooled,
                                          scratch);
                  });
}

namespace {

// Hands out aligned pieces of a block. Over a null block it only counts, so one routine both sizes and lays out.
struct Arena {
  std::byte* base;
  size_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* place = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return place;
  }
};

// One segment of an update on its way to keys.
struct Part {
  const Segment* segment;
  int64_t dim, num_rows;
  uint64_t source;  // its number among the table's segments, shifted into place
  int row_shift;
  uint64_t* keys;   // of the segment's first occurrence
  int64_t* bag_of;  // with weights: per occurrence; else null and the bag itself is the index
  float* scale;     // to be filled: per occurrence (weights and mean), per bag (mean); else null
};

struct TablePlan {
  const TableUpdate* table = nullptr;
  int64_t num_keys = 0;
  int row_bits = 0, row_shift = 0, source_shift = 0;
  int sorted_shift = 0;  // keys are brought into the order of their bits from here up
  uint64_t* keys = nullptr;
  uint64_t* spare = nullptr;
  std::vector<Source> sources = {};
  std::vector<Part> parts = {};
};

constexpr int kDigitBits = 11;   // of one pass of the radix sort: 2048 counters stay in L1
constexpr int kLeadingBits = 8;  // all that SGD sorts by: see plan_table

// Bits that hold every number below n.
int bits_below(int64_t n) { return n > 1 ? std::bit_width(static_cast<uint64_t>(n - 1)) : 0; }

TablePlan plan_table(const TableUpdate& table) {
  TablePlan plan{.table = &table};
  int64_t largest_index = 0;
  for (const Segment& segment : table.segments) {
    const int64_t ids = count_ids(segment.bags);
    plan.num_keys += ids;
    largest_index = std::max(largest_index, segment.bags.weights ? ids : segment.bags.num_bags);
  }
  plan.row_bits = bits_below(table.table.num_rows);
  plan.source_shift = bits_below(largest_index);
  plan.row_shift = plan.source_shift + bits_below(static_cast<int64_t>(table.segments.size()));
  // SGD steps once per occurrence: it needs a row's occurrences in order, not side by side. One pass over the leading
  // bits keeps memory accesses close together, and leaves them less regular than a full sort, which draws useless
  // fetches from the hardware's prefetcher.
  const int skipped = table.rule.algorithm == Algorithm::sgd ? std::max(0, plan.row_bits - kLeadingBits) : 0;
  plan.sorted_shift = plan.row_shift + skipped;
  return plan;
}

void lay_out(Arena& arena, TablePlan& plan) {
  plan.keys = arena.take<uint64_t>(plan.num_keys);
  plan.spare = arena.take<uint64_t>(plan.num_keys);
  plan.parts.clear();
  plan.sources.clear();
  uint64_t* keys = plan.keys;
  for (const Segment& segment : plan.table->segments) {
    const Bags& bags = segment.bags;
    const int64_t ids = count_ids(bags);
    const int64_t dim = plan.table->table.dim;
    const bool mean = bags.pooling == Pooling::mean;
    const Part part{&segment,
                    dim,
                    plan.table->table.num_rows,
                    static_cast<uint64_t>(plan.parts.size()) << plan.source_shift,
                    plan.row_shift,
                    keys,
                    bags.weights ? arena.take<int64_t>(ids) : nullptr,
                    mean ? arena.take<float>(bags.weights ? ids : bags.num_bags) : nullptr};
    const float* weights = bags.weights ? bags.weights + bags.begin(0) : nullptr;
    plan.sources.push_back({segment.grad, segment.stride, part.bag_of, mean ? part.scale : weights});
    plan.parts.push_back(part);
    if (keys) keys += ids;
  }
}

// Writes the keys and scales of bags [first, last); false when an id or offset is out of range.
template <class Id>
bool make_keys(const Part& part, int64_t first, int64_t last) {
  const Bags& bags = part.segment->bags;
  const Id* ids = static_cast<const Id*>(bags.ids);
  const int64_t base = bags.begin(0), limit = bags.begin(bags.num_bags);
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = bags.begin(b), end = bags.begin(b + 1);
    if (begin < base || end < begin || end > limit) return false;
    const float length = static_cast<float>(end - begin);
    if (part.scale && !bags.weights) part.scale[b] = 1.0f / length;
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t row = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
      if (row >= static_cast<uint64_t>(part.num_rows)) return false;
      const int64_t index = bags.weights ? i - base : b;
      part.keys[i - base] = row << part.row_shift | part.source | static_cast<uint64_t>(index);
      if (part.bag_of) part.bag_of[i - base] = b;
      if (part.scale && bags.weights) part.scale[i - base] = bags.weights[i] / length;
    }
  }
  return true;
}

bool make_all_keys(const std::vector<TablePlan>& plans, int num_threads) {
  std::vector<const Part*> parts;
  for (const TablePlan& plan : plans) {
    for (const Part& part : plan.parts) parts.push_back(&part);
  }
  const auto view = [](const Part* part) { return std::pair{&part->segment->bags, part->dim}; };
  const std::vector<Range> ranges = cut_bags(parts, num_threads, view);
  std::atomic<bool> good{true};
  parallel_for(static_cast<int64_t>(ranges.size()), num_threads, [&](int64_t task, int) {
    const Range& range = ranges[static_cast<size_t>(task)];
    const Part& part = *parts[range.owner];
    const bool ok = part.segment->bags.wide ? make_keys<int64_t>(part, range.first, range.last)
                                            : make_keys<int32_t>(part, range.first, range.last);
    if (!ok) good.store(false, std::memory_order_relaxed);
  });
  return good.load();
}

// One digit of the radix sort, over one chunk of the keys.
struct Digit {
  int shift;
  uint64_t mask;

  void count(const uint64_t* __restrict keys, int64_t n, int64_t* __restrict counts) const {
    for (int64_t i = 0; i < n; ++i) ++counts[keys[i] >> shift & mask];
  }
  void move(const uint64_t* __restrict keys, int64_t n, int64_t* __restrict next, uint64_t* __restrict to) const {
    for (int64_t i = 0; i < n; ++i) to[next[keys[i] >> shift & mask]++] = keys[i];
  }
};

// Turns counts [num_chunks, num_digits] into the places where each chunk's keys of each digit start.
void counts_to_places(std::vector<int64_t>& counts, int64_t num_chunks) {
  const int64_t num_digits = static_cast<int64_t>(counts.size()) / num_chunks;
  int64_t start = 0;
  for (int64_t digit = 0; digit < num_digits; ++digit) {
    for (int64_t c = 0; c < num_chunks; ++c) {
      start += std::exchange(counts[static_cast<size_t>(c * num_digits + digit)], start);
    }
  }
}

// Sorts plan.keys by the bits from sorted_shift up, stably: least significant digit first, plan.spare as the other
// side; the result ends in plan.keys. Any number of chunks gives the same order.
void radix_sort(TablePlan& plan, int num_threads) {
  const int bits = plan.row_shift + plan.row_bits - plan.sorted_shift;
  const int passes = (bits + kDigitBits - 1) / kDigitBits;
  if (passes == 0 || plan.num_keys < 2) return;
  const int digit_bits = (bits + passes - 1) / passes;
  const int64_t num_digits = int64_t{1} << digit_bits, num_chunks = num_threads, n = plan.num_keys;
  std::vector<int64_t> places(static_cast<size_t>(num_chunks * num_digits));
  const auto for_chunks = [&](const auto& work) {
    parallel_for(num_chunks, num_threads, [&](int64_t c, int) {
      const int64_t first = n * c / num_chunks, last = n * (c + 1) / num_chunks;
      work(plan.keys + first, last - first, places.data() + c * num_digits);
    });
  };
  for (int pass = 0; pass < passes; ++pass) {
    const Digit digit{plan.sorted_shift + pass * digit_bits, static_cast<uint64_t>(num_digits - 1)};
    std::fill(places.begin(), places.end(), 0);
    for_chunks([&](const uint64_t* keys, int64_t count, int64_t* counts) { digit.count(keys, count, counts); });
    counts_to_places(places, num_chunks);
    for_chunks([&](const uint64_t* keys, int64_t count, int64_t* next) { digit.move(keys, count, next, plan.spare); });
    std::swap(plan.keys, plan.spare);
  }
}

// Large tables are sorted by all threads together, the rest each by one.
void sort_all(std::vector<TablePlan>& plans, int num_threads) {
  constexpr int64_t kWorthSharing = 1 << 15;
  int64_t total = 0;
  for (const TablePlan& plan : plans) total += plan.num_keys;
  std::vector<TablePlan*> alone;
  for (TablePlan& plan : plans) {
    if (num_threads > 1 && plan.num_keys > kWorthSharing && plan.num_keys * num_threads > total) {
      radix_sort(plan, num_threads);
    } else {
      alone.push_back(&plan);
    }
  }
  std::sort(alone.begin(), alone.end(), [](auto* a, auto* b) { return a->num_keys > b->num_keys; });
  parallel_for(static_cast<int64_t>(alone.size()), num_threads,
               [&](int64_t task, int) { radix_sort(*alone[static_cast<size_t>(task)], 1); });
}

// The sorted keys of all tables in ranges of about equal bytes; no row is split.
std::vector<Range> cut_rows(const std::vector<TablePlan>& plans, int num_threads) {
  const auto bytes = [](const TablePlan& plan) {
    return plan.num_keys * plan.table->table.dim * static_cast<int64_t>(sizeof(float));
  };
  int64_t total = 0;
  for (const TablePlan& plan : plans) total += bytes(plan);
  const int64_t piece_bytes = task_bytes(total, num_threads);
  std::vector<Range> ranges;
  for (size_t t = 0; t < plans.size(); ++t) {
    const TablePlan& plan = plans[t];
    const int64_t pieces = num_pieces(bytes(plan), piece_bytes);
    int64_t first = 0;
    for (int64_t k = 1; k <= pieces; ++k) {
      int64_t last = std::max(first, plan.num_keys * k / pieces);
      while (0 < last && last < plan.num_keys &&
             plan.keys[last - 1] >> plan.sorted_shift == plan.keys[last] >> plan.sorted_shift) {
        ++last;
      }
      if (last > first) ranges.push_back({t, first, last});
      first = last;
    }
  }
  return ranges;
}

void apply_all(const std::vector<TablePlan>& plans, float* row_scratch, int64_t row_floats, int num_threads) {
  const Kernels& set = kernels();
  const std::vector<Range> ranges = cut_rows(plans, num_threads);
  parallel_for(static_cast<int64_t>(ranges.size()), num_threads, [&](int64_t task, int worker) {
    const Range& range = ranges[static_cast<size_t>(task)];
    const TablePlan& plan = plans[range.owner];
    const Occurrences occurrences{plan.keys + range.first, range.last - range.first, plan.sources.data(),
                                  plan.row_shift, plan.source_shift};
    set.update(plan.table->rule, plan.table->table, plan.table->state, occurrences, row_scratch + worker * row_floats);
  });
}

}  // namespace

UpdateResult update(const std::vector<TableUpdate>& tables, Scratch& scratch, int num_threads) {
  std::vector<TablePlan> plans;
  int64_t row_floats = 0;
  for (const TableUpdate& table : tables) {
    for (const Segment& segment : table.segments) {
      if (!ends_in_range(segment.bags)) return UpdateResult::out_of_range;
    }
    plans.push_back(plan_table(table));
    if (plans.back().row_bits + plans.back().row_shift > 64) return UpdateResult::too_large;
    row_floats = std::max(row_floats, (table.table.dim + 15) / 16 * 16);
  }
  const auto lay_out_all = [&](Arena arena) {
    for (TablePlan& plan : plans) lay_out(arena, plan);
    float* rows = arena.take<float>(row_floats * num_threads);
    return std::pair{rows, arena.used};
  };
  const size_t bytes = lay_out_all({nullptr}).second;
  float* row_scratch = lay_out_all({scratch.reserve(bytes)}).first;
  if (!make_all_keys(plans, num_threads)) return UpdateResult::out_of_range;
  sort_all(plans, num_threads);
  apply_all(plans, row_scratch, row_floats, num_threads);
  return UpdateResult::done;
}

}  // namespace hotrow
