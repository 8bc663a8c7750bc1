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

// Sums over the experts of a row: column c adds experts c, c + kColumns, c + 2 kColumns, ... in
// order; lane l owns the kAdjacent neighbouring columns from kAdjacent l on (what a vector load of
// a GPU thread holds) and joins them as (0 + 1) + (2 + 3); then the lanes are joined in a butterfly
// (l with l ^ 16, 8, 4, 2, 1). Sums over the slots of a token: lane l adds slots l, l + 32, l + 64,
// ... in order, then the same butterfly.
constexpr int kLanes = 32;
constexpr int kAdjacent = 4;
constexpr int kColumns = kAdjacent * kLanes;

// Sums over the tokens of a sequence: it is cut into chunks; within a chunk, stream j adds tokens
// j, j + kStreams, ... in order, with fma; the streams are joined in order from 0. Strand i then
// adds the sequence's chunks i, i + kStrands, ... in order, and the strands are joined in order
// from 0. A call has about kChunks chunks, whatever the number of its tokens.
constexpr int kStreams = 8;
constexpr int kStrands = 16;
constexpr int kChunks = 256;
constexpr int kLeastStreamTokens = 2;
// Tokens of a chunk in a call on `tokens` tokens.
DUOMOE_FN int64_t chunk_length(int64_t tokens) {
  constexpr int64_t kSpan = static_cast<int64_t>(kStreams) * kChunks;
  const int64_t n = (tokens + kSpan - 1) / kSpan;
  return kStreams * (n > kLeastStreamTokens ? n : kLeastStreamTokens);
}

// A row is moderate if |z| <= moderate_limit(score) for all its logits z: then no exponential,
// score, sum or ratio of these leaves the normal numbers, and a shorter way leads to the same
// results (other roundings; both backends choose by this rule):
//   u = exp_moderate(z), D = sum of u, 1 / D, logsumexp = log(D)
//   softmax:       s = P = u / D
//   sigmoid:       y = 1 / (1 + u), s = z >= 0 ? 1 - y : u y, 1 - s = y
//   sqrtsoftplus:  s = elementwise_score(z)
// For softmax the limit is such that ratios of scores are at least e^kRescueBelow.
DUOMOE_FN float moderate_limit(Score score) {
  return score == Score::kSoftmax ? 0.5f * kModerate : kModerate;
}

// sigmoid(z) and 1 - sigmoid(z) of a moderate logit, u being exp_moderate(z).
DUOMOE_FN SigmoidPair moderate_sigmoid(float z, float u) {
  const float y = reciprocal(1.0f + u);
  return {z >= 0.0f ? 1.0f - y : u * y, y};
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
