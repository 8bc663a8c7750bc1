// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums by one warp that every lane gets: of integers, in any order, and of float64 in index order,
// for which lanes prepare terms side by side, which are then added one after another.
#pragma once

#include "warp.h"

namespace duomoe::cuda {

// sum over i < n of the integers f(i).
template <typename F>
__device__ int64_t integer_sum(int64_t n, F f) {
  int64_t sum = 0;
  for (int64_t i = lane_id(); i < n; i += kLanes) sum += f(i);
  return warp_sum(sum);
}

// sum + term of lane 0 + term of lane 1 + ...
__device__ inline double add_in_lane_order(double sum, double term) {
  for (int l = 0; l < kLanes; ++l) sum += __shfl_sync(kAllLanes, term, l);
  return sum;
}

// sum over i < n of f(i), in index order.
template <typename F>
__device__ double ordered_sum(int64_t n, F f) {
  double sum = 0.0;
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const int64_t i = begin + lane_id();
    sum = add_in_lane_order(
        sum, i < n ? f(i) : 0.0);  // a sum that starts at +0 doesn't change when 0 is added
  }
  return sum;
}

}  // namespace duomoe::cuda
