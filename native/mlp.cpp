// The layers of an MLP over a whole batch, divided into tasks for the leaf kernels; see hotrow/dense.h. Compiled once,
// for the baseline.
//
// A block of samples goes through all layers before the next block does: what a layer wrote is still in a near cache
// when the next layer reads it, and threads wait for each other once and not after every layer.
#include <hotrow/dense.h>
#include <hotrow/memory.h>
#include <hotrow/parallel.h>

#include <algorithm>

namespace hotrow {
namespace {

// Samples per task: many, because panels come from a far cache once per task; not more, because what a layer wrote must
// stay in a near one.
constexpr int64_t kMostSamples = 512;
// Samples in a sum that one task makes, whatever the number of threads.
constexpr int64_t kSamplesPerSum = 128;

KeptPages floats(int64_t count) { return KeptPages(static_cast<size_t>(count) * sizeof(float)); }

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A matrix B(k, n) = at[k * depth_stride + n * column_stride], not yet packed.
struct View {
  const float* at;
  int64_t depth, columns;
  int64_t depth_stride, column_stride;

  int64_t packed_columns() const { return round_up(columns, kPanelColumns); }
  int64_t packed_floats() const { return packed_columns() * depth; }
  int64_t panels_per_stretch() const { return packed_columns() / kPanelColumns; }
  int64_t num_panels() const { return (depth + kMostDepth - 1) / kMostDepth * panels_per_stretch(); }
};

// Panel `index` of B: stretches of kMostDepth of its depth, one after another, each as pack_panels lays it out.
void pack(const View& b, int64_t index, float* panels) {
  const int64_t k = index / b.panels_per_stretch() * kMostDepth, n = index % b.panels_per_stretch() * kPanelColumns;
  const int64_t depth = std::min(kMostDepth, b.depth - k), columns = std::min(kPanelColumns, b.columns - n);
  kernels().pack_panels(b.at + k * b.depth_stride + n * b.column_stride, b.depth_stride, b.column_stride, depth,
                        columns, panels + k * b.packed_columns() + n * depth);
}

// The panels of several matrices; those that `packed` has are taken from there, and the others are left there.
class Panels {
 public:
  Panels(const std::vector<View>& matrices, int num_threads, PackedWeights* packed)
      : pages_(floats(packed ? 0 : total(matrices))) {
    std::vector<std::pair<size_t, int64_t>> tasks;
    float* end = pages_.floats();
    for (const View& matrix : matrices) {
      const auto [start, is_new] = packed ? place_in(*packed, matrix) : std::pair{end, true};
      for (int64_t panel = 0; is_new && panel < matrix.num_panels(); ++panel) tasks.emplace_back(starts_.size(), panel);
      starts_.push_back(start);
      end += packed ? 0 : matrix.packed_floats();
    }
    parallel_for(static_cast<int64_t>(tasks.size()), num_threads, [&](int64_t task, int) {
      const auto [matrix, panel] = tasks[static_cast<size_t>(task)];
      pack(matrices[matrix], panel, starts_[matrix]);
    });
  }

  const float* operator[](size_t matrix) const { return starts_[matrix]; }

 private:
  static int64_t total(const std::vector<View>& matrices) {
    int64_t sum = 0;
    for (const View& matrix : matrices) sum += matrix.packed_floats();
    return sum;
  }

  // Where a matrix's panels are, and whether they are yet to be made.
  static std::pair<float*, bool> place_in(PackedWeights& packed, const View& matrix) {
    std::unique_ptr<KeptPages>& pages = packed.pages[{matrix.at, matrix.depth, matrix.columns, matrix.depth_stride}];
    const bool is_new = !pages;
    if (is_new) pages = std::make_unique<KeptPages>(static_cast<size_t>(matrix.packed_floats()) * sizeof(float));
    return {pages->floats(), is_new};
  }

