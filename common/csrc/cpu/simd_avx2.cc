// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "simd_loops.h"

namespace duomoe::cpu {

const SimdLoops& simd_avx2() {
  static constexpr SimdLoops table = loops();
  return table;
}

}  // namespace duomoe::cpu
