// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The losses from a routing's statistics, summed in float64 in lanes and rounded once.
#pragma once

#include "lane_sum.h"

namespace duomoe::math {

DUOMOE_FN int64_t occupied_sequences(const int32_t* num_tokens, int64_t sequences) {
  int64_t occupied = 0;
  for (int64_t s = 0; s < sequences; ++s) occupied += num_tokens[s] > 0;
  return occupied;
}

DUOMOE_FN int64_t total_tokens(const int32_t* num_tokens, int64_t sequences) {
  int64_t total = 0;
  for (int64_t s = 0; s < sequences; ++s) total += num_tokens[s];
  return total;
}

// E / (K n^2) / (number of sequences with n > 0); 0 for an empty sequence.
DUOMOE_FN double load_balancing_factor(int64_t tokens, int64_t occupied, int64_t experts,
                                       int64_t top_k) {
  if (tokens <= 0) return 0.0;
  const double n = static_cast<double>(tokens);
  return static_cast<double>(experts) /
         (static_cast<double>(top_k) * n * n * static_cast<double>(occupied));
}

DUOMOE_FN float load_balancing_loss(const int32_t* counts, const float* score_sums,
                                    const int32_t* num_tokens, int64_t sequences, int64_t experts,
                                    int64_t top_k, double coeff) {
  const int64_t occupied = occupied_sequences(num_tokens, sequences);
  const double loss = lane_sum(sequences, [=](int64_t s) {
    const double sum = lane_sum(experts, [=](int64_t e) {
      return static_cast<double>(counts[s * experts + e]) *
             static_cast<double>(score_sums[s * experts + e]);
    });
    const double factor = load_balancing_factor(num_tokens[s], occupied, experts, top_k);
    return factor > 0.0 ? factor * sum : 0.0;
  });
  return static_cast<float>(coeff * loss);
}

DUOMOE_FN float z_loss(const float* logsumexp_sq, const int32_t* num_tokens, int64_t sequences,
                       double coeff) {
  const int64_t tokens = total_tokens(num_tokens, sequences);
  const double sum =
      lane_sum(sequences, [=](int64_t s) { return static_cast<double>(logsumexp_sq[s]); });
  return tokens > 0 ? static_cast<float>(coeff * sum / static_cast<double>(tokens)) : 0.0f;
}

DUOMOE_FN float scaled_aux_loss(double coeff, double factor, double sum) {
  return factor == 0.0 ? 0.0f : static_cast<float>(coeff * factor * sum);
}

// E / (K n^2) for a count that may be known on the device only, as float32; 0 for n <= 0.
DUOMOE_FN double aux_loss_factor(float tokens, int64_t experts, int64_t top_k) {
  if (!(tokens > 0.0f)) return 0.0;
  const double n = static_cast<double>(tokens);
  return static_cast<double>(experts) / (static_cast<double>(top_k) * n * n);
}

// The loss over a matrix of scores with columns c: coeff * E / (K n^2) * sum_c loads_c * sums_c. A
// column is an expert, or an expert of one of several sequences.
DUOMOE_FN float aux_loss(const float* loads, const float* sums, int64_t columns, float tokens,
                         int64_t experts, int64_t top_k, double coeff) {
  const double sum = lane_sum(columns, [=](int64_t c) {
    return static_cast<double>(loads[c]) * static_cast<double>(sums[c]);
  });
  return scaled_aux_loss(coeff, aux_loss_factor(tokens, experts, top_k), sum);
}

DUOMOE_FN float aux_loss_gradient(double factor, float load) {
  return factor == 0.0 ? 0.0f : static_cast<float>(factor * static_cast<double>(load));
}

}  // namespace duomoe::math
