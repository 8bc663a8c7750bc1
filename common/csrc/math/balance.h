// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Balancing without a loss: the two ways in which the selection bias follows the experts' load.
#pragma once

#include "scalar.h"

namespace duomoe::math {

// sign(mean load - n) for a load n of E experts, exact in integers.
DUOMOE_FN float load_step(int64_t total, int64_t experts, int64_t load) {
  const int64_t excess = experts * load - total;
  return excess < 0 ? 1.0f : excess > 0 ? -1.0f : 0.0f;
}

// The mean of the experts' steps.
DUOMOE_FN float mean_step(int64_t steps, int64_t experts) {
  return static_cast<float>(static_cast<double>(steps) / static_cast<double>(experts));
}

// bias + rate * step, less `mean_step` times rate; every operation rounds to float32, as in models
// that keep the bias in it.
DUOMOE_FN float stepped_bias(float bias, float rate, float step, float mean_step) {
  const float s = step - mean_step;
  return s == 0.0f ? bias : bias + rate * s;
}

// The bin of the bias that an expert of score s would need to reach a token's cutoff, cutoff - s:
// B equal bins over [lower, upper), the first and last of which take what lies beyond. -1 for a
// pair that is not counted (NaN). An excluded expert (logit -inf) has s = -inf: no bias is enough.
DUOMOE_FN int32_t quantile_bin(float cutoff, float z, float chosen_on, float lower, float upper,
                               int32_t bins) {
  const float s = z == -infinity() ? z : chosen_on;
  const float at = ((cutoff - s) - lower) * static_cast<float>(bins) / (upper - lower);
  if (at != at) return -1;
  if (at < 0.0f) return 0;
  return at >= static_cast<float>(bins) ? bins - 1 : static_cast<int32_t>(at);
}

// The K/E quantile of one expert's bins, linear within a bin: the bias at which K/E of the tokens
// would select it. The bin is found in integers, since a rounded K/E * n may pass over the bin that
// holds it. `fallback` where nothing was counted.
DUOMOE_FN double bin_quantile(const int32_t* counts, int64_t bins, int64_t top_k, int64_t experts,
                              double lower, double upper, double fallback) {
  int64_t total = 0;
  for (int64_t b = 0; b < bins; ++b) total += counts[b];
  const int64_t wanted = top_k * total;  // times E, as `below` is
  int64_t below = 0;
  for (int64_t b = 0; b < bins; ++b) {
    const int64_t here = experts * counts[b];
    if (here > 0 && below + here >= wanted) {
      const double inside = static_cast<double>(wanted - below) / static_cast<double>(here);
      return lower +
             (static_cast<double>(b) + inside) * ((upper - lower) / static_cast<double>(bins));
    }
    below += here;
  }
  return fallback;
}

// Before the mean over the experts is taken off.
DUOMOE_FN double decayed_bias(double decay, double bias, double quantile) {
  return decay * bias + (1.0 - decay) * quantile;
}

}  // namespace duomoe::math
