// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "simd.h"

namespace duomoe::cpu {

const SimdLoops& simd() {
#if defined(__x86_64__)
  static const SimdLoops& chosen = []() -> const SimdLoops& {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      return simd_avx512();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return simd_avx2();
    return simd_base();
  }();
  return chosen;
#else
  return simd_base();
#endif
}

}  // namespace duomoe::cpu
