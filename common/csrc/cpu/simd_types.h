// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What the parts of simd_loops.h share; its rules hold here.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simd.h"

// What a loop body calls must be inlined for the compiler to vectorise the loop.
#define DUOMOE_INLINE inline __attribute__((always_inline))

namespace duomoe::cpu {
namespace {

using namespace duomoe::math;

template <typename F>
DUOMOE_INLINE void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Float16{});
    default:
      return;
  }
}

void load(DType dtype, const void* from, float* to, int64_t n) {
  with_type(dtype, [=]<typename T>(T) {
    const T* x = static_cast<const T*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(x[i]);
  });
}

}  // namespace
}  // namespace duomoe::cpu
