// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include "../math/mismatch.h"
#include "parallel.h"

namespace duomoe::cpu {
namespace {

DUOMOE_KERNEL(kCpu, count_mismatches) {
  const int64_t top_k = call.axis('K');
  const int32_t* indices = call.in("indices").as<const int32_t>();
  const int32_t* others = call.in("others").as<const int32_t>();
  std::atomic<int32_t> tokens = 0, slots = 0;
  parallel_blocks(call, call.axis('T'), rows_per_task(top_k * top_k),
                  [&](int64_t begin, int64_t end) {
                    int32_t token_count = 0, slot_count = 0;
                    for (int64_t t = begin; t < end; ++t) {
                      const int32_t *a = indices + t * top_k, *b = others + t * top_k;
                      const int32_t lacking = math::lacking_slots(a, b, top_k);
                      slot_count += lacking;
                      token_count += lacking > 0 || math::lacking_slots(b, a, top_k) > 0;
                    }
                    tokens += token_count;
                    slots += slot_count;
                  });
  *call.out("mismatched_tokens").as<int32_t>() = tokens;
  *call.out("mismatched_slots").as<int32_t>() = slots;
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
