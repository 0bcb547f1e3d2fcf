// The dense ops of a whole batch: dot interaction and the layers of an MLP, divided into tasks for the leaf kernels
// (kernels.h) on `num_threads` threads. All matrices are row-major. No result depends on the number of threads.
#pragma once

#include <hotrow/dropout.h>
#include <hotrow/kernels.h>
#include <hotrow/memory.h>
#include <hotrow/pairs.h>

#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace hotrow {

// stride: floats of a row of out, or of grad, with pooled or without it. grad_first: or null.
void interact(const float* dense, const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim,
              float* out, int64_t stride, int num_threads);
void interact_backward(const float* grad, int64_t stride, const float* grad_first, const float* dense,
                       const float* pooled, int64_t num_samples, int64_t num_features, int64_t dim, float* grad_dense,
                       float* grad_pooled, int num_threads);

// Copies rows of several members from `together`, [B, F, M, D], to `apart`, [M, B, F, D], or back, and multiplies them
// by what each member's drop, if there are any, keeps of a sample's rows, [B, F].
struct MemberRows {
  int64_t members, samples, features, dim;
};
void move_member_rows(const MemberRows& shape, const std::vector<Drop>& drops, float* apart, float* together,
                      bool to_apart, int num_threads);

// One layer of an MLP: I inputs, O outputs.
struct Layer {
  const float* weight;  // W [O, I]
  int64_t num_inputs, num_outputs;
};

// Weights as the products take them, by address, shape, direction and arithmetic. Calls that are given one pack each
// weight once; meanwhile no weight may change, move or be freed. For one call at a time until it has all weights.
struct PackedWeights {
  PackedWeights() = default;
  PackedWeights(const PackedWeights&) = delete;
  using Key = std::tuple<const float*, int64_t, int64_t, int64_t, bool>;
  using Pages = std::map<Key, std::shared_ptr<KeptPages>>;
  Pages pages;
};

// y = x W^T + bias, then y < 0 ? 0 : y, layer by layer; after the last only if `last_relu`. Then drops[k], if
// there is one, drops of what layer k passes on, or returns.
//   x [B, I of the first], biases[k] [O] -> outputs[k] [B, O of layer k]. packed: or null. Throws std::bad_alloc.
void mlp(const std::vector<Layer>& layers, const std::vector<const float*>& biases, bool last_relu, const float* x,
         int64_t num_samples, const std::vector<float*>& outputs, const std::vector<Drop>& drops, int num_threads,
         PackedWeights* packed = nullptr);

// The gradients to compute for one layer, with g = dL/dy [B, O] before its ReLU:
struct LayerGradients {
  float* weight;  // g^T x [O, I]
  float* bias;    // sum over b of g [O]
  float* x;  // g W [B, I], and 0 where x <= 0 if a layer made x: g of that layer; null for the first layer: not wanted
};

// inputs[k]: the inputs of layer k: x, or the outputs of the layer before. g: for the last layer, without its ReLU (the
// caller's g has gone through it). scale: of what was dropped between layers, or 1. packed: or null. Throws
// std::bad_alloc.
void mlp_backward(const std::vector<Layer>& layers, const std::vector<const float*>& inputs, const float* g,
                  int64_t num_samples, const std::vector<LayerGradients>& gradients, float scale, int num_threads,
                  PackedWeights* packed = nullptr);

// The same in bfloat16, where pair_kernels() are not null. Weights, x, g and what a layer passes on, forward as y after
// its ReLU and backward as the gradient of x, are rounded by bf16; sums, biases and all results are float32.
//   inputs[k]: [B rounded up to kTileRows, pairs(I)], the inputs of layer k: written forward, read backward. out [B, O
//   of the last]. Of gradients' x only the first layer's is written, as float32; all others are null.
void mlp_bf16(const std::vector<Layer>& layers, const std::vector<const float*>& biases, bool last_relu, const float* x,
              int64_t num_samples, const std::vector<Pair*>& inputs, float* out, int num_threads,
              PackedWeights* packed = nullptr);
void mlp_bf16_backward(const std::vector<Layer>& layers, const std::vector<const Pair*>& inputs, const float* g,
                       int64_t num_samples, const std::vector<LayerGradients>& gradients, int num_threads,
                       PackedWeights* packed = nullptr);

}  // namespace hotrow
