// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <vector>

#include "../math/balance.h"
#include "../math/lane_sum.h"
#include "parallel.h"
#include "route_row.h"
#include "select.h"

namespace duomoe::cpu {
namespace {

DUOMOE_KERNEL(kCpu, update_expert_bias) {
  const ScopedFpMode mode;
  const int64_t experts = call.axis('E');
  const float* bias = call.in("bias").as<const float>();
  const int32_t* counts = call.in("expert_counts").as<const int32_t>();
  float* updated = call.out("updated_bias").as<float>();
  const float rate = static_cast<float>(call.real("rate"));
  int64_t total = 0, steps = 0;
  for (int64_t e = 0; e < experts; ++e) total += counts[e];
  for (int64_t e = 0; e < experts; ++e) {
    steps += static_cast<int64_t>(math::load_step(total, experts, counts[e]));
  }
  const bool center = call.integer("center") != 0;
  const float mean_step = center ? math::mean_step(steps, experts) : 0.0f;
  for (int64_t e = 0; e < experts; ++e) {
    updated[e] =
        math::stepped_bias(bias[e], rate, math::load_step(total, experts, counts[e]), mean_step);
  }
  return {};
}

DUOMOE_KERNEL(kCpu, count_quantile_bins) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), bins = call.axis('B');
  const auto score = call.choice<math::Score>("score");
  const bool on_logit = call.choice<math::SelectOn>("select_on") == math::SelectOn::kLogit;
  const Rows logits(call.in("logits"), experts);
  const DType dtype = call.in("logits").dtype;
  const float* bias = call.in("bias").as<const float>();
  const bool has_mask = call.in("token_mask").present();
  const uint8_t* mask = call.in("token_mask").as<const uint8_t>();
  const float lower = *call.in("lower").as<const float>();
  const float upper = *call.in("upper").as<const float>();
  const int64_t top_k = call.integer("top_k");
  float* cutoffs = call.out("cutoffs").as<float>();
  int32_t* counts = call.out("bin_counts").as<int32_t>();

  parallel_blocks(call, experts * bins, kGrain,
                  [&](int64_t begin, int64_t end) { std::fill(counts + begin, counts + end, 0); });
  parallel_blocks(call, tokens, rows_per_task(experts), [&](int64_t begin, int64_t end) {
    Arena arena(RowArrays::kArrays + Selector::kArrays + 3, Selector::array_length(experts));
    RowArrays row(score, experts, /*with_slopes=*/false, arena);
    float* padded_bias = nullptr;
    if (bias) {
      padded_bias = arena.take<float>(padded(experts));
      std::fill(std::copy_n(bias, experts, padded_bias), padded_bias + padded(experts), 0.0f);
    }
    uint32_t* keys = arena.take<uint32_t>(Selector::array_length(experts));
    int32_t* ids = arena.take<int32_t>(top_k + 1);
    Selector selector(experts, top_k + 1, 1, 1, 1, arena);
    for (int64_t t = begin; t < end; ++t) {
      if (has_mask && !mask[t]) {
        cutoffs[t] = 0.0f;
        continue;
      }
      simd().row_scores(dtype, logits[t], row);
      const float* chosen_on = on_logit ? row.z : row.scores;
      simd().selection_keys(row.z, chosen_on, padded_bias, experts, keys);
      selector.select(keys, ids);
      const int32_t last = ids[top_k];
      cutoffs[t] = math::selection_value(row.z[last], chosen_on[last], bias ? bias[last] : 0.0f);
      for (int64_t e = 0; e < experts; ++e) {
        const int32_t bin = math::quantile_bin(cutoffs[t], row.z[e], chosen_on[e], lower, upper,
                                               static_cast<int32_t>(bins));
        // Integers: the order in which tasks add does not matter.
        if (bin >= 0) {
          std::atomic_ref<int32_t>(counts[e * bins + bin]).fetch_add(1, std::memory_order_relaxed);
        }
      }
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, update_expert_bias_by_quantile) {
  const ScopedFpMode mode;
  const int64_t experts = call.axis('E'), bins = call.axis('B');
  const float* bias = call.in("bias").as<const float>();
  const int32_t* counts = call.in("bin_counts").as<const int32_t>();
  float* updated = call.out("updated_bias").as<float>();
  const double lower = *call.in("lower").as<const float>();
  const double upper = *call.in("upper").as<const float>();
  const double decay = call.real("decay");
  const int64_t top_k = call.integer("top_k");
  std::vector<double> wanted(experts);
  for (int64_t e = 0; e < experts; ++e) {
    const double quantile =
        math::bin_quantile(counts + e * bins, bins, top_k, experts, lower, upper, bias[e]);
    wanted[e] = math::decayed_bias(decay, bias[e], quantile);
  }
  const double sum = math::lane_sum(experts, [&](int64_t e) { return wanted[e]; });
  const double mean = sum / static_cast<double>(experts);
  for (int64_t e = 0; e < experts; ++e) updated[e] = static_cast<float>(wanted[e] - mean);
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
