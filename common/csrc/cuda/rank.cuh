// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Parts of the top-K of a row by one warp, which goes in three steps: a bound that at least K
// selection values reach; the few that reach it, the candidates, gathered in shared memory; each
// candidate's rank by counting. Values are finite, and -inf stands for an expert that is out.
#pragma once

#include <climits>

#include "shared.cuh"
#include "warp.h"

namespace duomoe::cuda {

using math::kAdjacent;

// An integer with the order of the floats (of numbers, -0 below 0), and its inverse.
__device__ inline int signed_key(float x) {
  const int bits = static_cast<int>(math::bits_of(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ inline float value_of_signed_key(int key) {
  return math::float_of(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7fffffff)));
}

// The `rank`-th largest of the lanes' maxima, equal ones counted one by one, or the smallest where
// there are fewer: a bound that at least `rank` values reach. +inf where all are -inf.
__device__ inline float bound_of_best(float maximum, int rank) {
  int key = maximum > -math::infinity() ? signed_key(maximum) : INT_MIN, bound = INT_MIN;
#pragma unroll 1
  while (rank > 0) {
    const int next = __reduce_max_sync(kAllLanes, key);
    if (next == INT_MIN) break;
    bound = next;
    rank -= __popc(__ballot_sync(kAllLanes, key == next));
    if (key == next) key = INT_MIN;
  }
  return bound == INT_MIN ? math::infinity() : value_of_signed_key(bound);
}

// math::composite for a value that is no NaN.
__device__ inline uint64_t composite_of_number(float x, int32_t id) {
  const uint32_t bits = math::bits_of(x + 0.0f);  // -0 + 0 = +0
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return math::composite(key, id);
}

// a += x > y.
__device__ inline void count_greater(int& a, uint64_t x, uint64_t y) {
  asm("{\n\t.reg .pred p;\n\tsetp.gt.u64 p, %1, %2;\n\t@p add.s32 %0, %0, 1;\n\t}"
      : "+r"(a)
      : "l"(x), "l"(y));
}

__device__ inline void count_greater(int& a, float x, float y) {
  asm("{\n\t.reg .pred p;\n\tsetp.gt.f32 p, %1, %2;\n\t@p add.s32 %0, %0, 1;\n\t}"
      : "+r"(a)
      : "f"(x), "f"(y));
}

// a += how many of four numbers are above x.
__device__ inline void count_greater(int (&a)[kAdjacent], const float4& four, float x) {
  count_greater(a[0], four.x, x);
  count_greater(a[1], four.y, x);
  count_greater(a[2], four.z, x);
  count_greater(a[3], four.w, x);
}
__device__ inline int total(const int (&a)[kAdjacent]) { return (a[0] + a[1]) + (a[2] + a[3]); }

// *address = id, and on to the next, if x reaches the bound. `address` is one of shared memory.
__device__ inline void append_if_reached(uint32_t& address, float x, float bound, int id) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ge.f32 p, %1, %2;\n\t@p st.shared.u32 [%0], %3;\n\t"
      "@p add.u32 %0, %0, 4;\n\t}"
      : "+r"(address)
      : "f"(x), "f"(bound), "r"(id)
      : "memory");
}

// How many of the `kCount` keys from address `keys` on are above `key`.
template <int kCount>
__device__ int count_above(uint64_t key, uint32_t keys) {
  int above[kAdjacent] = {};
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const ulonglong2 one = load_shared_pair(keys + 8 * i),
                     two = load_shared_pair(keys + 8 * i + 16);
    count_greater(above[0], one.x, key);
    count_greater(above[1], one.y, key);
    count_greater(above[2], two.x, key);
    count_greater(above[3], two.y, key);
  }
  return total(above);
}

// How many keys of a list of `count` in shared memory, which zeros follow, are above `key`.
__device__ inline int count_above(uint64_t key, uint32_t keys, int count) {
  int above = 0;
#pragma unroll 1
  for (const uint32_t end = keys + 8 * count; keys < end; keys += 32) {
    const ulonglong2 one = load_shared_pair(keys), two = load_shared_pair(keys + 16);
    count_greater(above, one.x, key);
    count_greater(above, one.y, key);
    count_greater(above, two.x, key);
    count_greater(above, two.y, key);
  }
  return above;
}

}  // namespace duomoe::cuda
