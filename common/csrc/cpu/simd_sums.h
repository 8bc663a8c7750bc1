// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The sums of the router's part of simd_loops.h, whose rules hold here, in the orders of
// math/router.h. Rows are padded as simd.h says, so that every loop over one runs over whole blocks
// of kLanes elements.
#pragma once

#include <utility>

#include "../math/lane_sum.h"
#include "simd_types.h"

namespace duomoe::cpu {
namespace {

using math::add_lanes;
using math::lane_sum;

// f(i, lane) for i in [0, n), n a multiple of kLanes.
template <typename F>
DUOMOE_INLINE void for_lanes(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) f(i + l, l);
  }
}

#if defined(__GNUC__) && !defined(__clang__)
// Everything that takes or returns a vector is inlined, so that its calling convention is moot.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

// Vectors of kStrip elements; comparisons give -1 or 0 in each.
#if defined(__AVX512F__)
constexpr int kStrip = 16;
#elif defined(__AVX2__)
constexpr int kStrip = 8;
#else
constexpr int kStrip = 4;
#endif
using Strip = float __attribute__((vector_size(4 * kStrip)));
using IntStrip = int32_t __attribute__((vector_size(4 * kStrip)));

template <int... i>
constexpr IntStrip counted(std::integer_sequence<int, i...>) {
  return IntStrip{i...};
}
constexpr IntStrip kEachOfStrip = counted(std::make_integer_sequence<int, kStrip>{});

DUOMOE_INLINE Strip load_strip(const float* from) {
  Strip v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

// Whether any element of a comparison is -1.
DUOMOE_INLINE bool any(const IntStrip& where) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(where)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(where)) != 0;
#else
  return (where[0] | where[1] | where[2] | where[3]) != 0;
#endif
}

// --- sums over a row -----------------------------------------------------------------------------

// The strips of a row sum's columns, each of which holds whole lanes of kAdjacent.
constexpr int kStrips = kColumns / kStrip;

DUOMOE_INLINE Strip fma_strip(const Strip& a, const Strip& b, const Strip& c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return Strip{fma(a[0], b[0], c[0]), fma(a[1], b[1], c[1]), fma(a[2], b[2], c[2]),
               fma(a[3], b[3], c[3])};
#endif
}

// Element i is element at(i) of a and b one after the other.
template <typename At, int... i>
DUOMOE_INLINE Strip shuffled(const Strip& a, const Strip& b, At, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, At{}(i)...);
#else
  using Indices = int32_t __attribute__((vector_size(4 * kStrip)));
  return __builtin_shuffle(a, b, Indices{At{}(i)...});
#endif
}
template <typename At>
DUOMOE_INLINE Strip shuffled(const Strip& a, const Strip& b, At at) {
  return shuffled(a, b, at, std::make_integer_sequence<int, kStrip>{});
}

// Every element is the one that lies kDistance, a power of two, away in its block of twice that.
template <int kDistance>
DUOMOE_INLINE Strip distant(const Strip& a) {
  return shuffled(a, a, [](int i) { return i ^ kDistance; });
}

// a where it is larger, else b; b beside a NaN.
template <typename T>
DUOMOE_INLINE T larger_of(const T& a, const T& b) {
  return a > b ? a : b;
}

// Sums of neighbours, those of each four elements of a and then those of the same four of b.
DUOMOE_INLINE Strip add_neighbours(const Strip& a, const Strip& b) {
  constexpr auto even = [](int i) { return (i & ~3) + 2 * (i & 1) + ((i & 2) ? kStrip : 0); };
  constexpr auto odd = [](int i) { return (i & ~3) + 2 * (i & 1) + 1 + ((i & 2) ? kStrip : 0); };
  return shuffled(a, b, even) + shuffled(a, b, odd);
}

// The sum of columns, the first kPresent strips of which can be other than +0.
template <int kPresent>
DUOMOE_INLINE float join_columns(const Strip (&column)[kPresent]) {
  const auto strip = [&](int v) { return v < kPresent ? column[v] : Strip{}; };
  // Element x of the q-th four of lanes[j] is lane kStrip / 4 (4 j + x) + q.
  constexpr int kJoined = kStrips / 4;
  Strip lanes[kJoined];
#pragma GCC unroll 8
  for (int j = 0; j < kJoined; ++j) {
    lanes[j] = 4 * j < kPresent ? add_neighbours(add_neighbours(strip(4 * j), strip(4 * j + 1)),
                                                 add_neighbours(strip(4 * j + 2), strip(4 * j + 3)))
                                : Strip{};
  }
#pragma GCC unroll 8
  for (int half = kJoined / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  Strip sum = lanes[0] + distant<2>(lanes[0]);
  sum += distant<1>(sum);
  if constexpr (kStrip >= 16) sum += distant<8>(sum);
  if constexpr (kStrip >= 8) sum += distant<4>(sum);
  return sum[0];
}

// kPresent strips of columns; f(i, column) adds the elements from i on to a column.
template <int kPresent, typename F>
DUOMOE_INLINE float column_sum(int64_t n, F f) {
  Strip column[kPresent];
#pragma GCC unroll 32
  for (int v = 0; v < kPresent; ++v) {
    Strip sum = {};
    for (int64_t i = v * kStrip; i < n; i += kColumns) sum = f(i, sum);
    column[v] = sum;
  }
  return join_columns<kPresent>(column);
}
template <typename F>
DUOMOE_INLINE float column_sum(int64_t n, F f) {
  if (n <= kColumns / 4) return column_sum<kStrips / 4>(n, f);
  if (n <= kColumns / 2) return column_sum<kStrips / 2>(n, f);
  return column_sum<kStrips>(n, f);
}

// The sum of a padded row, whose padding is +0.
float row_sum(const float* x, int64_t n) {
  return column_sum(n, [=](int64_t i, const Strip& sum) { return sum + load_strip(x + i); });
}

// The sum of x y, with fma; the padding of x and y is +0.
float row_dot(const float* x, const float* y, int64_t n) {
  return column_sum(n, [=](int64_t i, const Strip& sum) {
    return fma_strip(load_strip(x + i), load_strip(y + i), sum);
  });
}

}  // namespace
}  // namespace duomoe::cpu
