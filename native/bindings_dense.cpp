// The dense ops as Python functions; see bindings_ops.cpp for the rules.
#include <hotrow/dense.h>
#include <nanobind/stl/optional.h>

#include <optional>

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

void bind_interact(ConstFloats dense, ConstFloats pooled, FloatMatrix out, int num_threads) {
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

Layer layer_of(const ConstFloats& x, const ConstFloats& weight) {
  require(x.ndim() == 2 && weight.ndim() == 2 && x.shape(1) == weight.shape(1), "x must be [B, I], weight [O, I]");
  return {weight.data(), extent(x, 0), extent(x, 1), extent(weight, 0)};
}

void bind_linear(ConstFloats x, ConstFloats weight, ConstFloats bias, bool relu, FloatMatrix out, int num_threads) {
  const Layer layer = layer_of(x, weight);
  require(size(bias) == layer.num_outputs, "bias must be [O]");
  require(extent(out, 0) == layer.num_samples && extent(out, 1) == layer.num_outputs, "out must be [B, O]");
  nb::gil_scoped_release release;
  linear(layer, x.data(), bias.data(), relu, out.data(), num_threads);
}

void bind_linear_backward(ConstFloats grad, ConstFloats x, ConstFloats weight, Floats grad_weight, Floats grad_bias,
                          std::optional<FloatMatrix> grad_x, bool gated, int num_threads) {
  const Layer layer = layer_of(x, weight);
  require(size(grad) == layer.num_samples * layer.num_outputs, "grad must be [B, O]");
  require(size(grad_weight) == size(weight) && size(grad_bias) == layer.num_outputs, "gradients differ from weights");
  require(!grad_x || size(*grad_x) == size(x), "grad_x must be [B, I]");
  nb::gil_scoped_release release;
  linear_backward(layer, x.data(), grad.data(), grad_weight.data(), grad_bias.data(), grad_x ? grad_x->data() : nullptr,
                  gated, num_threads);
}

}  // namespace

void bind_dense(nb::module_& m) {
  m.def("interact", bind_interact);
  m.def("interact_backward", bind_interact_backward);
  m.def("linear", bind_linear);
  m.def("linear_backward", bind_linear_backward, nb::arg("grad"), nb::arg("x"), nb::arg("weight"),
        nb::arg("grad_weight"), nb::arg("grad_bias"), nb::arg("grad_x").none(), nb::arg("gated"),
        nb::arg("num_threads"));
}
