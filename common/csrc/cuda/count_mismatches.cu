// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "../math/mismatch.h"
#include "launch.h"
#include "warp.h"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per token. Integer sums have the same bits in any order.
__global__ void count_mismatches(int64_t num_tokens, int64_t top_k, const int32_t* indices,
                                 const int32_t* others, int32_t* tokens, int32_t* slots) {
  int32_t token_count = 0, slot_count = 0;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < num_tokens;
       t += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int32_t *a = indices + t * top_k, *b = others + t * top_k;
    const int32_t lacking = math::lacking_slots(a, b, top_k);
    slot_count += lacking;
    token_count += lacking > 0 || math::lacking_slots(b, a, top_k) > 0;
  }
  token_count = warp_sum(token_count);
  slot_count = warp_sum(slot_count);
  if (lane_id() == 0 && token_count > 0) atomicAdd(tokens, token_count);
  if (lane_id() == 0 && slot_count > 0) atomicAdd(slots, slot_count);
}

DUOMOE_KERNEL(kCuda, count_mismatches) {
  const TensorView &tokens = call.out("mismatched_tokens"), &slots = call.out("mismatched_slots");
  const int64_t num_tokens = call.axis('T');
  Queue queue(call);
  queue.fill(tokens, 0);
  queue.fill(slots, 0);
  queue.launch(count_mismatches, grid_for(num_tokens, kThreads), kThreads, 0, num_tokens,
               call.axis('K'), call.in("indices").as<const int32_t>(),
               call.in("others").as<const int32_t>(), tokens.as<int32_t>(), slots.as<int32_t>());
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
