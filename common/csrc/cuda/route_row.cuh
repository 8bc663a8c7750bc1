// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What the ops on logits do with one token, by one warp with the row in shared memory: scores,
// selection values and, for `route` and `route_bwd`, options, weights and the split of the tokens
// over sequences. The formulas are those of math/router.h, the orders of sums those of the CPU
// kernels, so that the bits are the same.
#pragma once

#include "logits.cuh"

namespace duomoe::cuda {

using math::Counts;
using math::Divisor;
using math::EpsMode;
using math::kStreams;
using math::Normalize;
using math::Score;
using math::SelectOn;

constexpr int kMaxWarps = 8;  // of a block
constexpr int64_t kWordBytes = sizeof(float);

inline Status row_too_long(int64_t experts, int64_t bytes, size_t limit) {
  return {std::to_string(experts) + " experts need " + std::to_string(bytes) +
          " bytes of shared memory for one token, and a block of this GPU has at most " +
          std::to_string(limit)};
}

// Launches a kernel whose warps take a token each, with `words` words of shared memory for its row:
// kMaxWarps warps to a block, or as many as have room.
template <typename... Parameters, typename... Arguments>
Status launch_tokens(Queue& queue, void (*kernel)(Parameters...), int64_t tokens, int64_t experts,
                     int64_t words, const Arguments&... arguments) {
  if (tokens == 0) return queue.status();
  const size_t limit = queue.shared_limit();
  const auto bytes = [&](int warps) { return kWordBytes * warps * words; };
  int warps = kMaxWarps;
  while (warps > 1 && bytes(warps) > static_cast<int64_t>(limit)) warps /= 2;
  if (queue.status().ok() && bytes(warps) > static_cast<int64_t>(limit))
    return row_too_long(experts, bytes(warps), limit);
  queue.allow_shared(kernel, limit);
  queue.launch(kernel, ceil_div(tokens, warps), warps * kLanes, bytes(warps), arguments...);
  return queue.status();
}

// The options that both directions share.
struct RouterOptions {
  Score score;
  EpsMode eps_mode;
  bool normalize;
  float eps, scale;
};

// math::weight_divisor's value for a finite sum, in fewer steps and with the same bits.
struct SumDivisor {
  float factor, offset, least;

  explicit SumDivisor(const RouterOptions& options)
      : factor(options.normalize ? 1.0f : 0.0f),
        offset(!options.normalize                  ? 1.0f
               : options.eps_mode == EpsMode::kAdd ? options.eps
                                                   : 0.0f),
        least(options.normalize && options.eps_mode == EpsMode::kClamp ? options.eps : 0.0f) {}
  __device__ float operator()(float sum) const {
    return fmaxf(math::fma(sum, factor, offset), least);
  }
};

inline RouterOptions options_of(const Call& call) {
  const auto normalize = call.choice<Normalize>("normalize");
  return {.score = call.choice<Score>("score"),
          .eps_mode = call.choice<EpsMode>("eps_mode"),
          .normalize = normalize == Normalize::kAlways ||
                       (normalize == Normalize::kIfKGreater1 && call.axis('K') > 1),
          .eps = static_cast<float>(call.real("eps")),
          .scale = static_cast<float>(call.real("scale"))};
}

// Where the local tokens stand in the whole batch, which is cut into sequences of equal length.
// Under sharding a call sees a slice that starts at `*first_token`, known to the device alone;
// tokens past `total` are padding of the slice.
struct TokenRange {
  const int32_t* first_token;  // null: 0
  int64_t tokens, total, sequence_length;

  __device__ int64_t first() const { return first_token && *first_token > 0 ? *first_token : 0; }
  __device__ int64_t first_sequence() const { return first() > 0 ? first() / sequence_length : 0; }
  // One past the last local token that is not padding.
  __device__ int64_t last() const {
    const int64_t last = total - first();
    return last < 0 ? 0 : last < tokens ? last : tokens;
  }
};

inline TokenRange range_of(const Call& call) {
  const TensorView& start = call.in("first_token");
  const int64_t total = start.present() ? call.integer("total_tokens") : call.axis('T');
  return {.first_token = start.present() ? start.as<const int32_t>() : nullptr,
          .tokens = call.axis('T'),
          .total = total,
          .sequence_length = total / call.axis('S')};
}

// The local tokens [begin, end) of one sequence; empty if begin >= end.
struct Run {
  int64_t sequence, begin, end;
};
// Run i of the slice: that of the i-th sequence from the slice's first token on.
__device__ inline Run run_of(const TokenRange& range, int64_t i) {
  const int64_t sequence = range.first_sequence() + i, first = range.first(), last = range.last();
  const int64_t begin = sequence * range.sequence_length - first;
  const int64_t end = begin + range.sequence_length;
  return {sequence, begin > 0 ? begin : 0, end < last ? end : last};
}

// One token's row, held by a warp, which has its scores in shared memory.
struct Row {
  Score score;
  int experts;
  Logits z;
  float* s;  // [E] scores; exponentials for softmax
  bool moderate = true;
  float peak = 0;     // the largest logit; not of moderate rows
  float inverse = 0;  // 1 / sum of the exponentials
  float logsumexp = 0;
  float top = 0;    // the log scale of the largest score; not of moderate rows
  float share = 0;  // P = unscaled_probability * share

