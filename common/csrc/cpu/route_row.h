// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What `route` and `route_bwd` do with one token: scores, weights and the split of the tokens over
// sequences and chunks.
#pragma once

#include <algorithm>
#include <vector>

#include "../math/router.h"
#include "../registry.h"
#include "arena.h"
#include "simd.h"

namespace duomoe::cpu {

// The options that both directions share.
struct RouterOptions {
  math::Score score;
  bool normalize;
  math::EpsMode eps_mode;
  float eps;
  float scale;

  explicit RouterOptions(const Call& call)
      : score(call.choice<math::Score>("score")),
        eps_mode(call.choice<math::EpsMode>("eps_mode")),
        eps(static_cast<float>(call.real("eps"))),
        scale(static_cast<float>(call.real("scale"))) {
    const auto choice = call.choice<math::Normalize>("normalize");
    normalize = choice == math::Normalize::kAlways ||
                (choice == math::Normalize::kIfKGreater1 && call.axis('K') > 1);
  }
};

// Where the local tokens stand in the whole batch, which is cut into sequences of equal length.
// Under sharding a call sees a slice that starts at `first` (a negative start counts as 0); tokens
// past `total` are padding of the slice.
struct TokenRange {
  int64_t first = 0, total = 0, sequence_length = 0;

  explicit TokenRange(const Call& call) {
    const TensorView& start = call.in("first_token");
    first = start.present() ? std::max(0, *start.as<const int32_t>()) : 0;
    total = start.present() ? call.integer("total_tokens") : call.axis('T');
    sequence_length = total / call.axis('S');
  }
  int64_t sequence(int64_t token) const { return (first + token) / sequence_length; }
  bool inside(int64_t token) const { return first + token < total; }
  // How many of `tokens` local tokens are no padding.
  int64_t clip(int64_t tokens) const {
    return std::max<int64_t>(0, std::min(tokens, total - first));
  }
};

// The arrays of one row.
struct RowArrays : RouteRow {
  static constexpr int64_t kArrays = 5;

  RowArrays(math::Score kind, int64_t num_experts, bool with_slopes, Arena& arena) {
    const int64_t n = padded(num_experts);
    score = kind;
    experts = num_experts;
    for (float** array : {&z, &exponentials, &scores, &rescued, &slopes}) {
      *array = arena.take<float>(n);
    }
    if (!with_slopes || kind == math::Score::kSoftmax) slopes = nullptr;
  }

  // Any other id marks an unused slot.
  bool has(int32_t id) const { return id >= 0 && id < experts; }
};

// Sum over the slots of a token, in the lane order of math/router.h.
template <typename F>
float slot_sum(int64_t top_k, F f) {
  float lane[math::kLanes] = {};
  for (int64_t k = 0; k < top_k; ++k) lane[k % math::kLanes] += f(k);
  for (int width = math::kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

// The weights of a token's slots before `scale`; unused slots get 0.
inline math::Divisor row_weights(const RouterOptions& options, const RowArrays& r,
                                 const int32_t* indices, int64_t top_k, float* weights) {
  float top_logit = -math::infinity();
  for (int64_t k = 0; k < top_k; ++k) {
    if (r.has(indices[k]) && r.z[indices[k]] > top_logit) top_logit = r.z[indices[k]];
  }
  const math::WeightBasis basis =
      math::weight_basis(options.score, options.normalize, options.eps, top_logit, r.peak);
  for (int64_t k = 0; k < top_k; ++k) {
    const int32_t e = indices[k];
    weights[k] = r.has(e) ? basis.score(options.score, r.z[e], r.scores[e], r.inverse) : 0.0f;
  }
  const float sum = slot_sum(top_k, [&](int64_t k) { return weights[k]; });
  const math::Divisor divisor =
      math::weight_divisor(options.normalize, options.eps_mode, basis.damped(sum), options.eps);
  if (options.normalize) {
    for (int64_t k = 0; k < top_k; ++k) {
      if (r.has(indices[k])) weights[k] = weights[k] * basis.damp / divisor.value * basis.damp;
    }
  }
  return divisor;
}

}  // namespace duomoe::cpu
