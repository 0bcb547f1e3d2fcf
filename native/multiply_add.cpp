// How many float32 multiply-adds a core can do at all: as many independent chains as its registers hold, without memory
// accesses. The yardstick of the matrix products; shares no code with them. Compiled with contraction, like them.
#include <hotrow/kernels.h>
#include <hotrow/vec.h>

HOTROW_DECLARE_KERNELS(HOTROW_ISA)

namespace hotrow::HOTROW_ISA {

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

}  // namespace hotrow::HOTROW_ISA
