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
#include "simd_select.h"

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

float lane_dot(const float* x, const float* y, int64_t n) {
  return lane_sum(n, [=](int64_t i) { return x[i] * y[i]; });
}

// Neighbours are joined three times, which is join_columns for every lane.
float dot(DType dtype, const void* a, const void* b, int64_t n) {
  float column[kDotColumns] = {};
  with_type(dtype, [=, &column]<typename T>(T) {
    const T* x = static_cast<const T*>(a);
    const T* y = static_cast<const T*>(b);
    const auto add_product = [&](int64_t i, int c) {
      column[c] = fma(to_float(x[i + c]), to_float(y[i + c]), column[c]);
    };
    int64_t i = 0;
    for (; i + kDotColumns <= n; i += kDotColumns) {
      for (int c = 0; c < kDotColumns; ++c) add_product(i, c);
    }
    for (int c = 0; i + c < n; ++c) add_product(i, c);
  });
  float pair[kDotColumns / 2], quad[kDotColumns / 4], lane[kLanes];
  for (int c = 0; c < kDotColumns / 2; ++c) pair[c] = column[2 * c] + column[2 * c + 1];
  for (int c = 0; c < kDotColumns / 4; ++c) quad[c] = pair[2 * c] + pair[2 * c + 1];
  for (int l = 0; l < kLanes; ++l) lane[l] = quad[2 * l] + quad[2 * l + 1];
  return add_lanes(lane);
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
