// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The products' part of simd_loops.h; its rules hold here.
#pragma once

#include "simd_types.h"

namespace duomoe::cpu {
namespace {

// Rounds to a 16-bit type and back; leaves float32 alone.
void round_to(DType dtype, float* values, int64_t n) {
  if (dtype == DType::kFloat32) return;
  with_type(dtype, [=]<typename T>(T) {
    for (int64_t i = 0; i < n; ++i) values[i] = to_float(from_float<T>(values[i]));
  });
}

#if defined(__AVX512F__) || defined(__AVX2__)
// 12 x 32 sums in 24 registers of 16 floats, or 3 x 32 in 12 registers of 8.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kWidth = 16;
using Vector = __m512;
DUOMOE_INLINE Vector load_vector(const float* p) { return _mm512_loadu_ps(p); }
DUOMOE_INLINE void store_vector(float* p, Vector x) { _mm512_storeu_ps(p, x); }
DUOMOE_INLINE Vector broadcast(float x) { return _mm512_set1_ps(x); }
DUOMOE_INLINE Vector add_vector(Vector a, Vector b) { return _mm512_add_ps(a, b); }
DUOMOE_INLINE Vector fma_vector(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#else
constexpr int kTileRows = 3, kWidth = 8;
using Vector = __m256;
DUOMOE_INLINE Vector load_vector(const float* p) { return _mm256_loadu_ps(p); }
DUOMOE_INLINE void store_vector(float* p, Vector x) { _mm256_storeu_ps(p, x); }
DUOMOE_INLINE Vector broadcast(float x) { return _mm256_set1_ps(x); }
DUOMOE_INLINE Vector add_vector(Vector a, Vector b) { return _mm256_add_ps(a, b); }
DUOMOE_INLINE Vector fma_vector(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#endif

template <int kRows>
void tile_of_rows(int64_t depth, const float* a, const float* b, int64_t b_stride, float* c,
                  int64_t c_stride, bool add) {
  constexpr int kParts = kTileColumns / kWidth;
  Vector sum[kRows][kParts];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) sum[i][j] = broadcast(0.0f);
  }
  for (int64_t k = 0; k < depth; ++k, a += kTileRows, b += b_stride) {
    Vector y[kParts];
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) y[j] = load_vector(b + j * kWidth);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vector x = broadcast(a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kParts; ++j) sum[i][j] = fma_vector(x, y[j], sum[i][j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) {
      float* at = c + i * c_stride + j * kWidth;
      // 0 + sum, so that the first block of a product is added as the others are: -0 becomes +0.
      store_vector(at, add_vector(add ? load_vector(at) : broadcast(0.0f), sum[i][j]));
    }
  }
}

// to[k * to_stride + i] = from[i * from_stride + k] for i, k < 8
DUOMOE_INLINE void transpose_8x8(const float* from, int64_t from_stride, float* to,
                                 int64_t to_stride) {
  __m256 x[8], y[8];
  // Rows i and i + 4 side by side, so that what follows stays within 128-bit halves.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float *low = from + i * from_stride, *high = low + 4 * from_stride;
    x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
    x[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low + 4)),
                                    _mm_loadu_ps(high + 4), 1);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    y[i + 2] = _mm256_unpacklo_ps(x[i + 2], x[i + 3]);
    y[i + 3] = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
    _mm256_storeu_ps(to + i * to_stride, _mm256_shuffle_ps(y[i], y[i + 2], 0x44));
    _mm256_storeu_ps(to + (i + 1) * to_stride, _mm256_shuffle_ps(y[i], y[i + 2], 0xee));
    _mm256_storeu_ps(to + (i + 2) * to_stride, _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44));
    _mm256_storeu_ps(to + (i + 3) * to_stride, _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee));
  }
}
#else
constexpr int kTileRows = 4;

template <int kRows>
void tile_of_rows(int64_t depth, const float* a, const float* b, int64_t b_stride, float* c,
                  int64_t c_stride, bool add) {
  float sum[kRows][kTileColumns] = {};
  for (int64_t k = 0; k < depth; ++k, a += kTileRows, b += b_stride) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kTileColumns; ++j) sum[i][j] = fma(a[i], b[j], sum[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kTileColumns; ++j) {
      float* at = c + i * c_stride + j;
      *at = (add ? *at : 0.0f) + sum[i][j];
    }
  }
}

