// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "../math/balance.h"
#include "route_row.cuh"
#include "select.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = 256;
// Every warp sums the counts anew, so few blocks.
constexpr int64_t kMaxBlocks = 32;

__global__ void step_bias(int64_t experts, float rate, bool center, const float* bias,
                          const int32_t* counts, float* updated) {
  const int64_t total = lane_sum(experts, [=](int64_t e) { return int64_t{counts[e]}; });
  const auto step = [=](int64_t e) { return math::load_step(total, experts, counts[e]); };
  float mean_step = 0.0f;
  if (center) {
    const int64_t steps =
        lane_sum(experts, [=](int64_t e) { return static_cast<int64_t>(step(e)); });
    mean_step = math::mean_step(steps, experts);
  }
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < experts;
       e += static_cast<int64_t>(gridDim.x) * kThreads) {
    updated[e] = math::stepped_bias(bias[e], rate, step(e), mean_step);
  }
}

DUOMOE_KERNEL(kCuda, update_expert_bias) {
  const int64_t experts = call.axis('E');
  Queue queue(call);
  queue.launch(step_bias, std::min(kMaxBlocks, ceil_div(experts, kThreads)), kThreads, 0, experts,
               static_cast<float>(call.real("rate")), call.integer("center") != 0,
               call.in("bias").as<const float>(), call.in("expert_counts").as<const int32_t>(),
               call.out("updated_bias").as<float>());
  return queue.status();
}

struct QuantileBins {
  Score score;
  bool on_logit;
  int64_t tokens, bins;
  int experts, top_k;
  DType dtype;
  const char* logits;
  const float* bias;    // may be null
  const uint8_t* mask;  // may be null
  const float* lower;
  const float* upper;
  float* cutoffs;
  int32_t* counts;

  __host__ __device__ int64_t words_per_warp() const { return 2 * static_cast<int64_t>(experts); }
};

// One warp per token. Counts are integers, so that the order in which warps add does not matter.
__global__ void __launch_bounds__(kMaxWarps* kLanes) count_bins(const QuantileBins a) {
  extern __shared__ float shared_memory[];
  const int64_t t = grid_warp();
  if (t >= a.tokens) return;
  if (a.mask && !a.mask[t]) {
    if (lane_id() == 0) a.cutoffs[t] = 0.0f;
    return;
  }
  float* mine = shared_memory + warp_id() * a.words_per_warp();
  Row row{.score = a.score,
          .experts = a.experts,
          .z = {a.dtype, a.logits + t * a.experts * item_bytes(a.dtype)},
          .s = mine};
  row.compute();

  const SelectionValue value{.row = row, .on_logit = a.on_logit, .bias = a.bias};
  uint32_t* keys = reinterpret_cast<uint32_t*>(mine + a.experts);
  for (int e = lane_id(); e < a.experts; e += kLanes) keys[e] = math::order_key(value(e)) + 1;
  __syncwarp();
  float cutoff = 0.0f;
  select([=](int e) { return keys[e]; }, a.experts, a.top_k + 1,
         [&](int k, int32_t id) {
           if (k == a.top_k) cutoff = value(id);
         });
  if (lane_id() == 0) a.cutoffs[t] = cutoff;
  const float lower = *a.lower, upper = *a.upper;
  for (int e = lane_id(); e < a.experts; e += kLanes) {
    const int32_t bin = math::quantile_bin(cutoff, row.z(e), value.chosen_on(e), lower, upper,
                                           static_cast<int32_t>(a.bins));
    if (bin >= 0) atomicAdd(a.counts + e * a.bins + bin, 1);
  }
}

DUOMOE_KERNEL(kCuda, count_quantile_bins) {
  const TensorView &bias = call.in("bias"), &mask = call.in("token_mask");
  const QuantileBins a{.score = call.choice<Score>("score"),
                       .on_logit = call.choice<SelectOn>("select_on") == SelectOn::kLogit,
                       .tokens = call.axis('T'),
                       .bins = call.axis('B'),
                       .experts = static_cast<int>(call.axis('E')),
                       .top_k = static_cast<int>(call.integer("top_k")),
                       .dtype = call.in("logits").dtype,
                       .logits = call.in("logits").as<const char>(),
                       .bias = bias.present() ? bias.as<const float>() : nullptr,
                       .mask = mask.present() ? mask.as<const uint8_t>() : nullptr,
                       .lower = call.in("lower").as<const float>(),
                       .upper = call.in("upper").as<const float>(),
                       .cutoffs = call.out("cutoffs").as<float>(),
                       .counts = call.out("bin_counts").as<int32_t>()};
  Queue queue(call);
  queue.fill(call.out("bin_counts"), 0);
  return launch_tokens(queue, count_bins, a.tokens, a.experts, a.words_per_warp(), a);
}

// The updated biases before their mean is taken off. One thread per expert.
__global__ void want_biases(int64_t experts, int64_t bins, int64_t top_k, double decay,
                            const float* bias, const int32_t* counts, const float* lower,
                            const float* upper, double* wanted) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= experts) return;
  const double quantile =
      math::bin_quantile(counts + e * bins, bins, top_k, experts, *lower, *upper, bias[e]);
  wanted[e] = math::decayed_bias(decay, bias[e], quantile);
}

// One block.
__global__ void subtract_mean(int64_t experts, const double* wanted, float* updated) {
  __shared__ double mean;
  if (warp_id() == 0) {
    const double sum = lane_sum(experts, [=](int64_t e) { return wanted[e]; });
    if (lane_id() == 0) mean = sum / static_cast<double>(experts);
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x)
    updated[e] = static_cast<float>(wanted[e] - mean);
}

DUOMOE_WORKSPACE(kCuda, update_expert_bias_by_quantile) {
  return piece_bytes<double>(call.axis('E'));
}

DUOMOE_KERNEL(kCuda, update_expert_bias_by_quantile) {
  // A thread walks through all bins of its expert: small blocks, to spread them over the GPU.
  constexpr int kSmallBlock = 32;
  const int64_t experts = call.axis('E');
  Queue queue(call);
  double* wanted = queue.scratch<double>(experts);
  queue.launch(want_biases, ceil_div(experts, kSmallBlock), kSmallBlock, 0, experts, call.axis('B'),
               call.integer("top_k"), call.real("decay"), call.in("bias").as<const float>(),
               call.in("bin_counts").as<const int32_t>(), call.in("lower").as<const float>(),
               call.in("upper").as<const float>(), wanted);
  queue.launch(subtract_mean, 1, kThreads, 0, experts, wanted,
               call.out("updated_bias").as<float>());
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
