// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The body of simd_base.cc, simd_avx2.cc and simd_avx512.cc. Everything is in an unnamed namespace
// and no header of the standard library with inline functions comes in, so that no code for a wide
// instruction set can be picked by the linker for the whole library. Plain loops: the compiler
// vectorises them.

#include "simd_activation.h"
#include "simd_product.h"
#include "simd_route.h"

namespace duomoe::cpu {
namespace {

void store(DType dtype, const float* from, void* to, int64_t n) {
  with_type(dtype, [=]<typename T>(T) {
    T* y = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(from[i]);
  });
}

void accumulate(const float* x, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

void accumulate_scaled(DType dtype, float factor, const void* from, int64_t n, float* sum) {
  with_type(dtype, [=]<typename T>(T) {
    const T* x = static_cast<const T*>(from);
    for (int64_t i = 0; i < n; ++i) sum[i] = fma(factor, to_float(x[i]), sum[i]);
  });
}

void scale(DType dtype, float factor, const void* from, int64_t n, void* to) {
  with_type(dtype, [=]<typename T>(T) {
    const T* x = static_cast<const T*>(from);
    T* y = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(factor * to_float(x[i]));
  });
}

float dot(DType dtype, const void* a, const void* b, int64_t n) {
  float result = 0.0f;
  with_type(dtype, [=, &result]<typename T>(T) {
    const T* x = static_cast<const T*>(a);
    const T* y = static_cast<const T*>(b);
    result = lane_sum(n, [=](int64_t i) { return to_float(x[i]) * to_float(y[i]); });
  });
  return result;
}

float lane_dot(const float* x, const float* y, int64_t n) {
  return lane_sum(n, [=](int64_t i) { return x[i] * y[i]; });
}

void add(DType dtype, const void* a, const void* b, int64_t n, void* out) {
  with_type(dtype, [=]<typename T>(T) {
    const T* x = static_cast<const T*>(a);
    const T* y = static_cast<const T*>(b);
    T* z = static_cast<T*>(out);
    for (int64_t i = 0; i < n; ++i) z[i] = from_float<T>(to_float(x[i]) + to_float(y[i]));
  });
}

constexpr SimdLoops loops() {
  return {kTileRows,
          load,
          store,
          row_scores,
          add_shares,
          row_gradient,
          selection_keys,
          keep_groups,
          top,
          row_weights,
          accumulate,
          accumulate_scaled,
          scale,
          dot,
          lane_dot,
          add,
          activate,
          activate_bwd,
          glu,
          glu_bwd,
          pack<kTileRows>,
          pack<kTileColumns>,
          product_tile};
}

}  // namespace
}  // namespace duomoe::cpu