DUOMOE_INLINE void transpose_8x8(const float* from, int64_t from_stride, float* to,
                                 int64_t to_stride) {
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 8; ++k) to[k * to_stride + i] = from[i * from_stride + k];
  }
}
#endif

static_assert(kTileRows <= kMostTileRows);

template <int kRows>
DUOMOE_INLINE void tile_of_at_most(int64_t depth, int rows, const float* a, const float* b,
                                   int64_t b_stride, float* c, int64_t c_stride, bool add) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return tile_of_at_most<kRows - 1>(depth, rows, a, b, b_stride, c, c_stride, add);
    }
  }
  tile_of_rows<kRows>(depth, a, b, b_stride, c, c_stride, add);
}

void product_tile(int64_t depth, int rows, const float* a, const float* b, int64_t b_stride,
                  float* c, int64_t c_stride, bool add) {
  tile_of_at_most<kTileRows>(depth, rows, a, b, b_stride, c, c_stride, add);
}

// packed[k * kTile + i] = from[i * stride + k] for i < extent <= kTile
template <int kTile>
void transpose_tile(const float* from, int64_t stride, int64_t depth, int64_t extent,
                    float* packed) {
  const int64_t whole = extent < 8 ? 0 : depth / 8 * 8;
  // The last eight rows may have been there already.
  for (int64_t i = 0; whole && i < extent; i += 8) {
    const int64_t first = i + 8 > extent ? extent - 8 : i;
    for (int64_t k = 0; k < whole; k += 8) {
      transpose_8x8(from + first * stride + k, stride, packed + k * kTile + first, kTile);
    }
  }
  for (int64_t i = 0; i < extent; ++i) {
    for (int64_t k = whole; k < depth; ++k) packed[k * kTile + i] = from[i * stride + k];
  }
}

template <int kTile>
void pack(DType dtype, DType operand_dtype, const void* from, int64_t depth_stride,
          int64_t tile_stride, int64_t depth, int64_t extent, const uint8_t* keep, float* line,
          float* packed) {
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2;
  const bool plain = dtype == DType::kFloat32 && operand_dtype == DType::kFloat32;
  auto source = [&](int64_t k, int64_t i) {
    return static_cast<const char*>(from) + (k * depth_stride + i * tile_stride) * size;
  };
  auto convert = [&](int64_t k, int64_t i, int64_t n, float* to) {
    load(dtype, source(k, i), to, n);
    round_to(operand_dtype, to, n);
  };
  const int64_t whole = extent / kTile * kTile;
  if (whole != extent) {
    float* last = packed + whole * depth;
    for (int64_t i = 0; i < kTile * depth; ++i) last[i] = 0.0f;
  }
  if (tile_stride != 1) {
    for (int64_t i = 0; i < extent; i += kTile) {
      const int64_t rows = extent - i < kTile ? extent - i : kTile;
      if (plain) {
        transpose_tile<kTile>(reinterpret_cast<const float*>(source(0, i)), tile_stride, depth,
                              rows, packed + i * depth);
        continue;
      }
      for (int64_t j = 0; j < rows; ++j) convert(0, i + j, depth, line + j * depth);
      transpose_tile<kTile>(line, depth, depth, rows, packed + i * depth);
    }
    return;
  }
  // A few depths at a time, so that each tile gets whole cache lines.
  constexpr int64_t kDepths = 4;
  for (int64_t k0 = 0; k0 < depth; k0 += kDepths) {
    const int64_t depths = depth - k0 < kDepths ? depth - k0 : kDepths;
    const float* rows[kDepths];
    for (int64_t k = 0; k < depths; ++k) {
      float* to = line + k * extent;
      rows[k] = to;
      if (keep && !keep[k0 + k]) {
        for (int64_t i = 0; i < extent; ++i) to[i] = 0.0f;
      } else if (plain) {
        rows[k] = reinterpret_cast<const float*>(source(k0 + k, 0));
      } else {
        convert(k0 + k, 0, extent, to);
      }
    }
    float* to = packed + k0 * kTile;
    int64_t i = 0;
    for (; i < whole; i += kTile, to += kTile * depth) {
      for (int64_t k = 0; k < depths; ++k) {
        for (int j = 0; j < kTile; ++j) to[k * kTile + j] = rows[k][i + j];
      }
    }
    for (int64_t k = 0; k < depths; ++k) {
      for (int64_t j = 0; i + j < extent; ++j) to[k * kTile + j] = rows[k][i + j];
    }
  }
}

}  // namespace
}  // namespace duomoe::cpu
