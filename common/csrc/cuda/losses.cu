// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The losses of math/losses.h, with its order of every sum.
#include "../math/losses.h"
#include "launch.h"
#include "warp.h"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = 256;

__device__ int64_t occupied_sequences(const int32_t* num_tokens, int64_t sequences) {
  return lane_sum(sequences, [=](int64_t s) { return int64_t{num_tokens[s] > 0}; });
}

__device__ int64_t total_tokens(const int32_t* num_tokens, int64_t sequences) {
  return lane_sum(sequences, [=](int64_t s) { return int64_t{num_tokens[s]}; });
}

// One block; warp w sums sequence w of each group of kLanes, and lane w adds it.
__global__ void sum_load_balancing_loss(const int32_t* counts, const float* score_sums,
                                        const int32_t* num_tokens, int64_t sequences,
                                        int64_t experts, int64_t top_k, double coeff,
                                        float* result) {
  __shared__ double terms[kLanes];
  const int64_t occupied = occupied_sequences(num_tokens, sequences);
  double of_lane = 0.0;
  for (int64_t begin = 0; begin < sequences; begin += kLanes) {
    const int64_t s = begin + warp_id();
    double term = 0.0;
    if (s < sequences) {
      const double sum = lane_sum(experts, [=](int64_t e) {
        return static_cast<double>(counts[s * experts + e]) *
               static_cast<double>(score_sums[s * experts + e]);
      });
      const double factor = math::load_balancing_factor(num_tokens[s], occupied, experts, top_k);
      if (factor > 0.0) term = factor * sum;
    }
    if (lane_id() == 0) terms[warp_id()] = term;
    __syncthreads();
    of_lane += terms[lane_id()];
    __syncthreads();
  }
  const double loss = warp_sum(of_lane);
  if (threadIdx.x == 0) *result = static_cast<float>(coeff * loss);
}

__global__ void spread_load_balancing_loss(const int32_t* counts, const int32_t* num_tokens,
                                           const float* grad_loss, int64_t sequences,
                                           int64_t experts, int64_t top_k, double coeff,
                                           float* grad) {
  const int64_t occupied = occupied_sequences(num_tokens, sequences);
  const double upstream = *grad_loss * coeff;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < sequences * experts; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const double factor =
        upstream * math::load_balancing_factor(num_tokens[i / experts], occupied, experts, top_k);
    grad[i] = static_cast<float>(factor * counts[i]);
  }
}

// One warp.
__global__ void sum_z_loss(const float* logsumexp_sq, const int32_t* num_tokens, int64_t sequences,
                           double coeff, float* result) {
  const int64_t tokens = total_tokens(num_tokens, sequences);
  const double sum =
      lane_sum(sequences, [=](int64_t s) { return static_cast<double>(logsumexp_sq[s]); });
  if (lane_id() == 0) {
    *result = tokens > 0 ? static_cast<float>(coeff * sum / static_cast<double>(tokens)) : 0.0f;
  }
}

__global__ void spread_z_loss(const int32_t* num_tokens, const float* grad_loss, int64_t sequences,
                              double coeff, float* grad) {
  const int64_t tokens = total_tokens(num_tokens, sequences);
  const double upstream = *grad_loss * coeff;
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; s < sequences;
       s += static_cast<int64_t>(gridDim.x) * kThreads) {
    grad[s] = tokens > 0 ? static_cast<float>(upstream / static_cast<double>(tokens)) : 0.0f;
  }
}

// Every block counts the sequences anew, so few blocks.
constexpr int64_t kMaxBlocks = 512;

DUOMOE_KERNEL(kCuda, load_balancing_loss) {
  Queue queue(call);
  queue.launch(sum_load_balancing_loss, 1, kLanes * kLanes, 0,
               call.in("sequence_counts").as<const int32_t>(),
               call.in("score_sums").as<const float>(), call.in("num_tokens").as<const int32_t>(),
               call.axis('S'), call.axis('E'), call.integer("top_k"), call.real("coeff"),
               call.out("loss").as<float>());
  return queue.status();
}

DUOMOE_KERNEL(kCuda, load_balancing_loss_bwd) {
  const int64_t sequences = call.axis('S'), experts = call.axis('E');
  Queue queue(call);
  queue.launch(
      spread_load_balancing_loss, std::min(kMaxBlocks, ceil_div(sequences * experts, kThreads)),
      kThreads, 0, call.in("sequence_counts").as<const int32_t>(),
      call.in("num_tokens").as<const int32_t>(), call.in("grad_loss").as<const float>(), sequences,
      experts, call.integer("top_k"), call.real("coeff"), call.out("grad_score_sums").as<float>());
  return queue.status();
}

DUOMOE_KERNEL(kCuda, z_loss) {
  Queue queue(call);
  queue.launch(sum_z_loss, 1, kLanes, 0, call.in("logsumexp_sq").as<const float>(),
               call.in("num_tokens").as<const int32_t>(), call.axis('S'), call.real("coeff"),
               call.out("loss").as<float>());
  return queue.status();
}

DUOMOE_KERNEL(kCuda, z_loss_bwd) {
  const int64_t sequences = call.axis('S');
  Queue queue(call);
  queue.launch(spread_z_loss, std::min(kMaxBlocks, ceil_div(sequences, kThreads)), kThreads, 0,
               call.in("num_tokens").as<const int32_t>(), call.in("grad_loss").as<const float>(),
               sequences, call.real("coeff"), call.out("grad_logsumexp_sq").as<float>());
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
