// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The body of simd_base.cc, simd_avx2.cc and simd_avx512.cc. Everything is in an unnamed namespace
// and no header of the standard library with inline functions comes in, so that no code for a wide
// instruction set can be picked by the linker for the whole library. Plain loops: the compiler
// vectorises them.

#include "simd_activation.h"
#include "simd_route.h"

namespace duomoe::cpu {
namespace {

void store(DType dtype, const float* from, void* to, int64_t n) {
  with_type(dtype, [=]<typename T>(T) {
    T* y = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(from[i]);
  });
}

// Rounds to a 16-bit type and back; leaves float32 alone.
void round_to(DType dtype, float* values, int64_t n) {
  if (dtype == DType::kFloat32) return;
  with_type(dtype, [=]<typename T>(T) {
    for (int64_t i = 0; i < n; ++i) values[i] = to_float(from_float<T>(values[i]));
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

void add(DType dtype, const void* a, const void* b, int64_t n, void* out) {
  with_type(dtype, [=]<typename T>(T) {
    const T* x = static_cast<const T*>(a);
    const T* y = static_cast<const T*>(b);
    T* z = static_cast<T*>(out);
    for (int64_t i = 0; i < n; ++i) z[i] = from_float<T>(to_float(x[i]) + to_float(y[i]));
  });
}

#if defined(__AVX512F__) || defined(__AVX2__)
// 12 x 32 sums in 24 registers of 16 floats, or 3 x 32 in 12 registers of 8.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kWidth = 16;
using Vector = __m512;
inline __attribute__((always_inline)) Vector load_vector(const float* p) {
  return _mm512_loadu_ps(p);
}
inline __attribute__((always_inline)) Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline __attribute__((always_inline)) Vector fma_vector(Vector a, Vector b, Vector c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline __attribute__((always_inline)) void add_to(float* p, Vector x) {
  _mm512_storeu_ps(p, _mm512_add_ps(_mm512_loadu_ps(p), x));
}
#else
constexpr int kTileRows = 3, kWidth = 8;
using Vector = __m256;
inline __attribute__((always_inline)) Vector load_vector(const float* p) {
  return _mm256_loadu_ps(p);
}
inline __attribute__((always_inline)) Vector broadcast(float x) { return _mm256_set1_ps(x); }
inline __attribute__((always_inline)) Vector fma_vector(Vector a, Vector b, Vector c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline __attribute__((always_inline)) void add_to(float* p, Vector x) {
  _mm256_storeu_ps(p, _mm256_add_ps(_mm256_loadu_ps(p), x));
}
#endif

void product_tile(int64_t depth, const float* a, const float* b, float* c, int64_t stride) {
  constexpr int kParts = kTileColumns / kWidth;
  Vector sum[kTileRows][kParts];
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) sum[i][j] = broadcast(0.0f);
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector y[kParts];
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) y[j] = load_vector(b + k * kTileColumns + j * kWidth);
#pragma GCC unroll 12
    for (int i = 0; i < kTileRows; ++i) {
      const Vector x = broadcast(a[k * kTileRows + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kParts; ++j) sum[i][j] = fma_vector(x, y[j], sum[i][j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) add_to(c + i * stride + j * kWidth, sum[i][j]);
  }
}
#else
constexpr int kTileRows = 4;

void product_tile(int64_t depth, const float* a, const float* b, float* c, int64_t stride) {
  float sum[kTileRows][kTileColumns] = {};
  for (int64_t k = 0; k < depth; ++k) {
    for (int i = 0; i < kTileRows; ++i) {
      for (int j = 0; j < kTileColumns; ++j) {
        sum[i][j] = fma(a[k * kTileRows + i], b[k * kTileColumns + j], sum[i][j]);
      }
    }
  }
  for (int i = 0; i < kTileRows; ++i) {
    for (int j = 0; j < kTileColumns; ++j) c[i * stride + j] += sum[i][j];
  }
}
#endif

template <int kTile>
void pack(DType dtype, DType operand_dtype, const void* from, int64_t depth_stride,
          int64_t tile_stride, int64_t depth, int64_t extent, const uint8_t* keep, float* line,
          float* packed) {
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2;
  const bool plain = dtype == DType::kFloat32 && operand_dtype == DType::kFloat32;
  // A contiguous run as float32: the source itself, or a converted copy.
  auto run = [&](int64_t offset, int64_t n) -> const float* {
    const char* at = static_cast<const char*>(from) + offset * size;
    if (plain) return reinterpret_cast<const float*>(at);
    load(dtype, at, line, n);
    round_to(operand_dtype, line, n);
    return line;
  };
  const int64_t whole = extent / kTile * kTile;
  if (whole != extent) {
    float* last = packed + whole * depth;
    for (int64_t i = 0; i < kTile * depth; ++i) last[i] = 0.0f;
  }
  if (tile_stride == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      float* to = packed + k * kTile;
      if (keep && !keep[k]) {
        for (int64_t i = 0; i < extent; i += kTile, to += kTile * depth) {
          for (int j = 0; j < kTile; ++j) to[j] = 0.0f;
        }
        continue;
      }
      const float* x = run(k * depth_stride, extent);
      int64_t i = 0;
      for (; i < whole; i += kTile, to += kTile * depth) {
        for (int j = 0; j < kTile; ++j) to[j] = x[i + j];
      }
      for (int j = 0; i + j < extent; ++j) to[j] = x[i + j];
    }
    return;
  }
  for (int64_t i = 0; i < extent; ++i) {
    const float* x = run(i * tile_stride, depth);
    float* to = packed + i / kTile * kTile * depth + i % kTile;
    for (int64_t k = 0; k < depth; ++k) to[k * kTile] = x[k];
  }
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
