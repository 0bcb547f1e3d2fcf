// How the layers of an MLP are divided: panels of weights, blocks of samples, rows of the weights' gradients. Used by
// mlp.cpp and mlp_bf16.cpp. No result depends on the division.
#pragma once

#include <hotrow/cut.h>
#include <hotrow/dense.h>
#include <hotrow/memory.h>
#include <hotrow/pairs.h>
#include <hotrow/parallel.h>

namespace hotrow {

// Samples per task: many, because panels come from a far cache once per task; not more, because what a layer wrote must
// stay in a near one.
inline constexpr int64_t kMostSamples = 512;

inline KeptPages floats(int64_t count) { return KeptPages(static_cast<size_t>(count) * sizeof(float)); }

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A matrix B(k, n) = at[k * depth_stride + n * column_stride], not yet packed.
struct UnpackedMatrix {
  const float* at;
  int64_t depth, columns;
  int64_t depth_stride, column_stride;
  bool in_pairs = false;  // is packed as pairs of bfloat16, over the whole depth

  int64_t packed_columns() const { return round_up(columns, kPanelColumns); }
  int64_t packed_words() const { return packed_columns() * (in_pairs ? pairs(depth) : depth); }
  int64_t panels_per_stretch() const { return packed_columns() / kPanelColumns; }
  int64_t num_panels() const {
    return in_pairs ? panels_per_stretch() : (depth + kMostDepth - 1) / kMostDepth * panels_per_stretch();
  }
};

// Panel `index` of B: stretches of kMostDepth of its depth, one after another, each as pack_panels lays it out; or
// pairs.
inline void pack(const UnpackedMatrix& b, int64_t index, float* panels) {
  const int64_t k = index / b.panels_per_stretch() * kMostDepth, n = index % b.panels_per_stretch() * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, b.columns - n);
  const float* at = b.at + k * b.depth_stride + n * b.column_stride;
  if (b.in_pairs) {
    pair_kernels()->pack_pair_panels(at, b.depth_stride, b.column_stride, b.depth, columns,
                                     reinterpret_cast<Pair*>(panels) + n * pairs(b.depth));
  } else {
    const int64_t depth = std::min(kMostDepth, b.depth - k);
    kernels().pack_panels(at, b.depth_stride, b.column_stride, depth, columns,
                          panels + k * b.packed_columns() + n * depth);
  }
}

// The panels of several matrices; those that `packed` has are taken from there, and the others are left there, once
// they are made.
class Panels {
 public:
  Panels(const std::vector<UnpackedMatrix>& matrices, int num_threads, PackedWeights* packed)
      : pages_(floats(packed ? 0 : total(matrices))) {
    std::vector<std::pair<size_t, int64_t>> tasks;
    float* end = pages_.floats();
    for (const UnpackedMatrix& matrix : matrices) {
      const PackedWeights::Key key{matrix.at, matrix.depth, matrix.columns, matrix.depth_stride, matrix.in_pairs};
      const auto kept = packed ? packed->pages.find(key) : PackedWeights::Pages::iterator{};
      if (packed && kept != packed->pages.end()) {
        starts_.push_back(kept->second->floats());
        continue;
      }
      for (int64_t panel = 0; panel < matrix.num_panels(); ++panel) tasks.emplace_back(starts_.size(), panel);
      starts_.push_back(end);
      if (packed) {
        made_.emplace_back(key,
                           std::make_shared<KeptPages>(static_cast<size_t>(matrix.packed_words()) * sizeof(float)));
        starts_.back() = made_.back().second->floats();
      }
      end += packed ? 0 : matrix.packed_words();
    }
    parallel_for(static_cast<int64_t>(tasks.size()), num_threads, [&](int64_t task, int) {
      const auto [matrix, panel] = tasks[static_cast<size_t>(task)];
      pack(matrices[matrix], panel, starts_[matrix]);
    });
    if (packed) packed->pages.insert(made_.begin(), made_.end());
  }

  const float* operator[](size_t matrix) const { return starts_[matrix]; }
  const Pair* in_pairs(size_t matrix) const { return reinterpret_cast<const Pair*>(starts_[matrix]); }

 private:
  static int64_t total(const std::vector<UnpackedMatrix>& matrices) {
    int64_t sum = 0;
    for (const UnpackedMatrix& matrix : matrices) sum += matrix.packed_words();
    return sum;
  }

  KeptPages pages_;
  std::vector<std::pair<PackedWeights::Key, std::shared_ptr<KeptPages>>> made_;
  std::vector<float*> starts_;
};

// Calls task(first, last) for blocks of at most kMostSamples samples, so small that every thread gets some.
template <class Task>
void for_blocks(int64_t num_samples, int num_threads, const Task& task) {
  const int64_t most = round_up(std::max<int64_t>(1, num_samples / (2 * num_threads)), kTileRows);
  const int64_t length = std::min(kMostSamples, most);
  parallel_for<Denormals::flushed>((num_samples + length - 1) / length, num_threads, [&](int64_t index, int) {
    task(index * length, std::min(num_samples, (index + 1) * length));
  });
}

// How many threads the products of all layers get.
inline int team_of(const std::vector<Layer>& layers, int64_t num_samples, int num_threads) {
  int64_t multiply_adds = 0;
  for (const Layer& layer : layers) multiply_adds += num_samples * layer.num_inputs * layer.num_outputs;
  return team(work_of_products(multiply_adds), num_threads);
}

// Ranges of the layers' outputs, the rows of their weights: those of the largest layer come first, so that threads
// finish together.
inline std::vector<Range> divide_outputs(const std::vector<Layer>& layers, int num_threads) {
  std::vector<size_t> order(layers.size());
  for (size_t k = 0; k < order.size(); ++k) order[k] = k;
  const auto size = [&](size_t k) { return layers[k].num_inputs * layers[k].num_outputs; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return size(a) > size(b); });
  std::vector<Range> tasks;
  for (size_t k : order) {
    const int64_t num_rows = layers[k].num_outputs;
    const int64_t rows_per_task = round_up(std::max<int64_t>(1, num_rows / num_threads), kTileRows);
    for (int64_t row = 0; row < num_rows; row += rows_per_task)
      tasks.push_back({k, row, std::min(num_rows, row + rows_per_task)});
  }
  return tasks;
}

// The longest range, rounded up to whole tiles.
inline int64_t longest(const std::vector<Range>& tasks) {
  int64_t most = 0;
  for (const Range& task : tasks) most = std::max(most, round_up(task.last - task.first, kTileRows));
  return most;
}

}  // namespace hotrow
