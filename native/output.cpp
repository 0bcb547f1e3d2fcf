// A layer of one output, which would use only a sixteenth of a product's tile: this reads x once, as fast as memory
// allows. Contract in hotrow/kernels.h; compiled with contraction, like the products.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {
namespace {

constexpr int kTogether = 4;  // samples: so many sums do not wait for each other, and w is read once for all of them

template <int kSamples>
inline void dots(const float* x, const float* w, int64_t num_inputs, float* out) {
  Vec<kLanes> sum[kSamples] = {};
  int64_t j = 0;
  for (; j + kLanes <= num_inputs; j += kLanes) {
    const Vec<kLanes> weight = load<kLanes>(w + j);
#pragma GCC unroll 4
    for (int s = 0; s < kSamples; ++s) sum[s] += load<kLanes>(x + s * num_inputs + j) * weight;
  }
  for (int s = 0; s < kSamples; ++s) {
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[s][lane];
    for (int64_t k = j; k < num_inputs; ++k) total += x[s * num_inputs + k] * w[k];
    out[s] = total;
  }
}

template <class Value>
inline Value gated_by(Value x, Value grad, float scale) {
  return x <= 0.0f ? Value{} : grad * scale;
}

// For each column of kSamples rows: adds to the weight's gradient, and computes x's if it is wanted.
template <int kSamples>
inline void grads(const float* x, const float* w, const float* g, int64_t num_inputs, float scale, float* grad_weight,
                  float* grad_x) {
  const auto column = [&]<class Value>(int64_t j, const auto& read, const auto& write, Value sum) {
    const Value weight = read(w + j);
#pragma GCC unroll 4
    for (int s = 0; s < kSamples; ++s) {
      const Value here = read(x + s * num_inputs + j);
      sum += g[s] * here;
      if (!grad_x) continue;
      const Value grad = g[s] * weight;
      write(grad_x + s * num_inputs + j, scale == 0.0f ? grad : gated_by(here, grad, scale));
    }
    write(grad_weight + j, sum);
  };
  int64_t j = 0;
  for (; j + kLanes <= num_inputs; j += kLanes) column(j, load<kLanes>, store<kLanes>, load<kLanes>(grad_weight + j));
  const auto read = [](const float* p) { return *p; };
  const auto write = [](float* p, float value) { *p = value; };
  for (; j < num_inputs; ++j) column(j, read, write, grad_weight[j]);
}

}  // namespace

void output(const float* x, const float* w, int64_t num_inputs, int64_t first, int64_t last, float* out) {
  int64_t b = first;
  for (; b + kTogether <= last; b += kTogether) dots<kTogether>(x + b * num_inputs, w, num_inputs, out + b);
  for (; b < last; ++b) dots<1>(x + b * num_inputs, w, num_inputs, out + b);
}

void output_backward(const float* x, const float* w, const float* g, int64_t num_inputs, float scale, int64_t first,
                     int64_t last, float* grad_weight, float* grad_x) {
  const auto from = [&](int64_t b) { return grad_x ? grad_x + b * num_inputs : nullptr; };
  int64_t b = first;
  for (; b + kTogether <= last; b += kTogether)
    grads<kTogether>(x + b * num_inputs, w, g + b, num_inputs, scale, grad_weight, from(b));
  for (; b < last; ++b) grads<1>(x + b * num_inputs, w, g + b, num_inputs, scale, grad_weight, from(b));
}

}  // namespace hotrow::HOTROW_ISA
