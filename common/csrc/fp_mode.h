// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace duomoe {

// Round to nearest, denormals kept, while it lives; then the caller's mode again. XLA's CPU threads
// flush denormals and torch's don't, so without it one kernel would give two results.
class ScopedFpMode {
 public:
  ScopedFpMode() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1f80);  // all exceptions masked, round to nearest, no FTZ, no DAZ
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
#endif
  }
  ~ScopedFpMode() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" ::"r"(saved_));
#endif
  }
  ScopedFpMode(const ScopedFpMode&) = delete;
  ScopedFpMode& operator=(const ScopedFpMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#else
  uint64_t saved_ = 0;
#endif
};

}  // namespace duomoe
