// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route_bwd` for E <= 512 and K <= 32: one warp per token, its row in registers, four neighbouring
// experts of every 128 to a lane. Warps walk through the tokens.
#include "route_bwd.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = kMaxWarps * kLanes;

// What a slot adds to its expert's gradient, for the lanes k < K.
struct SlotGradient {
  float common;  // sum over the slots of weight * cotangent
  float rest;    // of the divisor
  float own;     // before the slope
};
__device__ inline SlotGradient slot_gradient(const RouterOptions& options, int top_k, float score,
                                             float cotangent, bool used) {
  const auto slot_sum = [=](float x) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
      if (width < top_k) x += __shfl_xor_sync(kAllLanes, x, width);  // those beyond K are 0
    }
    return __shfl_sync(kAllLanes, x, 0);
  };
  const Divisor divisor =
      math::weight_divisor(options.normalize, options.eps_mode, slot_sum(score), options.eps);
  const float weight = !used ? 0.0f : options.normalize ? score / divisor.value : score;
  const float common = slot_sum(weight * cotangent);
  return {common, divisor.rest, weight * (cotangent - divisor.own * common)};
}

template <int kVectors, bool kSoftmax>
__global__ void __launch_bounds__(kThreads, kVectors <= 2 ? 3 : 2)
    route_bwd_vectors(const __grid_constant__ RouteBwd a) {
  constexpr int kElements = kAdjacent * kVectors;
  extern __shared__ float shared_memory[];
  __shared__ float of_slots[kMaxWarps][kLanes];
  const int experts = a.experts, lane = lane_id();
  const int padded = (experts + kAdjacent - 1) / kAdjacent * kAdjacent;
  // The token's logits, or the scores of a row that is left to route_bwd_token.
  float* mine = shared_memory + warp_id() * 2 * padded;
  // What slots add to experts; -0 elsewhere, which leaves every number as it is.
  float* added = mine + padded;
  const auto clear_added = [&] {
    for (int e = lane; e < padded; e += kLanes) added[e] = -0.0f;
    __syncwarp();
  };
  clear_added();
  const auto first_expert = [=](int j) { return j * kColumns + kAdjacent * lane; };

  const float limit = math::moderate_limit(a.options.score);
  float g[kElements];
  float grad_logsumexp_sq = 0.0f;
  int64_t sequence_of_g = -1;
  Raw raw[kVectors];
  int32_t next_id = -1;
  float next_grad = 0.0f;
  const auto fetch = [&](int64_t t) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      raw[j] = load_raw(a.dtype, a.logits, t * experts, first_expert(j), experts, a.whole_vectors);
    if (lane < a.top_k) {
      next_id = a.indices[t * a.top_k + lane];
      next_grad = a.grad_weights[t * a.top_k + lane];
    }
  };
  int64_t t = grid_warp();
  if (t < a.range.tokens) fetch(t);
  for (; t < a.range.tokens; t += grid_warps()) {
    float z[kElements], grad[kElements];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) unpack(a.dtype, raw[j], z + kAdjacent * j);
    const int32_t id = next_id;
    const float grad_weight = next_grad;
    if (t + grid_warps() < a.range.tokens) fetch(t + grid_warps());

    const int64_t sequence = a.sequence(t);
    if (sequence < 0) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) grad[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        store_four(a.dtype, grad + kAdjacent * j, a.grad_logits, t * experts, first_expert(j),
                   experts, a.whole_vectors);
      continue;
    }
    if (sequence != sequence_of_g) {
      sequence_of_g = sequence;
      grad_logsumexp_sq = a.grad_logsumexp_sq[sequence];
      const float* of_sequence = a.grad_score_sums + sequence * experts;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int e = first_expert(i / kAdjacent) + i % kAdjacent;
        g[i] = e < experts ? of_sequence[e] : 0.0f;
      }
    }
    float magnitude = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) magnitude = largest_magnitude(magnitude, z[i]);
    const bool used = lane < a.top_k && id >= 0 && id < experts;
    const unsigned same = __match_any_sync(kAllLanes, used ? id : -1 - lane);
    if (!__all_sync(kAllLanes, magnitude <= limit && same == 1u << lane)) {
      Row row{.score = a.options.score, .experts = experts, .z = a.row(t), .s = mine};
      route_bwd_token(a, t, sequence, row, added, of_slots[warp_id()]);
      clear_added();
      continue;
    }

