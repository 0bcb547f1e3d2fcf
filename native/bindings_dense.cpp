// The dense ops as Python functions; see bindings_ops.cpp for the rules.
#include <hotrow/dense.h>
#include <hotrow/finite.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings.h"

using namespace hotrow;

namespace {

struct InteractShape {
  int64_t samples, features, dim;
  bool has_width(int64_t width) const {
    const int64_t narrow = dim + features * (features + 1) / 2;
    return width == narrow || width == narrow + features * dim;
  }
};

InteractShape interact_shape(const ConstFloats& dense, const ConstFloats& pooled) {
  require(dense.ndim() == 2 && pooled.ndim() == 3, "dense must be [B, D] and pooled [B, F, D]");
  require(dense.shape(0) == pooled.shape(0) && dense.shape(1) == pooled.shape(2), "dense and pooled differ in B or D");
  return {extent(dense, 0), extent(pooled, 1), extent(dense, 1)};
}

void bind_interact(ConstFloats dense, ConstFloats pooled, Matrix<float> out, int num_threads) {
  const InteractShape shape = interact_shape(dense, pooled);
  require(extent(out, 0) == shape.samples && shape.has_width(extent(out, 1)),
          "out must be [B, D + (F + 1) F / 2], or F D wider");
  nb::gil_scoped_release release;
  interact(dense.data(), pooled.data(), shape.samples, shape.features, shape.dim, out.data(), extent(out, 1),
           num_threads);
}

void bind_interact_backward(Matrix<const float> grad, std::optional<Matrix<const float>> grad_first, ConstFloats dense,
                            ConstFloats pooled, Floats grad_dense, Floats grad_pooled, int num_threads) {
  const InteractShape shape = interact_shape(dense, pooled);
  require(extent(grad, 0) == shape.samples && shape.has_width(extent(grad, 1)), "grad must be as interact's out");
  require(!grad_first || size(*grad_first) == shape.samples * shape.features, "grad_first must be [B, F]");
  require(size(grad_dense) == size(dense) && size(grad_pooled) == size(pooled), "gradients differ from their inputs");
  nb::gil_scoped_release release;
  interact_backward(grad.data(), extent(grad, 1), grad_first ? grad_first->data() : nullptr, dense.data(),
                    pooled.data(), shape.samples, shape.features, shape.dim, grad_dense.data(), grad_pooled.data(),
                    num_threads);
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

// Several MLPs of the same widths, each on its own samples. kernels/ops.py sees to shapes and types: it takes less time
// to hand over addresses of float32 tensors, row-major, than arrays.
using Addresses = std::vector<uintptr_t>;

float* floats_at(uintptr_t address) { return reinterpret_cast<float*>(address); }

bool bind_all_finite(const Addresses& values, const std::vector<int64_t>& sizes, int num_threads) {
  require(values.size() == sizes.size(), "a size for each address");
  nb::gil_scoped_release release;
  for (size_t k = 0; k < sizes.size(); ++k)
    if (first_nonfinite(floats_at(values[k]), 1, sizes[k], sizes[k], num_threads) >= 0) return false;
  return true;
}

struct Members {
  int64_t count, samples, inputs;
  std::vector<int64_t> widths;  // of layers

  Members(const std::tuple<int64_t, int64_t, int64_t>& shape, std::vector<int64_t> layers, const Addresses& weights,
          size_t step)
      : widths(std::move(layers)) {
    std::tie(count, samples, inputs) = shape;
    require(!widths.empty() && weights.size() == step * widths.size() * static_cast<size_t>(count),
            "addresses for each layer of each member");
  }
  // Those of member m, whose weights are every `step`th address.
  std::vector<Layer> layers(int64_t m, const Addresses& weights, size_t step) const {
    std::vector<Layer> found;
    for (size_t k = 0; k < widths.size(); ++k)
      found.push_back({floats_at(weights[step * place(m, k)]), k ? widths[k - 1] : inputs, widths[k]});
    return found;
  }
  size_t place(int64_t m, size_t layer) const { return static_cast<size_t>(m) * widths.size() + layer; }
  // Where the outputs of a member's hidden layers are, or their gradients: one behind another.
  std::vector<float*> hidden(float* at) const {
    std::vector<float*> found;
    for (size_t k = 0; k + 1 < widths.size(); at += samples * widths[k++]) found.push_back(at);
    return found;
  }
  int64_t hidden_floats() const { return samples * std::accumulate(widths.begin(), widths.end() - 1, int64_t{0}); }
};

using Drops = std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint32_t, float>>;

std::vector<Drop> drops_of(const Drops& given, size_t first, size_t count) {
  std::vector<Drop> found;
  for (size_t k = first; k < first + count; ++k)
    found.push_back(std::apply([](auto... each) { return Drop{each...}; }, given[k]));
  return found;
}

// Of `apart`, [M, B, F, D], and `together`, [B, F, M, D], one is written.
void bind_move_member_rows(Floats apart, Floats together, bool to_apart, const Drops& drops, int num_threads) {
  require(apart.ndim() == 4 && size(apart) == size(together), "rows [M, B, F, D] and [B, F, M, D]");
  require(drops.empty() || drops.size() == apart.shape(0), "a drop for each member");
  const MemberRows rows{extent(apart, 0), extent(apart, 1), extent(apart, 2), extent(apart, 3)};
  const std::vector<Drop> own = drops_of(drops, 0, drops.size());
  nb::gil_scoped_release release;
  move_member_rows(rows, own, apart.data(), together.data(), to_apart, num_threads);
}

// parameters: weight and bias in turn. hidden: of all members, or 0 if nobody wants it.
void bind_mlp(const std::tuple<int64_t, int64_t, int64_t>& shape, const std::vector<int64_t>& widths,
              const Addresses& parameters, uintptr_t x, uintptr_t hidden, uintptr_t out, bool last_relu,
              const Drops& drops, int num_threads, std::optional<PackedWeights*> packed) {
  const Members all(shape, widths, parameters, 2);
  const size_t dropped = drops.size() / static_cast<size_t>(std::max<int64_t>(1, all.count));
  require(dropped <= widths.size(), "what layers drop, one member after another");
  nb::gil_scoped_release release;
  const KeptPages own(hidden ? 0 : static_cast<size_t>(all.hidden_floats()) * sizeof(float));
  for (int64_t m = 0; m < all.count; ++m) {
    std::vector<const float*> biases;
    for (size_t k = 0; k < widths.size(); ++k) biases.push_back(floats_at(parameters[2 * all.place(m, k) + 1]));
    std::vector<float*> outputs = all.hidden(hidden ? floats_at(hidden) + m * all.hidden_floats() : own.floats());
    outputs.push_back(floats_at(out) + m * all.samples * widths.back());
    mlp(all.layers(m, parameters, 2), biases, last_relu, floats_at(x) + m * all.samples * all.inputs, all.samples,
        outputs, drops_of(drops, static_cast<size_t>(m) * dropped, dropped), num_threads, packed.value_or(nullptr));
  }
}

// gradients: of weight and bias in turn. grad_x: 0 if it is not wanted.
void bind_mlp_backward(const std::tuple<int64_t, int64_t, int64_t>& shape, const std::vector<int64_t>& widths,
                       const Addresses& weights, uintptr_t x, uintptr_t hidden, uintptr_t grad,
                       const Addresses& gradients, uintptr_t grad_x, float scale, int num_threads,
                       std::optional<PackedWeights*> packed) {
  const Members all(shape, widths, weights, 1);
  require(gradients.size() == 2 * weights.size(), "gradients of each weight and bias");
  nb::gil_scoped_release release;
  const KeptPages own(static_cast<size_t>(all.hidden_floats()) * sizeof(float));
  for (int64_t m = 0; m < all.count; ++m) {
    const int64_t inputs = m * all.samples * all.inputs;
    const std::vector<float*> made = all.hidden(floats_at(hidden) + m * all.hidden_floats());
    std::vector<const float*> in{floats_at(x) + inputs};
    in.insert(in.end(), made.begin(), made.end());
    std::vector<float*> of_inputs = all.hidden(own.floats());
    of_inputs.insert(of_inputs.begin(), grad_x ? floats_at(grad_x) + inputs : nullptr);
    std::vector<LayerGradients> wanted;
    for (size_t k = 0; k < widths.size(); ++k) {
      const size_t at = 2 * all.place(m, k);
      wanted.push_back({floats_at(gradients[at]), floats_at(gradients[at + 1]), of_inputs[k]});
    }
    mlp_backward(all.layers(m, weights, 1), in, floats_at(grad) + m * all.samples * widths.back(), all.samples, wanted,
                 scale, num_threads, packed.value_or(nullptr));
  }
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
  m.def("bfloat16_products", [] { return pair_kernels() ? pair_kernels()->name : ""; });
  m.def("use_amx", use_amx, nb::arg("use"));
  m.def("tiles_refused", tiles_refused);
  define(m, "all_finite", bind_all_finite);
  define(m, "move_member_rows", bind_move_member_rows);
  define(m, "mlp", bind_mlp);
  define(m, "mlp_backward", bind_mlp_backward);
  define(m, "mlp_bf16", bind_mlp_bf16);
  define(m, "mlp_bf16_backward", bind_mlp_bf16_backward);
}
