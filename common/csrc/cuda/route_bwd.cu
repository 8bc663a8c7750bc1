// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// One warp makes the gradient of one token, recomputed from its logits.
#include "route_row.cuh"

namespace duomoe::cuda {
namespace {

struct RouteBwd {
  RouterOptions options;
  TokenRange range;
  int experts, top_k;
  const void* logits;
  const int32_t* indices;
  const uint8_t* mask;  // may be null
  const float* grad_weights;
  const float* grad_score_sums;
  const float* grad_logsumexp_sq;
  void* grad_logits;

  __host__ __device__ int64_t words_per_warp() const {
    return 3 * static_cast<int64_t>(experts) + top_k;
  }
};

// One warp per token.
template <typename T>
__global__ void __launch_bounds__(kMaxWarps* kLanes) route_bwd_tokens(const RouteBwd a) {
  extern __shared__ float shared_memory[];
  const int64_t t = grid_warp();
  if (t >= a.range.tokens) return;
  T* result = static_cast<T*>(a.grad_logits) + t * a.experts;
  const int64_t position = a.range.first() + t;
  if (position < 0 || position >= a.range.total || (a.mask && !a.mask[t])) {
    for (int e = lane_id(); e < a.experts; e += kLanes) result[e] = math::from_float<T>(0.0f);
    return;
  }
  float* mine = shared_memory + warp_id() * a.words_per_warp();
  Row row{.score = a.options.score, .experts = a.experts, .z = mine, .s = mine + a.experts};
  float* grad = mine + 2 * a.experts;     // [E]
  float* of_slot = mine + 3 * a.experts;  // [K] what each slot adds to its expert
  row.compute(static_cast<const T*>(a.logits) + t * a.experts);

  const int32_t* ids = a.indices + t * a.top_k;
  const SlotWeights weight(a.options, row, ids, a.top_k);
  const auto cotangent = [&](int64_t k) {
    return weight.used(ids[k]) ? a.grad_weights[t * a.top_k + k] * a.options.scale : 0.0f;
  };
  const float common = lane_sum(a.top_k, [&](int64_t k) { return weight(ids[k]) * cotangent(k); });
  for (int k = lane_id(); k < a.top_k; k += kLanes) {
    if (!weight.used(ids[k])) continue;
    const float own = weight(ids[k]) * (cotangent(k) - weight.divisor.own * common);
    of_slot[k] = own * math::log_score_slope(row.score, row.z[ids[k]]);
  }

  // The part that every expert gets: P_e (gP_e - sum P gP) slope_e + softmax_e * softmax_factor -
  // s_e * rest.
  const int64_t s = position / a.range.sequence_length;
  const float softmax_factor = math::square_slope(row.logsumexp, a.grad_logsumexp_sq[s]);
  const float rest = row.score == Score::kSoftmax ? weight.divisor.rest * common : 0.0f;
  const float* grad_probabilities = a.grad_score_sums + s * a.experts;
  row.probability_gradient(grad_probabilities, grad);
  for (int e = lane_id(); e < a.experts; e += kLanes) {
    float sum = grad[e];
    if (softmax_factor != 0.0f)
      sum = math::fma(math::exp(row.z[e] - row.peak) * row.inverse, softmax_factor, sum);
    if (rest != 0.0f) sum = math::fma(-row.s[e], rest, sum);
    grad[e] = sum;
  }
  __syncwarp();
  for (int k = 0; k < a.top_k; ++k) {  // in slot order, since an id may come twice
    const int32_t e = ids[k];
    if (weight.used(e) && e % kLanes == lane_id()) grad[e] += of_slot[k];
  }
  for (int e = lane_id(); e < a.experts; e += kLanes) result[e] = math::from_float<T>(grad[e]);
}

DUOMOE_KERNEL(kCuda, route_bwd) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E');
  const TensorView& mask = call.in("token_mask");
  const RouteBwd a{.options = options_of(call),
                   .range = range_of(call),
                   .experts = static_cast<int>(experts),
                   .top_k = static_cast<int>(call.axis('K')),
                   .logits = call.in("logits").data,
                   .indices = call.in("indices").as<const int32_t>(),
                   .mask = mask.present() ? mask.as<const uint8_t>() : nullptr,
                   .grad_weights = call.in("grad_weights").as<const float>(),
                   .grad_score_sums = call.in("grad_score_sums").as<const float>(),
                   .grad_logsumexp_sq = call.in("grad_logsumexp_sq").as<const float>(),
                   .grad_logits = call.out("grad_logits").data};
  Queue queue(call);
  return with_type(call.in("logits").dtype, [&]<typename T>(T) {
    return launch_tokens(queue, route_bwd_tokens<T>, tokens, experts, a.words_per_warp(), a);
  });
}

}  // namespace
}  // namespace duomoe::cuda
