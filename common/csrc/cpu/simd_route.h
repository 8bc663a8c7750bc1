// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The router's part of simd_loops.h, whose rules hold here.
#pragma once

#include "simd_sums.h"

namespace duomoe::cpu {
namespace {

// Sets row.z, which is the logits themselves where they need neither conversion nor padding.
void load_row(DType dtype, const void* logits, RouteRow& row) {
  const int64_t experts = row.experts, n = padded(experts);
  float* converted = row.converted;
  row.z = converted;
  if (dtype == DType::kFloat32 && experts == n) {
    row.z = static_cast<const float*>(logits);
    return;
  }
  load(dtype, logits, converted, experts);
  for (int64_t i = experts; i < n; ++i) converted[i] = -infinity();
}

// f(i) for every element of a padded row; what f writes does not overlap with what it reads.
template <typename F>
DUOMOE_INLINE void for_row(int64_t n, F f) {
  for_lanes(n, [=](int64_t i, int) { f(i); });
}

// What a row's logits reach, in kLanes lanes: the bits of the largest magnitude, which for a NaN
// are above every number's, and the largest logit, -inf where there is none but NaN.
struct Reach {
  static constexpr int kParts = kLanes / kStrip;
  IntStrip magnitude[kParts] = {};
  Strip high[kParts];

  Reach(const float* z, int64_t experts, int64_t n) {
    for (Strip& h : high) h = Strip{} - infinity();
    int64_t i = 0;
    for (; i + kLanes <= experts; i += kLanes) {
#pragma GCC unroll 8
      for (int p = 0; p < kParts; ++p) add(p, load_strip(z + i + p * kStrip), ~IntStrip{});
    }
    if (i == n) return;
#pragma GCC unroll 8
    for (int p = 0; p < kParts; ++p) {  // the padding, -inf, has no magnitude
      const int32_t inside = static_cast<int32_t>(experts - i) - p * kStrip;
      add(p, load_strip(z + i + p * kStrip), kEachOfStrip < inside);
    }
  }

  DUOMOE_INLINE void add(int p, const Strip& z, const IntStrip& inside) {
    const IntStrip bits = reinterpret_cast<const IntStrip&>(z) & 0x7fffffff & inside;
    magnitude[p] = larger_of(bits, magnitude[p]);
    high[p] = larger_of(z, high[p]);
  }

