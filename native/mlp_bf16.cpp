// The layers of an MLP over a whole batch in bfloat16, divided into tasks for the leaf kernels of hotrow/pairs.h; see
// hotrow/dense.h. Compiled once, for the baseline.
//
// Blocks of samples and rows of weights are divided as in mlp.cpp. What a layer passes to the next, and a gradient to
// the layer before, is bfloat16 in pairs along its columns: as it lies in memory it is the left side of the next
// product.
#include <hotrow/layers.h>

namespace hotrow {
namespace {

// Room for [num_samples, columns] bfloat16, in whole tiles of rows.
int64_t matrix_pairs(int64_t num_samples, int64_t columns) { return round_up(num_samples, kTileRows) * pairs(columns); }

// The gradients of the outputs of each layer, bfloat16.
class OutputGradients {
 public:
  OutputGradients(const std::vector<Layer>& layers, int64_t num_samples) : pages_(floats(total(layers, num_samples))) {
    auto* end = reinterpret_cast<Pair*>(pages_.bytes());
    for (const Layer& layer : layers) {
      starts_.push_back(end);
      end += matrix_pairs(num_samples, layer.num_outputs);
    }
  }

  Pair* operator[](size_t layer) const { return starts_[layer]; }

 private:
  static int64_t total(const std::vector<Layer>& layers, int64_t num_samples) {
    int64_t sum = 0;
    for (const Layer& layer : layers) sum += matrix_pairs(num_samples, layer.num_outputs);
    return sum;
  }

  KeptPages pages_;
  std::vector<Pair*> starts_;
};

// One thread's memory for the products of weight_backward: tiles of `most_rows` rows, and a panel.
class Scratch {
 public:
  Scratch(int64_t most_rows, int num_threads)
      : tiles_(round_up(most_rows, kTilesTogether * kTileRows) * kMostPairs),
        pages_(floats(num_threads * (tiles_ + kPanelColumns * kMostPairs))) {}

  Pair* tiles(int worker) const {
    return reinterpret_cast<Pair*>(pages_.bytes()) + worker * (tiles_ + kPanelColumns * kMostPairs);
  }
  Pair* panel(int worker) const { return tiles(worker) + tiles_; }

 private:
  int64_t tiles_;
  KeptPages pages_;
};

// Rows [first, last) of a weight's gradient g^T x and of a bias', 2 kMostPairs samples after another.
void weight_backward(const Layer& layer, const Pair* x, const Pair* g, int64_t num_samples, int64_t first, int64_t last,
                     const LayerGradients& gradients, Pair* tiles, Pair* panel) {
  const PairKernels& set = *pair_kernels();
  const int64_t num_inputs = layer.num_inputs, stride = pairs(layer.num_outputs);
  std::fill(gradients.bias + first, gradients.bias + last, 0.0f);
  for (int64_t b = 0; b == 0 || b < num_samples; b += 2 * kMostPairs) {
    const int64_t depth = std::min(2 * kMostPairs, num_samples - b);
    set.pack_pair_tiles(g + b * stride + first / 2, stride, depth, last - first, tiles, gradients.bias + first);
    for (int64_t column = 0; column < num_inputs; column += kPanelColumns) {
      const int64_t columns = std::min(kPanelColumns, num_inputs - column);
      set.pack_pair_rows(x + b * pairs(num_inputs) + column / 2, pairs(num_inputs), depth, columns, panel);
      set.multiply_pairs({.a = tiles,
                          .b = panel,
                          .depth = pairs(depth),
                          .columns = columns,
                          .c = gradients.weight + column,
                          .c_stride = num_inputs,
                          .add = b > 0},
                         first, last);
    }
  }
}

}  // namespace

void mlp_bf16(const std::vector<Layer>& layers, const std::vector<const float*>& biases, bool last_relu, const float* x,
              int64_t num_samples, const std::vector<Pair*>& inputs, float* out, int num_threads,
              PackedWeights* packed) {
  num_threads = team_of(layers, num_samples, num_threads);
  std::vector<UnpackedMatrix> weights;
  for (const Layer& layer : layers)
    weights.push_back({layer.weight, layer.num_inputs, layer.num_outputs, 1, layer.num_inputs, true});
  const Panels panels(weights, num_threads, packed);
  const PairKernels& set = *pair_kernels();
  for_blocks(num_samples, num_threads, [&](int64_t first, int64_t last) {
    set.round_pairs(x, layers[0].num_inputs, first, last, inputs[0]);
    for (size_t k = 0; k < layers.size(); ++k) {
      const auto& [weight, num_inputs, num_outputs] = layers[k];
      const bool is_last = k + 1 == layers.size();
      set.multiply_pairs({.a = inputs[k],
                          .a_stride = pairs(num_inputs),
                          .b = panels.in_pairs(k),
                          .depth = pairs(num_inputs),
                          .columns = num_outputs,
                          .c = out,
                          .c_stride = num_outputs,
                          .rounded = is_last ? nullptr : inputs[k + 1],
                          .bias = biases[k],
                          .relu = last_relu || !is_last},
                         first, last);
    }
  });
}

void mlp_bf16_backward(const std::vector<Layer>& layers, const std::vector<const Pair*>& inputs, const float* g,
                       int64_t num_samples, const std::vector<LayerGradients>& gradients, int num_threads,
                       PackedWeights* packed) {
  num_threads = team_of(layers, num_samples, num_threads);
  const OutputGradients grads(layers, num_samples);
  float* grad_x = gradients[0].x;
  std::vector<UnpackedMatrix> weights;  // empty for the first layer if the gradient of x is not wanted
  for (size_t k = 0; k < layers.size(); ++k) {
    const auto& [weight, num_inputs, num_outputs] = layers[k];
    weights.push_back({weight, num_outputs, k == 0 && !grad_x ? 0 : num_inputs, num_inputs, 1, true});
  }
  const Panels panels(weights, num_threads, packed);
  const PairKernels& set = *pair_kernels();
  for_blocks(num_samples, num_threads, [&](int64_t first, int64_t last) {
    set.round_pairs(g, layers.back().num_outputs, first, last, grads[layers.size() - 1]);
    for (size_t k = layers.size(); k-- > (grad_x ? 0 : 1);) {
      const auto& [weight, num_inputs, num_outputs] = layers[k];
      set.multiply_pairs({.a = grads[k],
                          .a_stride = pairs(num_outputs),
                          .b = panels.in_pairs(k),
                          .depth = pairs(num_outputs),
                          .columns = num_inputs,
                          .c = grad_x,
                          .c_stride = num_inputs,
                          .rounded = k > 0 ? grads[k - 1] : nullptr,
                          .gate = k > 0 ? inputs[k] : nullptr},
                         first, last);
    }
  });
  const std::vector<Range> tasks = divide_outputs(layers, num_threads);
  const Scratch scratch(longest(tasks), num_threads);
  parallel_for<Denormals::flushed>(static_cast<int64_t>(tasks.size()), num_threads, [&](int64_t index, int worker) {
    const auto [k, first, last] = tasks[static_cast<size_t>(index)];
    weight_backward(layers[k], inputs[k], grads[k], num_samples, first, last, gradients[k], scratch.tiles(worker),
                    scratch.panel(worker));
  });
}

}  // namespace hotrow
