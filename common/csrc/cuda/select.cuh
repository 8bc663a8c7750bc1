// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Top-K of one row by (value descending, id ascending), optionally within the best groups, by one
// warp.
#pragma once

#include "warp.h"

namespace duomoe::cuda {

// The key of a candidate that is out; those of others are order_key + 1 (the largest key is that of
// +inf).
constexpr uint32_t kOut = 0;

using math::composite;
using math::id_of;

// The best of [begin, end) among those that come after `previous`; key(i) of each.
template <typename Key>
__device__ uint64_t next_best(Key key, int begin, int end, uint64_t previous) {
  uint64_t best = 0;
  for (int i = begin + lane_id(); i < end; i += kLanes) {
    const uint64_t candidate = composite(key(i), i);
    if (candidate < previous && candidate > best) best = candidate;
  }
  return warp_max(best);
}
constexpr uint64_t kFromTheStart = ~uint64_t{0};

// take(k, id) for the K best, on all lanes.
template <typename Key, typename F>
__device__ void select(Key key, int experts, int top_k, F take) {
  uint64_t last = kFromTheStart;
  for (int k = 0; k < top_k; ++k) {
    last = next_best(key, 0, experts, last);
    take(k, id_of(last));
  }
}

struct Groups {
  int count, kept, score_k;
  __host__ __device__ bool all_stay() const { return count == 1 || kept == count; }
};

// The composite of the worst group that stays. A group's value is the sum of its best `score_k`
// values, largest first. `group_keys` has room for one key per group.
template <typename F>
__device__ uint64_t worst_kept_group(const Groups& groups, int experts, F value,
                                     uint32_t* group_keys) {
  const int size = experts / groups.count;
  const auto key = [&](int e) { return math::order_key(value(e)) + 1; };
  for (int g = 0; g < groups.count; ++g) {
    uint64_t last = next_best(key, g * size, (g + 1) * size, kFromTheStart);
    float sum = value(id_of(last));
    for (int i = 1; i < groups.score_k; ++i) {
      last = next_best(key, g * size, (g + 1) * size, last);
      sum += value(id_of(last));
    }
    if (lane_id() == 0) group_keys[g] = math::order_key(sum) + 1;
  }
  __syncwarp();
  uint64_t worst_kept = kFromTheStart;
  for (int i = 0; i < groups.kept; ++i) {
    worst_kept = next_best([=](int g) { return group_keys[g]; }, 0, groups.count, worst_kept);
  }
  return worst_kept;
}

}  // namespace duomoe::cuda
