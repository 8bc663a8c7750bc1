// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// One warp makes the gradient of one token, recomputed from its logits.
#include "route_bwd.cuh"

namespace duomoe::cuda {
namespace {

// Any E and K; the row in shared memory.
__global__ void __launch_bounds__(kMaxWarps* kLanes)
    route_bwd_rows(const __grid_constant__ RouteBwd a) {
  extern __shared__ float shared_memory[];
  const int64_t t = grid_warp();
  if (t >= a.range.tokens) return;
  const int64_t sequence = a.sequence(t);
  if (sequence < 0) {
    for (int e = lane_id(); e < a.experts; e += kLanes)
      store(a.dtype, 0.0f, a.grad_logits, t * a.experts + e);
    return;
  }
  float* mine = shared_memory + warp_id() * (2 * static_cast<int64_t>(a.experts) + a.top_k);
  Row row{.score = a.options.score, .experts = a.experts, .z = a.row(t), .s = mine};
  route_bwd_token(a, t, sequence, row, mine + a.experts, mine + 2 * a.experts);
}

DUOMOE_KERNEL(kCuda, route_bwd) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), top_k = call.axis('K');
  const TensorView &mask = call.in("token_mask"), &logits = call.in("logits"),
                   &grad_logits = call.out("grad_logits");
  const RouteBwd a{.options = options_of(call),
                   .range = range_of(call),
                   .experts = static_cast<int>(experts),
                   .top_k = static_cast<int>(top_k),
                   .dtype = logits.dtype,
                   .whole_vectors = whole_vectors(logits.data, logits.dtype, experts) &&
                                    whole_vectors(grad_logits.data, logits.dtype, experts),
                   .logits = logits.as<const char>(),
                   .indices = call.in("indices").as<const int32_t>(),
                   .mask = mask.present() ? mask.as<const uint8_t>() : nullptr,
                   .grad_weights = call.in("grad_weights").as<const float>(),
                   .grad_score_sums = call.in("grad_score_sums").as<const float>(),
                   .grad_logsumexp_sq = call.in("grad_logsumexp_sq").as<const float>(),
                   .grad_logits = grad_logits.as<char>()};
  Queue queue(call);
  if (launch_route_bwd_vectors(queue, a)) return queue.status();
  return launch_tokens(queue, route_bwd_rows, tokens, experts, 2 * experts + top_k, a);
}

}  // namespace
}  // namespace duomoe::cuda
