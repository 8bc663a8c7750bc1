// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of `route_bwd` share: its arguments, and the gradient of a token whatever its
// row.
#pragma once

#include "route_row.cuh"

namespace duomoe::cuda {

struct RouteBwd {
  RouterOptions options;
  TokenRange range;
  int experts, top_k;
  DType dtype;
  bool whole_vectors;     // of the logits and their gradient
  bool whole_cotangents;  // whether grad_score_sums can be read four at once
  const char* logits;
  const int32_t* indices;
  const uint8_t* mask;  // may be null
  const float* grad_weights;
  const float* grad_score_sums;
  const float* grad_logsumexp_sq;
  char* grad_logits;

  __device__ Logits row(int64_t t) const {
    return {dtype, logits + t * experts * item_bytes(dtype)};
  }
  // The token's sequence, or -1 for a token without a gradient.
  __device__ int64_t sequence(int64_t t) const {
    const int64_t position = range.first() + t;
    if (position < 0 || position >= range.total || (mask && !mask[t])) return -1;
    return range.sequence_length < range.total ? position / range.sequence_length : 0;
  }
};

// What a kernel is compiled for: the dtype, rows of whole vectors and what else it names, or any.
enum class Rows { kFloat32, kBFloat16, kAny };
template <Rows kRows>
__device__ inline DType dtype_of(const RouteBwd& a) {
  return kRows == Rows::kFloat32    ? DType::kFloat32
         : kRows == Rows::kBFloat16 ? DType::kBFloat16
                                    : a.dtype;
}

// store_four of elements of which none is NaN, or may be (without_nan = false).
__device__ inline void store_bfloat16s(bool without_nan, const float* z, void* data, int at) {
#if defined(__CUDA_ARCH__)
  if (without_nan) {
    uint2 half;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(half.x) : "f"(z[1]), "f"(z[0]));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(half.y) : "f"(z[3]), "f"(z[2]));
    __stcs(reinterpret_cast<uint2*>(static_cast<uint16_t*>(data) + at), half);
    return;
  }
#endif
  store_four(DType::kBFloat16, z, data, 0, at, std::numeric_limits<int>::max(), true);
}

// Whether math::quotient serves the weights of moderate rows, whose scores are at least e^-66, and
// eps / divisor.
inline bool normal_divisors(const RouterOptions& options) {
  return options.eps == 0.0f || (options.eps >= 1e-20f && options.eps <= 1e6f);
}

// `row` is ready for compute(); `grad` has room for E floats and `of_slot` for K.
inline __device__ __noinline__ void route_bwd_token(const RouteBwd& a, int64_t t, int64_t sequence,
                                                    Row& row, float* grad, float* of_slot) {
  row.compute();
  const int32_t* ids = a.indices + t * a.top_k;
  const SlotWeights weight(a.options, row, ids, a.top_k);
  const auto cotangent = [&](int64_t k) {
    return weight.used(ids[k]) ? a.grad_weights[t * a.top_k + k] * a.options.scale : 0.0f;
  };
  const float common = lane_sum(a.top_k, [&](int64_t k) { return weight(ids[k]) * cotangent(k); });
  for (int k = lane_id(); k < a.top_k; k += kLanes) {
    if (!weight.used(ids[k])) continue;
    const float own = weight(ids[k]) * (cotangent(k) - weight.divisor.own * common);
    of_slot[k] = row.score == Score::kSoftmax ? own : own * row.slope(ids[k]);
  }

  // The part that every expert gets: P_e (gP_e - sum P gP) slope_e + softmax_e * softmax_factor -
  // s_e * rest.
  const float softmax_factor = math::square_slope(row.logsumexp, a.grad_logsumexp_sq[sequence]);
  const float rest = row.score == Score::kSoftmax ? weight.divisor.rest * common : 0.0f;
  row.probability_gradient(a.grad_score_sums + sequence * a.experts, grad);
  const float factor = row.inverse * softmax_factor;
  for (int e = lane_id(); e < a.experts; e += kLanes) {
    float sum = grad[e];
    if (softmax_factor != 0.0f) sum = math::fma(row.exponential(e), factor, sum);
    if (rest != 0.0f) sum = math::fma(-row.score_of(e), rest, sum);
    grad[e] = sum;
  }
  __syncwarp();
  for (int k = 0; k < a.top_k; ++k) {  // in slot order, since an id may come twice
    const int32_t e = ids[k];
    if (weight.used(e) && e % kLanes == lane_id()) grad[e] += of_slot[k];
  }
  for (int e = lane_id(); e < a.experts; e += kLanes)
    store(a.dtype, grad[e], a.grad_logits, t * a.experts + e);
  __syncwarp();
}

// False where the kernel does not fit the call.
bool launch_route_bwd_lanes(Queue& queue, const RouteBwd& route);
bool launch_route_bwd_vectors(Queue& queue, const RouteBwd& route);

}  // namespace duomoe::cuda
