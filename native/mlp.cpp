// The layers of an MLP over a whole batch, divided into tasks for the leaf kernels; see hotrow/dense.h. Compiled once,
// for the baseline.
//
// A block of samples goes through all layers before the next block does: what a layer wrote is still in a near cache
// when the next layer reads it, and threads wait for each other once and not after every layer.
#include <hotrow/layers.h>

#include <cstring>

namespace hotrow {
namespace {

// Samples in a sum that one task makes, whatever the number of threads.
constexpr int64_t kSamplesPerSum = 128;

// The stretch from k on of `product`, which has the whole depth: what is done to C's values waits for the last stretch.
Product stretch(Product product, int64_t k) {
  const int64_t depth = std::min(kMostDepth, product.depth - k);
  product.add = k > 0;
  if (k > 0) {
    product.start = nullptr;
    product.first = 0;
  }
  if (k + depth < product.depth) {
    product.bias = product.gate = nullptr;
    product.relu = false;
  }
  product.b +=
      product.transposed ? k : k * (product.b_stride ? product.b_stride : round_up(product.columns, kPanelColumns));
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

// Up to so many samples, weights that nobody keeps packed are taken as they lie: forward by multiply's `transposed`,
// backward as rows. To rearrange them takes as long as to multiply some 20 samples.
constexpr int64_t kFewForward = kTileRows, kFewBackward = 256;

// ---- forward

// Fewer rows or columns than these cost less than to look for those that are the same.
constexpr int64_t kFewRows = 32, kFewColumns = 16;

// How many columns at the beginning of x have the same bits in all rows, as those of one user do among candidates.
int64_t num_shared(const float* x, int64_t num_rows, int64_t num_columns) {
  int64_t shared = num_rows < kFewRows ? 0 : std::min(num_columns, kMostDepth);
  for (int64_t b = 1; b < num_rows && shared >= kFewColumns; ++b) {
    const float* row = x + b * num_columns;
    if (std::memcmp(row, x, static_cast<size_t>(shared) * sizeof(float)) == 0) continue;
    for (shared = 0; std::memcmp(row + shared, x + shared, sizeof(float)) == 0;) ++shared;
  }
  return shared < kFewColumns ? 0 : shared;
}

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
void output_backward(const Layer& layer, int64_t num_samples, const float* x, const float* g, float scale,
                     const LayerGradients& gradients, int num_threads) {
  const int64_t num_inputs = layer.num_inputs;
  const int64_t num_tasks = (num_samples + kSamplesPerSum - 1) / kSamplesPerSum;
  const int64_t stride = round_up(num_inputs, kFloatsPerLine);
  const KeptPages sums = floats(num_tasks * stride);
  parallel_for<Denormals::flushed>(num_tasks, num_threads, [&](int64_t task, int) {
    const int64_t first = task * kSamplesPerSum, last = std::min(num_samples, first + kSamplesPerSum);
    float* own = sums.floats() + task * stride;
    std::fill(own, own + num_inputs, 0.0f);
    kernels().output_backward(x, layer.weight, g, num_inputs, scale, first, last, own, gradients.x);
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
struct LayerBackward {
  Layer layer;
  const float* x;
  const float* g;
  float scale;  // 0 for the first layer, whose x no ReLU has made
  LayerGradients gradients;
};

// The gradients of the inputs of consecutive layers, the last layer first.
void inputs_backward(const std::vector<LayerBackward>& backwards, int64_t num_samples, int num_threads,
                     PackedWeights* packed) {
  const bool few = !packed && num_samples <= kFewBackward;
  std::vector<UnpackedMatrix> weights;
  for (const LayerBackward& p : backwards) {
    if (p.gradients.x)
      weights.push_back({p.layer.weight, few ? 0 : p.layer.num_outputs, p.layer.num_inputs, p.layer.num_inputs, 1});
  }
  const Panels panels(weights, num_threads, packed);
  for_blocks(num_samples, num_threads, [&](int64_t first, int64_t last) {
    for (size_t k = 0; k < weights.size(); ++k) {
      const auto& [layer, x, g, scale, gradients] = backwards[k];
      Product product{g,
                      layer.num_outputs,
                      panels[k],
                      0,
                      layer.num_outputs,
                      layer.num_inputs,
                      gradients.x,
                      false,
                      nullptr,
                      false,
                      scale == 0.0f ? nullptr : x};
      product.scale = scale;
      if (few) product.b = layer.weight, product.b_stride = layer.num_inputs;
      multiply_rows(product, first, last);
    }
  });
}

// Rows [first, last) of a weight's gradient g^T x and of a bias': g^T is packed stretch by stretch into `tiles`.
void weight_backward(const LayerBackward& own, int64_t num_samples, int64_t first, int64_t last, float* tiles) {
  const auto& [layer, x, g, scale, gradients] = own;
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

void weights_backward(const std::vector<LayerBackward>& backwards, int64_t num_samples, int num_threads) {
  std::vector<Layer> layers;
  for (const LayerBackward& own : backwards) layers.push_back(own.layer);
  const std::vector<Range> tasks = divide_outputs(layers, num_threads);
  const int64_t most_rows = longest(tasks);
  const KeptPages tiles = floats(num_threads * most_rows * kMostDepth);
  parallel_for<Denormals::flushed>(static_cast<int64_t>(tasks.size()), num_threads, [&](int64_t index, int worker) {
    const auto [layer, first, last] = tasks[static_cast<size_t>(index)];
    weight_backward(backwards[layer], num_samples, first, last, tiles.floats() + worker * most_rows * kMostDepth);
  });
}

}  // namespace

void mlp(const std::vector<Layer>& layers, const std::vector<const float*>& biases, bool last_relu, const float* x,
         int64_t num_samples, const std::vector<float*>& outputs, const std::vector<Drop>& drops, int num_threads,
         PackedWeights* packed) {
  const DenormalMode mode(Denormals::flushed);
  num_threads = team_of(layers, num_samples, num_threads);
  const bool few = !packed && num_samples <= kFewForward;
  std::vector<UnpackedMatrix> weights;  // empty for a layer of one output, which needs none
  for (const Layer& layer : layers)
    weights.push_back(
        {layer.weight, few || layer.num_outputs == 1 ? 0 : layer.num_inputs, layer.num_outputs, 1, layer.num_inputs});
  const Panels panels(weights, num_threads, packed);
  const Layer& bottom = layers[0];
  const int64_t shared = few || bottom.num_outputs == 1 ? 0 : num_shared(x, num_samples, bottom.num_inputs);
  const KeptPages start = floats(shared ? round_up(bottom.num_outputs, kPanelColumns) : 0);
  if (shared) {  // their sums are formed once, and those of every row go on from there
    std::fill(start.floats() + bottom.num_outputs, start.floats() + round_up(bottom.num_outputs, kPanelColumns), 0.0f);
    Product sums{x,     bottom.num_inputs, panels[0], 0,      bottom.num_inputs, bottom.num_outputs, start.floats(),
                 false, nullptr,           false,     nullptr};
    sums.depth = std::min(kMostDepth, sums.depth);
    sums.last = shared;
    kernels().multiply(sums, 0, 1);
  }
  for_blocks(num_samples, num_threads, [&](int64_t first, int64_t last) {
    const float* in = x;
    for (size_t k = 0; k < layers.size(); in = outputs[k++]) {
      const Layer& layer = layers[k];
      const bool relu = last_relu || k + 1 < layers.size();
      if (layer.num_outputs == 1) {
        output(layer, in, *biases[k], relu, outputs[k], first, last);
      } else {
        Product product{in,    layer.num_inputs, panels[k], 0,      layer.num_inputs, layer.num_outputs, outputs[k],
                        false, biases[k],        relu,      nullptr};
        if (few) product.b = layer.weight, product.b_stride = layer.num_inputs, product.transposed = true;
        if (k == 0 && shared) {
          product.start = start.floats();
          product.first = shared;
        }
        multiply_rows(product, first, last);
      }
      if (k < drops.size()) drop(drops[k], layer.num_outputs, first, last, outputs[k]);
    }
  });
}

void mlp_backward(const std::vector<Layer>& layers, const std::vector<const float*>& inputs, const float* g,
                  int64_t num_samples, const std::vector<LayerGradients>& gradients, float scale, int num_threads,
                  PackedWeights* packed) {
  const DenormalMode mode(Denormals::flushed);
  num_threads = team_of(layers, num_samples, num_threads);
  std::vector<LayerBackward> chain, all;
  const auto pass_chain = [&] {
    inputs_backward(chain, num_samples, num_threads, packed);
    chain.clear();
  };
  for (size_t k = layers.size(); k-- > 0; g = gradients[k].x) {
    if (layers[k].num_outputs == 1) {
      pass_chain();
      output_backward(layers[k], num_samples, inputs[k], g, k > 0 ? scale : 0.0f, gradients[k], num_threads);
      continue;
    }
    chain.push_back({layers[k], inputs[k], g, k > 0 ? scale : 0.0f, gradients[k]});
    all.push_back(chain.back());
  }
  pass_chain();
  weights_backward(all, num_samples, num_threads);
}

}  // namespace hotrow
