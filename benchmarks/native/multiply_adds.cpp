// How many float32 multiply-adds a core can do at all: as many independent chains as its registers hold, without memory
// accesses. The yardstick of the matrix products; shares no code with them, but their threads: others would share the
// cores with those, which spin for milliseconds after their last work. Compiled with contraction, like the products.
#include <chrono>

#define HOTROW_ISA yardstick
#include <hotrow/vec.h>

using namespace hotrow::yardstick;

namespace {

int64_t multiply_adds(int64_t rounds, float start, float* sum) {
  constexpr int kChains = 12;  // latency 4 at two per cycle, and some to spare
  Vec<kLanes> chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = Vec<kLanes>{} + start + static_cast<float>(c);
  const Vec<kLanes> by = Vec<kLanes>{} + 0.999f, more = Vec<kLanes>{} + 0.001f;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = chains[c] * by + more;
  }
  for (int c = 0; c < kChains; ++c) *sum += chains[c][0];
  return 2 * kLanes * kChains * rounds;
}

}  // namespace

// Operations per second of `num_threads` threads; a multiply-add counts as two.
double multiply_adds_per_s(int num_threads) {
  constexpr int64_t kRounds = 1 << 18;  // half a millisecond: short enough to be left alone on a busy machine
  int64_t operations = 0;
  float used = 0;  // so that the sums are made
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(num_threads) reduction(+ : operations, used)
  for (int task = 0; task < num_threads; ++task) operations += multiply_adds(kRounds, static_cast<float>(task), &used);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return used > 0 ? static_cast<double>(operations) / taken.count() : 0;
}
