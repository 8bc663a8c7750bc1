// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "../math/losses.h"

#include "parallel.h"

namespace duomoe::cpu {
namespace {

DUOMOE_KERNEL(kCpu, load_balancing_loss) {
  const ScopedFpMode mode;
  *call.out("loss").as<float>() = math::load_balancing_loss(
      call.in("sequence_counts").as<const int32_t>(), call.in("score_sums").as<const float>(),
      call.in("num_tokens").as<const int32_t>(), call.axis('S'), call.axis('E'),
      call.integer("top_k"), call.real("coeff"));
  return {};
}

DUOMOE_KERNEL(kCpu, load_balancing_loss_bwd) {
  const ScopedFpMode mode;
  const int64_t sequences = call.axis('S'), experts = call.axis('E');
  const int32_t* num_tokens = call.in("num_tokens").as<const int32_t>();
  const int32_t* counts = call.in("sequence_counts").as<const int32_t>();
  float* grad = call.out("grad_score_sums").as<float>();
  const double upstream = *call.in("grad_loss").as<const float>() * call.real("coeff");
  const int64_t occupied = math::occupied_sequences(num_tokens, sequences);
  for (int64_t s = 0; s < sequences; ++s) {
    const double factor = upstream * math::load_balancing_factor(num_tokens[s], occupied, experts,
                                                                 call.integer("top_k"));
    for (int64_t e = 0; e < experts; ++e) {
      grad[s * experts + e] = static_cast<float>(factor * counts[s * experts + e]);
    }
  }
  return {};
}

DUOMOE_KERNEL(kCpu, z_loss) {
  const ScopedFpMode mode;
  *call.out("loss").as<float>() =
      math::z_loss(call.in("logsumexp_sq").as<const float>(),
                   call.in("num_tokens").as<const int32_t>(), call.axis('S'), call.real("coeff"));
  return {};
}

DUOMOE_KERNEL(kCpu, z_loss_bwd) {
  const ScopedFpMode mode;
  const int64_t sequences = call.axis('S');
  const int64_t tokens = math::total_tokens(call.in("num_tokens").as<const int32_t>(), sequences);
  const double upstream = *call.in("grad_loss").as<const float>() * call.real("coeff");
  float* grad = call.out("grad_logsumexp_sq").as<float>();
  for (int64_t s = 0; s < sequences; ++s)
    grad[s] = tokens > 0 ? static_cast<float>(upstream / tokens) : 0.0f;
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
