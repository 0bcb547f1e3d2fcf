// Chooses a set of kernels: the widest that this machine can run, unless told otherwise.
#include <hotrow/dispatch.h>
#include <hotrow/kernels.h>
#include <hotrow/pairs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <iterator>

// The kernels of one set, in the order of `Kernels`.
#define HOTROW_ADDRESS(result, name, parameters) name,
#define HOTROW_PAIR_ADDRESS(result, name, parameters) avx512_bf16::name,
#define HOTROW_DEFINE_SET(isa)                                         \
  HOTROW_DECLARE_KERNELS(isa)                                          \
  namespace hotrow::isa {                                              \
  constexpr Kernels kSet = {#isa, HOTROW_KERNEL_LIST(HOTROW_ADDRESS)}; \
  }

HOTROW_DEFINE_SET(baseline)
#ifdef HOTROW_HAS_avx2
HOTROW_DEFINE_SET(avx2)
#endif
#ifdef HOTROW_HAS_avx512
HOTROW_DEFINE_SET(avx512)
#endif
#ifdef HOTROW_HAS_avx512_bf16
HOTROW_DECLARE_PAIR_KERNELS(avx512_bf16)
#endif
#ifdef HOTROW_HAS_amx_bf16
HOTROW_DECLARE_PAIR_KERNELS(amx_bf16)
#endif

namespace hotrow {
namespace {

constexpr Kernels kSets[] = {
    baseline::kSet,
#ifdef HOTROW_HAS_avx2
    avx2::kSet,
#endif
#ifdef HOTROW_HAS_avx512
    avx512::kSet,
#endif
};

// Whether HAS is true of every feature that a set was compiled for; false if there is no such set.
#ifdef HOTROW_HAS_avx2
#define HOTROW_RUNS_AVX2(HAS) (HAS("avx2") && HAS("bmi2") && HAS("f16c") && HAS("fma"))
#else
#define HOTROW_RUNS_AVX2(HAS) false
#endif
#ifdef HOTROW_HAS_avx512
#define HOTROW_RUNS_AVX512(HAS) \
  (HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl"))
#else
#define HOTROW_RUNS_AVX512(HAS) false
#endif
#define HOTROW_NUM_RUNNABLE(HAS) (HOTROW_RUNS_AVX2(HAS) ? HOTROW_RUNS_AVX512(HAS) ? 3 : 2 : 1)

std::atomic<int> chosen{-1};
std::atomic<bool> amx_wanted{true};

}  // namespace

int num_runnable(const std::vector<std::string>& features) {
  [[maybe_unused]] const auto has = [&](const char* name) {
    return std::find(features.begin(), features.end(), name) != features.end();
  };
  return HOTROW_NUM_RUNNABLE(has);
}

int num_kernels() {
  static const int count = HOTROW_NUM_RUNNABLE(__builtin_cpu_supports);
  return count;
}

const Kernels& kernels_at(int index) { return kSets[index]; }

const Kernels& kernels() {
  const int index = chosen.load(std::memory_order_relaxed);
  return kSets[index < 0 ? num_kernels() - 1 : index];
}

const PairKernels* pair_kernels() {
#ifdef HOTROW_HAS_avx512_bf16
  static constexpr PairKernels kPairs = {"avx512_bf16", HOTROW_PAIR_KERNEL_LIST(HOTROW_PAIR_ADDRESS)};
  static const bool has_products = __builtin_cpu_supports("avx512bf16");
  if (!has_products || &kernels() != std::end(kSets) - 1) return nullptr;  // avx512 is the last set
#ifdef HOTROW_HAS_amx_bf16
  static constexpr PairKernels kTiles = {"amx_bf16",
                                         avx512_bf16::round_pairs,
                                         avx512_bf16::pack_pair_panels,
                                         avx512_bf16::pack_pair_rows,
                                         amx_bf16::pack_pair_tiles,
                                         amx_bf16::multiply_pairs};
  if (amx_wanted.load(std::memory_order_relaxed) && tiles_refused() == 0) return &kTiles;
#endif
  return &kPairs;
#else
  return nullptr;
#endif
}

int tiles_refused() {
  static const int refused = [] {
#if defined(HOTROW_EMULATED_TILES)
    const char* refusal = std::getenv("HOTROW_EMULATED_REFUSAL");
    return refusal ? std::atoi(refusal) : 0;
#elif defined(HOTROW_HAS_amx_bf16)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return -1;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? errno : 0;  // for all threads of the process
#else
    return -1;
#endif
  }();
  return refused;
}

bool use_amx(bool use) { return amx_wanted.exchange(use); }

void use_kernels(int index) { chosen.store(index, std::memory_order_relaxed); }

}  // namespace hotrow