  __device__ void compute() {
    const float limit = math::moderate_limit(score);
    moderate = all_lanes(experts, [&](int e) { return math::absolute(z(e)) <= limit; });
    if (!moderate) {
      float largest = -math::infinity();
      for (int e = lane_id(); e < experts; e += kLanes) largest = z(e) > largest ? z(e) : largest;
      peak = warp_max(largest);
      top = math::log_scale(score, peak, peak);
    }
    const float sum = row_sum(experts, [&](int e, float c) {
      const float u = exponential_of(e);
      if (score == Score::kSoftmax) s[e] = u;
      return c + u;
    });
    inverse = 1.0f / sum;
    logsumexp = moderate ? math::log(sum) : peak + math::log(sum);
    if (score == Score::kSoftmax) {
      share = inverse;
    } else {
      for (int e = lane_id(); e < experts; e += kLanes) s[e] = elementwise_score(z(e));
      __syncwarp();
      const float total =
          row_sum(experts, [&](int e, float c) { return c + unscaled_probability(e); });
      share = moderate ? 1.0f / total : math::share_factor(total, peak);
    }
    __syncwarp();
  }

  __device__ float exponential_of(int e) const {
    return moderate ? math::exp_moderate(z(e)) : math::exp(z(e) - peak);
  }
  __device__ float exponential(int e) const {
    return score == Score::kSoftmax ? s[e] : exponential_of(e);
  }

  __device__ float elementwise_score(float z) const {
    if (moderate && score == Score::kSigmoid)
      return math::moderate_sigmoid(z, math::exp_moderate(z)).value;
    return math::elementwise_score(score, z);
  }

  __device__ float score_of(int e) const {
    return score == Score::kSoftmax ? s[e] * inverse : s[e];
  }

  __device__ float slope(int e) const {
    if (moderate && score == Score::kSigmoid)
      return math::moderate_sigmoid(z(e), math::exp_moderate(z(e))).complement;
    return math::log_score_slope(score, z(e));
  }

  __device__ float unscaled_probability(int e) const {
    if (moderate || score == Score::kSoftmax || !math::may_underflow(top)) return s[e];
    return math::exp(math::log_scale(score, z(e), peak) - top) * math::score_factor(score, z(e));
  }

  // P: the softmax of z, or s / sum of s.
  __device__ float probability(int e) const { return unscaled_probability(e) * share; }

  // grad[e] = P_e (g_e - sum P g) slope_e, g being the cotangent of P.
  __device__ void probability_gradient(const float* g, float* grad) const {
    const float mean = share * row_sum(experts, [&](int e, float c) {
                         return math::fma(unscaled_probability(e), g[e], c);
                       });
    // NaN scores whose shares nobody asked for.
    const bool unasked = mean != mean && all_lanes(experts, [&](int e) { return g[e] == 0.0f; });
    for (int e = lane_id(); e < experts; e += kLanes) {
      const float part = probability(e) * (g[e] - mean);
      grad[e] = unasked ? 0.0f : score == Score::kSoftmax ? part : part * slope(e);
    }
  }
};

// What the experts of a row are ordered by.
struct SelectionValue {
  const Row& row;
  bool on_logit;
  const float* bias;  // may be null

  __device__ float chosen_on(int e) const { return on_logit ? row.z(e) : row.score_of(e); }
  __device__ float operator()(int e) const {
    return math::selection_value(row.z(e), chosen_on(e), bias ? bias[e] : 0.0f);
  }
};

// The weights of a token's slots before `scale`; an id outside [0, E) is an unused slot with weight
// 0.
struct SlotWeights {
  const Row& row;
  bool normalize;
  math::WeightBasis basis;
  Divisor divisor;

  __device__ SlotWeights(const RouterOptions& options, const Row& r, const int32_t* ids, int top_k)
      : row(r), normalize(options.normalize), basis{false, 0.0f, 1.0f} {
    if (!row.moderate) {
      float top_logit = -math::infinity();
      for (int k = lane_id(); k < top_k; k += kLanes) {
        if (used(ids[k]) && row.z(ids[k]) > top_logit) top_logit = row.z(ids[k]);
      }
      basis = math::weight_basis(row.score, normalize, options.eps, warp_max(top_logit), row.peak);
    }
    const float sum = lane_sum(top_k, [&](int64_t k) { return before_division(ids[k]); });
    divisor = math::weight_divisor(normalize, options.eps_mode, basis.damped(sum), options.eps);
  }

  __device__ bool used(int32_t id) const { return id >= 0 && id < row.experts; }

  __device__ float before_division(int32_t id) const {
    return used(id) ? basis.score(row.score, row.z(id), row.score_of(id), row.inverse) : 0.0f;
  }

  __device__ float operator()(int32_t id) const {
    const float weight = before_division(id);
    return normalize && used(id) ? weight * basis.damp / divisor.value * basis.damp : weight;
  }
};

}  // namespace duomoe::cuda
