// The dense ops as Python functions; see bindings_ops.cpp for the rules.
#include <hotrow/dense.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings.h"

using namespace hotrow;

namespace {

struct InteractShape {
  int64_t samples, features, dim;
  int64_t width() const { return dim + features * (features + 1) / 2; }
};

InteractShape interact_shape(const ConstFloats& dense, const ConstFloats& pooled) {
  require(dense.ndim() == 2 && pooled.ndim() == 3, "dense must be [B, D] and pooled [B, F, D]");
  require(dense.shape(0) == pooled.shape(0) && dense.shape(1) == pooled.shape(2), "dense and pooled differ in B or D");
  return {extent(dense, 0), extent(pooled, 1), extent(dense, 1)};
}

void bind_interact(ConstFloats dense, ConstFloats pooled, Matrix<float> out, int num_threads) {
  const InteractShape shape = interact_shape(dense, pooled);
  require(extent(out, 0) == shape.samples && extent(out, 1) == shape.width(), "out must be [B, D + (F + 1) F / 2]");
  nb::gil_scoped_release release;
  interact(dense.data(), pooled.data(), shape.samples, shape.features, shape.dim, out.data(), num_threads);
}

void bind_interact_backward(ConstFloats grad, ConstFloats dense, ConstFloats pooled, Floats grad_dense,
                            Floats grad_pooled, int num_threads) {
  const InteractShape shape = interact_shape(dense, pooled);
  require(size(grad) == shape.samples * shape.width(), "grad must be [B, D + (F + 1) F / 2]");
  require(size(grad_dense) == size(dense) && size(grad_pooled) == size(pooled), "gradients differ from their inputs");
  nb::gil_scoped_release release;
  interact_backward(grad.data(), dense.data(), pooled.data(), shape.samples, shape.features, shape.dim,
                    grad_dense.data(), grad_pooled.data(), num_threads);
}

using Matrices = std::vector<ConstFloats>;
// Pairs of bfloat16 (hotrow/pairs.h) as int32 [B rounded up to kTileRows, pairs of columns].
using PairMatrix = Matrix<int32_t>;

// Checks that each layer takes what the layer before it makes, the first `width` inputs.
std::vector<Layer> layers_of(int64_t width, const Matrices& weights) {
  require(!weights.empty(), "there must be layers");
  std::vector<Layer> layers;
  for (size_t k = 0; k < weights.size(); ++k) {
    require(weights[k].ndim() == 2 && extent(weights[k], 1) == width, "weights must be [O, I of the layer before]");
    layers.push_back({weights[k].data(), width, extent(weights[k], 0)});
    width = layers.back().num_outputs;
  }
  return layers;
}

std::vector<Layer> layers_of(const ConstFloats& x, const Matrices& weights) {
  require(x.ndim() == 2, "x must be [B, I]");
  return layers_of(extent(x, 1), weights);
}

std::vector<const float*> biases_of(const std::vector<Layer>& layers, const Matrices& biases) {
  require(biases.size() == layers.size(), "a bias for each layer");
  std::vector<const float*> found;
  for (size_t k = 0; k < layers.size(); ++k) {
    require(size(biases[k]) == layers[k].num_outputs, "biases must be [O]");
    found.push_back(biases[k].data());
  }
  return found;
}

void bind_mlp(ConstFloats x, Matrices weights, Matrices biases, bool last_relu, std::vector<Matrix<float>> outputs,
              int num_threads, std::optional<PackedWeights*> packed) {
  const std::vector<Layer> layers = layers_of(x, weights);
  const std::vector<const float*> bias = biases_of(layers, biases);
  require(outputs.size() == layers.size(), "an output for each layer");
  std::vector<float*> out;
  for (size_t k = 0; k < layers.size(); ++k) {
    require(extent(outputs[k], 0) == extent(x, 0) && extent(outputs[k], 1) == layers[k].num_outputs,
            "outputs must be [B, O]");
    out.push_back(outputs[k].data());
  }
  nb::gil_scoped_release release;
  mlp(layers, bias, last_relu, x.data(), extent(x, 0), out, num_threads, packed.value_or(nullptr));
}

// inputs[0] is x, the others outputs of `mlp`; the first of grad_inputs may be None.
void bind_mlp_backward(ConstFloats grad, Matrices inputs, Matrices weights, std::vector<Matrix<float>> grad_weights,
                       std::vector<Floats> grad_biases, std::vector<std::optional<Matrix<float>>> grad_inputs,
                       int num_threads, std::optional<PackedWeights*> packed) {
  require(inputs.size() == weights.size() && !inputs.empty(), "an input for each weight");
  const std::vector<Layer> layers = layers_of(inputs[0], weights);
  require(grad_weights.size() == layers.size() && grad_biases.size() == layers.size() &&
              grad_inputs.size() == layers.size(),
          "gradients for each layer");
  const int64_t num_samples = extent(inputs[0], 0);
  require(size(grad) == num_samples * layers.back().num_outputs, "grad must be [B, O]");
  std::vector<const float*> in;
  std::vector<LayerGradients> gradients;
  for (size_t k = 0; k < layers.size(); ++k) {
    require(size(inputs[k]) == num_samples * layers[k].num_inputs, "inputs must be [B, I]");
    require(size(grad_weights[k]) == size(weights[k]) && size(grad_biases[k]) == layers[k].num_outputs,
            "gradients differ from weights");
    require(grad_inputs[k] ? size(*grad_inputs[k]) == size(inputs[k]) : k == 0, "gradients differ from inputs");
    in.push_back(inputs[k].data());
    gradients.push_back(
        {grad_weights[k].data(), grad_biases[k].data(), grad_inputs[k] ? grad_inputs[k]->data() : nullptr});
  }
  nb::gil_scoped_release release;
  mlp_backward(layers, in, grad.data(), num_samples, gradients, num_threads, packed.value_or(nullptr));
}

std::vector<Pair*> pairs_of(const std::vector<Layer>& layers, int64_t num_samples,
                            const std::vector<PairMatrix>& inputs) {
  require(inputs.size() == layers.size(), "an input for each layer");
  const int64_t num_rows = (num_samples + kTileRows - 1) / kTileRows * kTileRows;
  std::vector<Pair*> found;
  for (size_t k = 0; k < layers.size(); ++k) {
    require(extent(inputs[k], 0) == num_rows && extent(inputs[k], 1) == pairs(layers[k].num_inputs),
            "inputs must be pairs [B rounded up to tiles, (I + 1) / 2]");
    found.push_back(reinterpret_cast<Pair*>(inputs[k].data()));
  }
  return found;
}

void bind_mlp_bf16(ConstFloats x, Matrices weights, Matrices biases, bool last_relu, std::vector<PairMatrix> inputs,
                   Matrix<float> out, int num_threads, std::optional<PackedWeights*> packed) {
  require(pair_kernels() != nullptr, "there are no products of bfloat16 here");
  const std::vector<Layer> layers = layers_of(x, weights);
  const std::vector<const float*> bias = biases_of(layers, biases);
  const std::vector<Pair*> in = pairs_of(layers, extent(x, 0), inputs);
  require(extent(out, 0) == extent(x, 0) && extent(out, 1) == layers.back().num_outputs, "out must be [B, O]");
  nb::gil_scoped_release release;
  mlp_bf16(layers, bias, last_relu, x.data(), extent(x, 0), in, out.data(), num_threads, packed.value_or(nullptr));
}

// inputs: what `mlp_bf16` wrote; grad_x may be None.
void bind_mlp_bf16_backward(ConstFloats grad, std::vector<PairMatrix> inputs, Matrices weights,
                            std::vector<Matrix<float>> grad_weights, std::vector<Floats> grad_biases,
                            std::optional<Matrix<float>> grad_x, int num_threads,
                            std::optional<PackedWeights*> packed) {
  require(pair_kernels() != nullptr, "there are no products of bfloat16 here");
  require(!weights.empty() && weights[0].ndim() == 2 && grad.ndim() == 2, "weights must be [O, I], and grad [B, O]");
  const std::vector<Layer> layers = layers_of(extent(weights[0], 1), weights);
  const int64_t num_samples = extent(grad, 0);
  require(extent(grad, 1) == layers.back().num_outputs, "grad must be [B, O]");
  const std::vector<Pair*> in = pairs_of(layers, num_samples, inputs);
  require(grad_weights.size() == layers.size() && grad_biases.size() == layers.size(), "gradients for each layer");
  require(!grad_x || (extent(*grad_x, 0) == num_samples && extent(*grad_x, 1) == layers[0].num_inputs),
          "grad_x must be [B, I]");
  std::vector<LayerGradients> gradients;
  for (size_t k = 0; k < layers.size(); ++k) {
    require(size(grad_weights[k]) == size(weights[k]) && size(grad_biases[k]) == layers[k].num_outputs,
            "gradients differ from weights");
    gradients.push_back({grad_weights[k].data(), grad_biases[k].data(), grad_x && k == 0 ? grad_x->data() : nullptr});
  }
  nb::gil_scoped_release release;
  mlp_bf16_backward(layers, {in.begin(), in.end()}, grad.data(), num_samples, gradients, num_threads,
                    packed.value_or(nullptr));
}

}  // namespace

void bind_dense(nb::module_& m) {
  define(m, "interact", bind_interact);
  define(m, "interact_backward", bind_interact_backward);
  nb::class_<PackedWeights>(m, "PackedWeights").def(nb::init<>());
  m.def("bfloat16_products", [] { return pair_kernels() != nullptr; });
  define(m, "mlp", bind_mlp);
  define(m, "mlp_backward", bind_mlp_backward);
  define(m, "mlp_bf16", bind_mlp_bf16);
  define(m, "mlp_bf16_backward", bind_mlp_bf16_backward);
}
