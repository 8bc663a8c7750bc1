// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums on the CPU in the order that router.h has for the slots of a token.
#pragma once

#include "router.h"

namespace duomoe::math {

// In a butterfly.
template <typename T>
DUOMOE_FN T add_lanes(T (&lane)[kLanes]) {
  for (int l = 0; l < 16; ++l) lane[l] += lane[l + 16];
  for (int l = 0; l < 8; ++l) lane[l] += lane[l + 8];
  for (int l = 0; l < 4; ++l) lane[l] += lane[l + 4];
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

// The sum of f(i) over i < n, in its type.
template <typename F>
DUOMOE_FN auto lane_sum(int64_t n, F f) {
  decltype(f(n)) lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] += f(i + l);
  }
  for (int l = 0; i + l < n; ++l) lane[l] += f(i + l);
  return add_lanes(lane);
}

}  // namespace duomoe::math
