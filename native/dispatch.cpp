// Chooses one set of kernels: the widest that this machine can run, unless told otherwise.
#include <hotrow/kernels.h>

#include <atomic>

#ifdef HOTROW_HAS_avx2
HOTROW_DECLARE_KERNELS(avx2)
#endif
#ifdef HOTROW_HAS_avx512
HOTROW_DECLARE_KERNELS(avx512)
#endif
HOTROW_DECLARE_KERNELS(baseline)

namespace hotrow {
namespace {

#define HOTROW_SET(isa)    \
  {#isa,                   \
   isa::lookup,            \
   isa::weight_gradient,   \
   isa::update,            \
   isa::fill_uniform,      \
   isa::interact,          \
   isa::interact_backward, \
   isa::pack_panels,       \
   isa::pack_tiles,        \
   isa::multiply}

constexpr Kernels kSets[] = {
    HOTROW_SET(baseline),
#ifdef HOTROW_HAS_avx2
    HOTROW_SET(avx2),
#endif
#ifdef HOTROW_HAS_avx512
    HOTROW_SET(avx512),
#endif
};

// Every processor with AVX2, BMI2, F16C and FMA has the rest of x86-64-v3 too; likewise for v4.
int count_runnable() {
  int count = 1;
#ifdef HOTROW_HAS_avx2
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2") || !__builtin_cpu_supports("f16c") ||
      !__builtin_cpu_supports("fma")) {
    return count;
  }
  ++count;
#endif
#ifdef HOTROW_HAS_avx512
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl")) {
    return count;
  }
  ++count;
#endif
  return count;
}

std::atomic<int> chosen{-1};

}  // namespace

int num_kernels() {
  static const int count = count_runnable();
  return count;
}

const Kernels& kernels_at(int index) { return kSets[index]; }

const Kernels& kernels() {
  const int index = chosen.load(std::memory_order_relaxed);
  return kSets[index < 0 ? num_kernels() - 1 : index];
}

void use_kernels(int index) { chosen.store(index, std::memory_order_relaxed); }

}  // namespace hotrow