#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = kAdjacent * j;
      if (first_expert(j) < experts)
        *reinterpret_cast<float4*>(mine + first_expert(j)) =
            make_float4(z[i], z[i + 1], z[i + 2], z[i + 3]);
    }
    float x[kElements], slope[kElements], u[kElements];  // x: what P is proportional to
    Columns exponentials = {}, scores = {}, dots = {};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      u[i] = math::exp_moderate(z[i]);
      x[i] = u[i];
      if (!kSoftmax) {
        if (a.options.score == Score::kSigmoid) {
          const math::SigmoidPair pair = math::moderate_sigmoid(z[i], u[i]);
          x[i] = pair.value;
          slope[i] = pair.complement;
        } else {
          x[i] = math::elementwise_score(Score::kSqrtSoftplus, z[i]);
          slope[i] = math::log_score_slope(Score::kSqrtSoftplus, z[i]);
        }
      }
      if (i >= kElements - kAdjacent && first_expert(kVectors - 1) + i % kAdjacent >= experts)
        u[i] = x[i] = 0.0f;
      exponentials[i % kAdjacent] += u[i];
      if (!kSoftmax) scores[i % kAdjacent] += x[i];
      dots[i % kAdjacent] = math::fma(x[i], g[i], dots[i % kAdjacent]);
    }
    const float exponential_sum = warp_sum(join_columns(exponentials));
    const float inverse = math::reciprocal(exponential_sum);
    const float share = kSoftmax ? inverse : math::reciprocal(warp_sum(join_columns(scores)));
    const float mean = share * warp_sum(join_columns(dots));
    const float softmax_factor =
        grad_logsumexp_sq != 0.0f
            ? math::square_slope(math::log(exponential_sum), grad_logsumexp_sq)
            : 0.0f;

    __syncwarp();
    float score = 0.0f, own_slope = 1.0f;
    if (used) {
      const float own_z = mine[id], own_u = math::exp_moderate(own_z);
      if (kSoftmax) {
        score = own_u * inverse;
      } else if (a.options.score == Score::kSigmoid) {
        const math::SigmoidPair pair = math::moderate_sigmoid(own_z, own_u);
        score = pair.value;
        own_slope = pair.complement;
      } else {
        score = math::elementwise_score(Score::kSqrtSoftplus, own_z);
        own_slope = math::log_score_slope(Score::kSqrtSoftplus, own_z);
      }
    }
    const SlotGradient slot = slot_gradient(a.options, a.top_k, score,
                                            used ? grad_weight * a.options.scale : 0.0f, used);
    if (used) added[id] = kSoftmax ? slot.own : slot.own * own_slope;
    __syncwarp();

    const float factor = inverse * softmax_factor;
    const float rest = kSoftmax ? slot.rest * slot.common : 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      grad[i] = x[i] * share * (g[i] - mean);
      if (!kSoftmax) grad[i] *= slope[i];
    }
    if (softmax_factor != 0.0f) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) grad[i] = math::fma(u[i], factor, grad[i]);
    }
    if (kSoftmax && rest != 0.0f) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) grad[i] = math::fma(-(u[i] * inverse), rest, grad[i]);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (first_expert(j) >= experts) continue;
      const float4 own = *reinterpret_cast<const float4*>(added + first_expert(j));
      float* four = grad + kAdjacent * j;
      four[0] += own.x;
      four[1] += own.y;
      four[2] += own.z;
      four[3] += own.w;
      store_four(a.dtype, four, a.grad_logits, t * experts, first_expert(j), experts,
                 a.whole_vectors);
    }
    __syncwarp();
    if (used) added[id] = -0.0f;
  }
}

}  // namespace

bool launch_route_bwd_vectors(Queue& queue, const RouteBwd& a) {
  const int vectors = static_cast<int>(ceil_div(a.experts, kColumns));
  if (vectors > 4 || a.top_k > kLanes) return false;
  const int padded = static_cast<int>(ceil_div(a.experts, kAdjacent)) * kAdjacent;
  const size_t bytes = sizeof(float) * kMaxWarps * 2 * padded;
  const int64_t blocks =
      std::min(ceil_div(a.range.tokens, kMaxWarps), (vectors <= 2 ? 3 : 2) * queue.multiprocessors());
  const auto launch = [&](auto softmax_kernel, auto other_kernel) {
    queue.launch(a.options.score == Score::kSoftmax ? softmax_kernel : other_kernel, blocks, kThreads,
                 bytes, a);
  };
  switch (vectors) {
    case 1:
      launch(route_bwd_vectors<1, true>, route_bwd_vectors<1, false>);
      break;
    case 2:
      launch(route_bwd_vectors<2, true>, route_bwd_vectors<2, false>);
      break;
    case 3:
      launch(route_bwd_vectors<3, true>, route_bwd_vectors<3, false>);
      break;
    default:
      launch(route_bwd_vectors<4, true>, route_bwd_vectors<4, false>);
  }
  return true;
}

}  // namespace duomoe::cuda