  bool within(float limit) const {
    IntStrip most = magnitude[0];
    for (const IntStrip& other : magnitude) most = larger_of(most, other);
    return !any(most > static_cast<int32_t>(bits_of(limit)));
  }
  float peak() const {
    Strip peak = high[0];
    for (const Strip& other : high) peak = larger_of(peak, other);
    if constexpr (kStrip >= 16) peak = larger_of(peak, distant<8>(peak));
    if constexpr (kStrip >= 8) peak = larger_of(peak, distant<4>(peak));
    peak = larger_of(peak, distant<2>(peak));
    return larger_of(peak, distant<1>(peak))[0];
  }
};

// A moderate row. The padding's exponentials and scores, by the mask, are +0.
template <Score kScore, bool kPadded, bool kSlopes>
void moderate_row(RouteRow& row, int64_t n) {
  const float* z = row.z;
  float* __restrict exponentials = row.exponentials, * __restrict scores = row.scores, * __restrict slopes = row.slopes;
  const auto kept = [=](int64_t i, float x) {
    return kPadded ? masked(mask_of(z[i] > -infinity()), x) : x;
  };
  for_row(n, [=](int64_t i) {
    const float u = exp_moderate(z[i]);
    exponentials[i] = kept(i, u);
    if (kScore == Score::kSigmoid) {
      const SigmoidPair pair = moderate_sigmoid(z[i], u);
      scores[i] = kept(i, pair.value);
      if (kSlopes) slopes[i] = pair.complement;
    }
  });
  if (kScore == Score::kSqrtSoftplus) {
    for_row(n, [=](int64_t i) { scores[i] = elementwise_score(kScore, z[i]); });
    if (kSlopes) for_row(n, [=](int64_t i) { slopes[i] = log_score_slope(kScore, z[i]); });
  }
  const float sum = row_sum(exponentials, n), inverse = 1.0f / sum;
  row.inverse = inverse;
  row.logsumexp = log(sum);
  if (kScore == Score::kSoftmax) {
    for_row(n, [=](int64_t i) { scores[i] = exponentials[i] * inverse; });
    row.shares = exponentials;
    row.share = inverse;
  } else {
    row.shares = scores;
    row.share = 1.0f / row_sum(scores, n);
  }
}

template <Score kScore>
void moderate_row(RouteRow& row, int64_t n) {
  const bool padding = row.experts != n;
  if (kScore != Score::kSoftmax && row.slopes) {
    padding ? moderate_row<kScore, true, true>(row, n) : moderate_row<kScore, false, true>(row, n);
  } else {
    padding ? moderate_row<kScore, true, false>(row, n)
            : moderate_row<kScore, false, false>(row, n);
  }
}

// Scores, and slopes where they are wanted. kNormal: every e^-|z| is a normal number.
template <Score kScore, bool kNormal>
void elementwise_scores(const RouteRow& row, int64_t n) {
  const float* z = row.z;
  float* __restrict scores = row.scores, * __restrict slopes = row.slopes;
  if (kScore == Score::kSigmoid && slopes) {  // both from the same exponential
    for_row(n, [=](int64_t i) {
      const SigmoidPair pair = sigmoid_pair<kNormal>(z[i]);
      scores[i] = pair.value;
      slopes[i] = pair.complement;
    });
    return;
  }
  if (slopes) for_row(n, [=](int64_t i) { slopes[i] = log_score_slope(kScore, z[i]); });
  for_row(n, [=](int64_t i) {
    scores[i] =
        kScore == Score::kSigmoid ? sigmoid<kNormal>(z[i]) : elementwise_score(kScore, z[i]);
  });
}

template <Score kScore, bool kNormal>
void elementwise_row(RouteRow& row, int64_t n) {
  const float* z = row.z;
  elementwise_scores<kScore, kNormal>(row, n);
  row.shares = row.scores;
  const float peak = row.peak, top = log_scale(kScore, peak, peak);
  if (!may_underflow(top)) {
    row.share = share_factor(row_sum(row.scores, n), peak);
    return;
  }
  float* __restrict shares = row.rescued;
  for_row(n, [=](int64_t i) {
    shares[i] = exp(log_scale(kScore, z[i], peak) - top) * score_factor(kScore, z[i]);
  });
  row.shares = shares;
  row.share = share_factor(row_sum(shares, n), peak);
}

// e^(z - peak). kNormal: every one is a normal number.
template <bool kNormal>
void shifted_exponentials(const float* z, int64_t n, float peak, float* __restrict exponentials) {
  for_row(n, [=](int64_t i) { exponentials[i] = exp_nonpositive<kNormal>(z[i] - peak); });
}

// A row that is not moderate.
void general_row(RouteRow& row, int64_t n, const Reach& reach) {
  const float *z = row.z, peak = row.peak = reach.peak();
  const bool padding = row.experts != n;
  if (row.score == Score::kSigmoid) {
    !padding&& reach.within(-kLowestNormal) ? elementwise_row<Score::kSigmoid, true>(row, n)
                                            : elementwise_row<Score::kSigmoid, false>(row, n);
  }
  if (row.score == Score::kSqrtSoftplus) elementwise_row<Score::kSqrtSoftplus, false>(row, n);
  float* __restrict exponentials = row.exponentials;
  // z - peak is then at least kLowestNormal.
  !padding&& reach.within(-0.5f * kLowestNormal)
      ? shifted_exponentials<true>(z, n, peak, exponentials)
      : shifted_exponentials<false>(z, n, peak, exponentials);
  const float sum = row_sum(exponentials, n), inverse = 1.0f / sum;
  row.inverse = inverse;
  row.logsumexp = peak + log(sum);
  if (row.score != Score::kSoftmax) return;
  float* __restrict scores = row.scores;
  for_row(n, [=](int64_t i) { scores[i] = exponentials[i] * inverse; });
  row.shares = exponentials;
  row.share = inverse;
}

void row_scores(DType dtype, const void* logits, RouteRow& row) {
  const int64_t n = padded(row.experts);
  load_row(dtype, logits, row);
  const Reach reach(row.z, row.experts, n);
  row.moderate = reach.within(moderate_limit(row.score));
  if (!row.moderate) return general_row(row, n, reach);
  if (row.score == Score::kSoftmax) return moderate_row<Score::kSoftmax>(row, n);
  if (row.score == Score::kSigmoid) return moderate_row<Score::kSigmoid>(row, n);
  moderate_row<Score::kSqrtSoftplus>(row, n);
}

void add_shares(const float* shares, float share, int64_t n, float* __restrict sums) {
  for_row(n, [=](int64_t i) { sums[i] = fma(shares[i], share, sums[i]); });
}

bool all_zero(const float* x, int64_t n) {
  bool zero = true;
  for (int64_t i = 0; i < n; ++i) zero = zero && x[i] == 0.0f;
  return zero;
}

// What RouteRow's gradient is made of besides the row.
struct GradientTerms {
  const float* grad_shares;
  float mean, softmax_factor, rest;  // mean: sum of P gP
  bool shares;                       // whether the shares' part is not 0
};

// A part whose factor is 0 is left out, so that no NaN enters through it.
template <bool kSlopes, bool kSoftmaxPart, bool kRest>
void gradient_loop(const RouteRow& row, const GradientTerms& terms, float* __restrict grad) {
  const float *shares = row.shares, *slopes = row.slopes, *exponentials = row.exponentials;
  const float* grad_shares = terms.grad_shares;
  const float share = row.share, inverse = row.inverse, mean = terms.mean, rest = terms.rest;
  const float factor = inverse * terms.softmax_factor;
  const uint32_t keep = mask_of(terms.shares);
  for_row(padded(row.experts), [=](int64_t i) {
    float g = shares[i] * share * (grad_shares[i] - mean);
    if (kSlopes) g *= slopes[i];
    g = masked(keep, g);
    if (kSoftmaxPart) g = fma(exponentials[i], factor, g);
    if (kRest) g = fma(-(exponentials[i] * inverse), rest, g);
    grad[i] = g;
  });
}

template <bool kSlopes>
void gradient_loop(const RouteRow& row, const GradientTerms& terms, float* grad) {
  const bool softmax_part = terms.softmax_factor != 0.0f;
  if (!kSlopes && terms.rest != 0.0f) {
    softmax_part ? gradient_loop<false, true, true>(row, terms, grad)
                 : gradient_loop<false, false, true>(row, terms, grad);
  } else {
    softmax_part ? gradient_loop<kSlopes, true, false>(row, terms, grad)
                 : gradient_loop<kSlopes, false, false>(row, terms, grad);
  }
}

void row_gradient(const RouteRow& row, const float* grad_shares, float softmax_factor, float rest,
                  float* grad) {
  const int64_t n = padded(row.experts);
  const float mean = row.share * row_dot(row.shares, grad_shares, n);
  // NaN scores whose shares nobody asked for have no part.
  const bool unasked = mean != mean && all_zero(grad_shares, n);
  const GradientTerms terms{grad_shares, mean, softmax_factor, rest, !unasked};
  row.slopes ? gradient_loop<true>(row, terms, grad) : gradient_loop<false>(row, terms, grad);
}

// --- weights -------------------------------------------------------------------------------------

Divisor row_weights(const RouteRow& row, const WeightOptions& options, const int32_t* ids,
                    int64_t top_k, float* __restrict weights) {
  const uint32_t experts = static_cast<uint32_t>(row.experts);
  const float *z = row.z, *scores = row.scores;
  auto has = [=](int32_t id) { return static_cast<uint32_t>(id) < experts; };
  WeightBasis basis{false, -infinity(), 1.0f};  // that of every moderate row
  if (!row.moderate) {
    float top_logit = -infinity();
    for (int64_t k = 0; k < top_k; ++k) {
      if (!has(ids[k])) continue;
      const float logit = z[ids[k]];
      top_logit = logit > top_logit ? logit : top_logit;
    }
    basis = weight_basis(row.score, options.normalize, options.eps, top_logit, row.peak);
  }
  for (int64_t k = 0; k < top_k; ++k) weights[k] = has(ids[k]) ? scores[ids[k]] : 0.0f;
  if (basis.relative) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t e = ids[k];
      if (has(e)) weights[k] = basis.score(row.score, z[e], scores[e], row.inverse);
    }
  }
  const float sum = lane_sum(top_k, [=](int64_t k) { return weights[k]; });
  const Divisor divisor =
      weight_divisor(options.normalize, options.eps_mode, basis.damped(sum), options.eps);
  if (options.normalize) {
    const float damp = basis.damp, value = divisor.value;
    for (int64_t k = 0; k < top_k; ++k) {
      const float weight = weights[k] * damp / value * damp;
      weights[k] = has(ids[k]) ? weight : 0.0f;
    }
  }
  return divisor;
}

}  // namespace
}  // namespace duomoe::cpu
