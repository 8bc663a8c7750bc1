// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums in float64 on the CPU in the order that router.h has for the slots of a token.
#pragma once

#include "router.h"

namespace duomoe::math {

// The sum of f(i) over i < n.
template <typename F>
DUOMOE_FN double lane_sum(int64_t n, F f) {
  double lane[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % kLanes] += f(i);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

}  // namespace duomoe::math
