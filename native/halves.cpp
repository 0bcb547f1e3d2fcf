// See hotrow/halves.h. Compiled once, for the baseline: caches bind these passes.
#include <hotrow/halves.h>
#include <hotrow/parallel.h>

#include <algorithm>
#include <atomic>
#include <bit>

namespace hotrow {
namespace {

constexpr int64_t kFloatsPerTask = 1 << 15;
constexpr uint32_t kUpper = 0xffff0000u;

// Calls task(first, last) for stretches of [0, n).
template <class Task>
void for_stretches(int64_t n, int num_threads, const Task& task) {
  num_threads = team(n * static_cast<int64_t>(sizeof(float)), num_threads);
  parallel_for((n + kFloatsPerTask - 1) / kFloatsPerTask, num_threads,
               [&](int64_t index, int) { task(index * kFloatsPerTask, std::min(n, (index + 1) * kFloatsPerTask)); });
}

inline void split(float w, float* __restrict weight, uint16_t* __restrict low) {
  const auto bits = std::bit_cast<uint32_t>(w);
  *low = static_cast<uint16_t>(bits);
  *weight = std::bit_cast<float>(bits & kUpper);
}

}  // namespace

bool are_upper_halves(const float* weights, int64_t n, int num_threads) {
  std::atomic<uint32_t> found{0};
  for_stretches(n, num_threads, [&](int64_t first, int64_t last) {
    uint32_t bits = 0;
    for (int64_t i = first; i < last; ++i) bits |= std::bit_cast<uint32_t>(weights[i]);
    found |= bits & ~kUpper;
  });
  return found == 0;
}

void split_halves(float* weights, uint16_t* low, int64_t n, int num_threads) {
  for_stretches(n, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) split(weights[i], weights + i, low + i);
  });
}

void split_sgd(float* weights, uint16_t* low, const float* grad, int64_t n, float rate, float decay, int num_threads) {
  for_stretches(n, num_threads, [&](int64_t first, int64_t last) {
    const auto move = [&](auto gradient) {
      for (int64_t i = first; i < last; ++i) {
        const float w = std::bit_cast<float>(std::bit_cast<uint32_t>(weights[i]) | low[i]);
        split(w - rate * gradient(i, w), weights + i, low + i);
      }
    };
    if (decay == 0.0f) {
      move([&](int64_t i, float) { return grad[i]; });
    } else {
      move([&](int64_t i, float w) { return grad[i] + decay * w; });
    }
  });
}

void flush_denormals(float* weights, int64_t n, int num_threads) {
  constexpr uint32_t kExponent = 0x7f800000u, kSign = 0x80000000u;
  for_stretches(n, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto bits = std::bit_cast<uint32_t>(weights[i]);
      weights[i] = std::bit_cast<float>(bits & kExponent ? bits : bits & kSign);
    }
  });
}

}  // namespace hotrow
