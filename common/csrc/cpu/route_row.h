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
struct RouterOptions : WeightOptions {
  math::Score score;
  float scale;

  explicit RouterOptions(const Call& call)
      : score(call.choice<math::Score>("score")), scale(static_cast<float>(call.real("scale"))) {
    const auto choice = call.choice<math::Normalize>("normalize");
    normalize = choice == math::Normalize::kAlways ||
                (choice == math::Normalize::kIfKGreater1 && call.axis('K') > 1);
    eps_mode = call.choice<math::EpsMode>("eps_mode");
    eps = static_cast<float>(call.real("eps"));
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
    for (float** array : {&converted, &exponentials, &scores, &rescued, &slopes}) {
      *array = arena.take<float>(n);
    }
    if (!with_slopes || kind == math::Score::kSoftmax) slopes = nullptr;
  }

  // Any other id marks an unused slot.
  bool has(int32_t id) const { return id >= 0 && id < experts; }
};

}  // namespace duomoe::cpu
