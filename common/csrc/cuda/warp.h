// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What the 32 lanes of a warp do together. All lanes must call these, and all get the result.
#pragma once

#include <cstdint>

#include "../math/router.h"

namespace duomoe::cuda {

constexpr int kLanes = math::kLanes;
constexpr unsigned kAllLanes = 0xffffffffu;

// Blocks are one-dimensional.
__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kLanes; }
__device__ inline int warps_per_block() { return static_cast<int>(blockDim.x) / kLanes; }
// A warp's number in the grid, and their count.
__device__ inline int64_t grid_warp() {
  return static_cast<int64_t>(blockIdx.x) * warps_per_block() + warp_id();
}
__device__ inline int64_t grid_warps() {
  return static_cast<int64_t>(gridDim.x) * warps_per_block();
}

template <typename T>
__device__ T warp_sum(T x) {
  for (int width = kLanes / 2; width > 0; width /= 2) x += __shfl_xor_sync(kAllLanes, x, width);
  return x;
}

// Sum over i of f(i), in its type, in the lane order that math/router.h has for the slots of a
// token: the butterfly adds the same pairs as the CPU's halving does, and since a + b = b + a every
// lane has lane 0's bits.
template <typename F>
__device__ auto lane_sum(int64_t n, F f) {
  decltype(f(n)) sum = 0;
  for (int64_t i = lane_id(); i < n; i += kLanes) sum += f(i);
  return warp_sum(sum);
}

// A lane's part of a row sum.
using Columns = float[math::kAdjacent];
__device__ inline float join_columns(const Columns& c) { return (c[0] + c[1]) + (c[2] + c[3]); }

// The sum over a row in the order that math/router.h has for experts: a column goes from c to
// step(e, c) at each of its experts.
template <typename F>
__device__ float row_sum(int experts, F step) {
  Columns columns = {};
  for (int first = math::kAdjacent * lane_id(); first < experts; first += math::kColumns) {
#pragma unroll
    for (int i = 0; i < math::kAdjacent; ++i) {
      if (first + i < experts) columns[i] = step(first + i, columns[i]);
    }
  }
  return warp_sum(join_columns(columns));
}

// Whether f(i) holds for every i < n.
template <typename F>
__device__ bool all_lanes(int n, F f) {
  bool all = true;
  for (int i = lane_id(); i < n; i += kLanes) all = all && f(i);
  return __all_sync(kAllLanes, all) != 0;
}

// The largest x, where `>` orders them; a NaN never wins.
template <typename T>
__device__ T warp_max(T x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, x, width);
    x = other > x ? other : x;
  }
  return __shfl_sync(kAllLanes, x, 0);  // one zero for all, where -0 and +0 tie
}

}  // namespace duomoe::cuda
