// What the processor does with denormal floats. Each thread has its own mode, which its caller may have set.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace hotrow {

// kept: underflow is gradual, as IEEE 754 has it. flushed: a denormal operand or result counts as zero.
enum class Denormals { kept, flushed };

// Sets the calling thread's mode, and at its end puts back what was there.
class DenormalMode {
 public:
  explicit DenormalMode(Denormals mode)
      : before_(read()), now_(mode == Denormals::kept ? before_ & ~kBits : before_ | kBits) {
    if (now_ != before_) write(now_);
  }
  DenormalMode(const DenormalMode&) = delete;
  DenormalMode& operator=(const DenormalMode&) = delete;
  ~DenormalMode() {
    if (now_ != before_) write(before_);
  }

 private:
  // The assembler statements keep loads and stores on their side of the change.
#if defined(__SSE__)
  static constexpr uint64_t kBits = 0x8040;  // MXCSR's FTZ and DAZ
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t word) {
    asm volatile("" ::: "memory");
    _mm_setcsr(static_cast<unsigned>(word));
    asm volatile("" ::: "memory");
  }
#elif defined(__aarch64__)
  static constexpr uint64_t kBits = uint64_t{1} << 24;  // FPCR's FZ
  static uint64_t read() {
    uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(uint64_t word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
  static constexpr uint64_t kBits = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif

  uint64_t before_, now_;
};

}  // namespace hotrow