  KeptPages pages_;
  std::vector<float*> starts_;
};

// The stretch from k on of `product`, which has the whole depth: what is done to C's values waits for the last stretch.
Product stretch(Product product, int64_t k) {
  const int64_t depth = std::min(kMostDepth, product.depth - k);
  product.add = k > 0;
  if (k + depth < product.depth) {
    product.bias = product.gate = nullptr;
    product.relu = false;
  }
  product.b += k * (product.b_stride ? product.b_stride : round_up(product.columns, kPanelColumns));
  product.depth = depth;
  return product;
}

// Rows [first, last) of C = A B for a row-major A.
void multiply_rows(const Product& product, int64_t first, int64_t last) {
  for (int64_t k = 0; k == 0 || k < product.depth; k += kMostDepth) {
    Product part = stretch(product, k);
    part.a += k;
    kernels().multiply(part, first, last);
  }
}

// Calls task(first, last) for blocks of at most kMostSamples samples, so small that every thread gets some.
template <class Task>
void for_blocks(int64_t num_samples, int num_threads, const Task& task) {
  const int64_t most = round_up(std::max<int64_t>(1, num_samples / (2 * num_threads)), kTileRows);
  const int64_t length = std::min(kMostSamples, most);
  parallel_for((num_samples + length - 1) / length, num_threads,
               [&](int64_t index, int) { task(index * length, std::min(num_samples, (index + 1) * length)); });
}

// ---- forward

// Samples [first, last) of a layer of one output.
void output(const Layer& layer, const float* x, float bias, bool relu, float* y, int64_t first, int64_t last) {
  kernels().output(x, layer.weight, layer.num_inputs, first, last, y);
  for (int64_t b = first; b < last; ++b) {
    y[b] += bias;
    if (relu && y[b] < 0.0f) y[b] = 0.0f;
  }
}

// ---- backward

// A layer of one output. Each task sums the weight's gradient over its own samples, whatever the number of threads; the
// sums are added in the order of the samples.
void output_backward(const Layer& layer, int64_t num_samples, const float* x, const float* g, bool gated,
                     const LayerGradients& gradients, int num_threads) {
  const int64_t num_inputs = layer.num_inputs;
  const int64_t num_tasks = (num_samples + kSamplesPerSum - 1) / kSamplesPerSum;
  const int64_t stride = round_up(num_inputs, kFloatsPerLine);
  const KeptPages sums = floats(num_tasks * stride);
  parallel_for(num_tasks, num_threads, [&](int64_t task, int) {
    const int64_t first = task * kSamplesPerSum, last = std::min(num_samples, first + kSamplesPerSum);
    float* own = sums.floats() + task * stride;
    std::fill(own, own + num_inputs, 0.0f);
    kernels().output_backward(x, layer.weight, g, num_inputs, gated, first, last, own, gradients.x);
  });
  std::fill(gradients.weight, gradients.weight + num_inputs, 0.0f);
  for (int64_t task = 0; task < num_tasks; ++task) {
    const float* own = sums.floats() + task * stride;
    for (int64_t j = 0; j < num_inputs; ++j) gradients.weight[j] += own[j];
  }
  *gradients.bias = 0.0f;
  for (int64_t b = 0; b < num_samples; ++b) *gradients.bias += g[b];
}

// One layer in a backward pass: x is its input, g the gradient of its output.
struct Passage {
  Layer layer;
  const float* x;
  const float* g;
  bool gated;
  LayerGradients gradients;
};

// The gradients of the inputs of consecutive layers, the last layer first.
void inputs_backward(const std::vector<Passage>& passages, int64_t num_samples, int num_threads,
                     PackedWeights* packed) {
  std::vector<View> weights;
  for (const Passage& p : passages) {
    if (p.gradients.x)
      weights.push_back({p.layer.weight, p.layer.num_outputs, p.layer.num_inputs, p.layer.num_inputs, 1});
  }
  const Panels panels(weights, num_threads, packed);
  for_blocks(num_samples, num_threads, [&](int64_t first, int64_t last) {
    for (size_t k = 0; k < weights.size(); ++k) {
      const auto& [layer, x, g, gated, gradients] = passages[k];
      const Product product{
          g,     layer.num_outputs,  panels[k], 0, layer.num_outputs, layer.num_inputs, gradients.x, false, nullptr,
          false, gated ? x : nullptr};
      multiply_rows(product, first, last);
    }
  });
}

// Rows [first, last) of a weight's gradient g^T x and of a bias': g^T is packed stretch by stretch into `tiles`.
void weight_backward(const Passage& passage, int64_t num_samples, int64_t first, int64_t last, float* tiles) {
  const auto& [layer, x, g, gated, gradients] = passage;
  const Product whole{nullptr, 0,       x,     layer.num_inputs, num_samples, layer.num_inputs, gradients.weight,
                      false,   nullptr, false, nullptr};
  std::fill(gradients.bias + first, gradients.bias + last, 0.0f);
  for (int64_t k = 0; k == 0 || k < num_samples; k += kMostDepth) {
    Product part = stretch(whole, k);
    kernels().pack_tiles(g + k * layer.num_outputs + first, layer.num_outputs, part.depth, last - first, tiles,
                         gradients.bias + first);
    part.a = tiles;
    part.a_stride = 0;
    kernels().multiply(part, first, last);
  }
}

// For all layers: tasks of the largest layer come first, so that threads finish together.
void weights_backward(std::vector<Passage> passages, int64_t num_samples, int num_threads) {
  const auto size = [](const Passage& p) { return p.layer.num_inputs * p.layer.num_outputs; };
  std::stable_sort(passages.begin(), passages.end(), [&](const auto& a, const auto& b) { return size(a) > size(b); });
  struct Task {
    const Passage* passage;
    int64_t first, last;
  };
  std::vector<Task> tasks;
  int64_t most_rows = 0;
  for (const Passage& passage : passages) {
    const int64_t num_rows = passage.layer.num_outputs;
    const int64_t rows_per_task = round_up(std::max<int64_t>(1, num_rows / num_threads), kTileRows);
    most_rows = std::max(most_rows, rows_per_task);
    for (int64_t row = 0; row < num_rows; row += rows_per_task)
      tasks.push_back({&passage, row, std::min(num_rows, row + rows_per_task)});
  }
  const KeptPages tiles = floats(num_threads * most_rows * kMostDepth);
  parallel_for(static_cast<int64_t>(tasks.size()), num_threads, [&](int64_t index, int worker) {
    const auto [passage, first, last] = tasks[static_cast<size_t>(index)];
    weight_backward(*passage, num_samples, first, last, tiles.floats() + worker * most_rows * kMostDepth);
  });
}

}  // namespace

void mlp(const std::vector<Layer>& layers, const std::vector<const float*>& biases, bool last_relu, const float* x,
         int64_t num_samples, const std::vector<float*>& outputs, int num_threads, PackedWeights* packed) {
  std::vector<View> weights;  // empty for a layer of one output, which needs none
  for (const Layer& layer : layers)
    weights.push_back(
        {layer.weight, layer.num_outputs == 1 ? 0 : layer.num_inputs, layer.num_outputs, 1, layer.num_inputs});
  const Panels panels(weights, num_threads, packed);
  for_blocks(num_samples, num_threads, [&](int64_t first, int64_t last) {
    const float* in = x;
    for (size_t k = 0; k < layers.size(); in = outputs[k++]) {
      const Layer& layer = layers[k];
      const bool relu = last_relu || k + 1 < layers.size();
      if (layer.num_outputs == 1) {
        output(layer, in, *biases[k], relu, outputs[k], first, last);
        continue;
      }
      multiply_rows({in, layer.num_inputs, panels[k], 0, layer.num_inputs, layer.num_outputs, outputs[k], false,
                     biases[k], relu, nullptr},
                    first, last);
    }
  });
}

void mlp_backward(const std::vector<Layer>& layers, const std::vector<const float*>& inputs, const float* g,
                  int64_t num_samples, const std::vector<LayerGradients>& gradients, int num_threads,
                  PackedWeights* packed) {
  std::vector<Passage> chain, all;
  const auto pass_chain = [&] {
    inputs_backward(chain, num_samples, num_threads, packed);
    chain.clear();
  };
  for (size_t k = layers.size(); k-- > 0; g = gradients[k].x) {
    if (layers[k].num_outputs == 1) {
      pass_chain();
      output_backward(layers[k], num_samples, inputs[k], g, k > 0, gradients[k], num_threads);
      continue;
    }
    chain.push_back({layers[k], inputs[k], g, k > 0, gradients[k]});
    all.push_back(chain.back());
  }
  pass_chain();
  weights_backward(all, num_samples, num_threads);
}

}  // namespace hotrow
