// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The router's formulas for one expert of one token, and the orders in which sums are taken. Both
// backends call these and nothing else, so that a CPU run proves a GPU run.
//
// A score is kept as s = exp(a) * q with a <= 0 and q in (0, inf), so that ratios of scores exist
// even where the scores themselves underflow:
//   softmax:       a = z - max z, q = 1, s = exp(a) / D with D the sum of exp(a) over all experts
//   sigmoid:       a = min(z, 0), q = 1 / (1 + exp(-|z|))
//   sqrtsoftplus:  a = min(z, 0) / 2, q = sqrt(softplus(z)) for z >= 0,
//                  q = sqrt(log1p(exp(z)) / exp(z)) below
#pragma once

#include "scalar.h"

namespace duomoe::math {

// The orders of the choices in the op table.
enum class Score { kSoftmax, kSigmoid, kSqrtSoftplus };
enum class SelectOn { kScore, kLogit };
enum class Normalize { kNever, kAlways, kIfKGreater1 };
enum class EpsMode { kAdd, kClamp };
enum class Counts { kActual, kUnbiased };

// Sums over the experts of a row: lane l adds experts l, l + 32, l + 64, ... in order, then lanes
// are joined in a butterfly (l with l ^ 16, 8, 4, 2, 1).
constexpr int kLanes = 32;

// Sums over the tokens of a sequence: it is cut into at most kMaxChunks chunks; within a chunk,
// stream j adds tokens j, j + kStreams, ... in order; the streams are joined in order, then the
// chunks in order.
constexpr int kStreams = 8;
constexpr int kChunkTokens = 64;
constexpr int kMaxChunks = 256;
DUOMOE_FN int64_t chunk_length(int64_t sequence_tokens) {
  constexpr int64_t kSpan = static_cast<int64_t>(kChunkTokens) * kMaxChunks;
  const int64_t n = (sequence_tokens + kSpan - 1) / kSpan;
  return kChunkTokens * (n > 0 ? n : 1);
}

// Below this log scale a row's scores may underflow, and ratios are taken relative to the row's
// largest one.
constexpr float kRescueBelow = -60.0f;
DUOMOE_FN bool may_underflow(float top) { return top < kRescueBelow && top > -infinity(); }

// What sigmoid and sqrtsoftplus scores are multiplied with to sum to 1: 0 in a row in which every
// expert is excluded, so that it adds nothing to a batch's statistics.
DUOMOE_FN float share_factor(float sum, float peak) {
  return peak > -infinity() ? 1.0f / sum : 0.0f;
}

// The log scale a; for softmax, `peak` is the row's largest logit.
DUOMOE_FN float log_scale(Score score, float z, float peak) {
  if (score == Score::kSoftmax) return z - peak;
  const float a = z < 0.0f ? z : 0.0f;
  return score == Score::kSigmoid ? a : 0.5f * a;
}

// log1p(t) / t for t in [0, 1]; 1 where t is so small that log1p(t) = t.
DUOMOE_FN float log1p_ratio(float t) { return t < 1e-8f ? 1.0f : log1p_unit(t) / t; }

// The factor q, for the scores without a row normaliser.
DUOMOE_FN float score_factor(Score score, float z) {
  const float t = exp_nonpositive(-absolute(z));
  if (score == Score::kSigmoid) return 1.0f / (1.0f + t);
  return square_root(z >= 0.0f ? z + log1p_unit(t) : log1p_ratio(t));
}

// s for sigmoid and sqrtsoftplus. The square root is taken of the factor, not of softplus(z), which
// underflows at twice the logit where its root does.
DUOMOE_FN float elementwise_score(Score score, float z) {
  if (score == Score::kSigmoid) return sigmoid(z);
  const float h = exp_nonpositive(-0.5f * absolute(z)), t = h * h;
  const float root = square_root(z >= 0.0f ? z + log1p_unit(t) : log1p_ratio(t));
  return z >= 0.0f ? root : h * root;
}

// d ln s / dz: 1 - sigmoid(z), and sigmoid(z) / (2 softplus(z)), which tends to 1/2 as z falls.
// For softmax the part that the row normaliser adds, -p, is handled with the row.
DUOMOE_FN float log_score_slope(Score score, float z) {
  if (score == Score::kSoftmax) return 1.0f;
  if (score == Score::kSigmoid) return sigmoid_pair(z).complement;
  const float t = exp_nonpositive(-absolute(z));
  return 0.5f * (1.0f / ((1.0f + t) * (z >= 0.0f ? z + log1p_unit(t) : log1p_ratio(t))));
}

// g d(x^2)/dx. Doubled last: the product overflows only where the gradient does. 0 for g = 0,
// whatever x.
DUOMOE_FN float square_slope(float x, float g) { return g != 0.0f ? 2.0f * (x * g) : 0.0f; }

// The selection value: a logit of -inf marks an expert that ranks below every finite one, whatever
// its bias.
DUOMOE_FN float selection_value(float z, float chosen_on, float bias) {
  return z == -infinity() ? z : chosen_on + bias;
}

// How the scores of the selected experts enter their weights: as they are, or, where they may
// underflow, as r = s / exp(top), top being the largest one's log scale. With eps > 0 the weight is
// then
//   w = r h / (sum(r) h^2 + eps) * h,  h = exp(top / 2),
// which neither overflows nor loses eps.
struct WeightBasis {
  bool relative;
  float top_logit;
  float damp;  // h, or 1

  DUOMOE_FN_MEMBER float score(Score kind, float z, float s, float inverse) const {
    if (!relative) return s;
    if (kind == Score::kSoftmax) return exp(z - top_logit) * inverse;
    return exp(log_scale(kind, z, 0.0f) - log_scale(kind, top_logit, 0.0f)) * score_factor(kind, z);
  }
  DUOMOE_FN_MEMBER float damped(float sum) const { return sum * damp * damp; }
};
DUOMOE_FN WeightBasis weight_basis(Score score, bool normalize, float eps, float top_logit,
                                   float peak) {
  const float top = log_scale(score, top_logit, peak);
  const bool relative = normalize && top < kRescueBelow && top_logit > -infinity();
  return {relative, top_logit, relative && eps > 0.0f ? exp(0.5f * top) : 1.0f};
}

// The divisor of normalised weights, and how it acts on the gradient. With w the weights before
// `scale`, g their cotangents times `scale` and G = sum g w:
//   dL/dz_e = w_e (g_e - own * G) * slope(z_e)   for selected e,
//             and for softmax besides, for every e, -p_e * rest * G.
// add: own = 1, rest = eps / (sum + eps).  clamp: own = 1, rest = 0 above eps; own = 0, rest = 1 at
// the clamp. not normalised: own = 0, rest = 1.
struct Divisor {
  float value;
  float own;
  float rest;
};
DUOMOE_FN Divisor weight_divisor(bool normalize, EpsMode mode, float sum, float eps) {
  if (!normalize) return {1.0f, 0.0f, 1.0f};
  if (mode == EpsMode::kAdd) {
    const float value = sum + eps;
    return {value, 1.0f, eps > 0.0f ? eps / value : 0.0f};
  }
  if (sum < eps) return {eps, 0.0f, 1.0f};
  return {sum, 1.0f, 0.0f};
}

}  // namespace duomoe::math
