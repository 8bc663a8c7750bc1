// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Top-K of one row by (value descending, id ascending), optionally within the best groups, by one
// warp.
#pragma once

#include "warp.h"

namespace duomoe::cuda {

// In a list of candidates 0 is one that is out; others are order_key + 1 (the largest key is that
// of +inf).
constexpr uint32_t kOut = 0;

// keys[e] of value(e), for every expert of the row.
template <typename F>
__device__ inline void write_keys(int experts, F value, uint32_t* keys) {
  for (int e = lane_id(); e < experts; e += kLanes) keys[e] = math::order_key(value(e)) + 1;
  __syncwarp();
}

using math::composite;
using math::id_of;

// The best of [begin, end) among those that come after `previous`.
__device__ inline uint64_t next_best(const uint32_t* keys, int begin, int end, uint64_t previous) {
  uint64_t best = 0;
  for (int i = begin + lane_id(); i < end; i += kLanes) {
    const uint64_t candidate = composite(keys[i], i);
    if (candidate < previous && candidate > best) best = candidate;
  }
  return warp_max(best);
}
constexpr uint64_t kFromTheStart = ~uint64_t{0};

// take(k, id) for the K best, on all lanes.
template <typename F>
__device__ inline void select(const uint32_t* keys, int experts, int top_k, F take) {
  uint64_t last = kFromTheStart;
  for (int k = 0; k < top_k; ++k) {
    last = next_best(keys, 0, experts, last);
    take(k, id_of(last));
  }
}

struct Groups {
  int count, kept, score_k;
  __host__ __device__ bool all_stay() const { return count == 1 || kept == count; }
};

// Takes the experts of all groups but the best out. A group's value is the sum of its best
// `score_k` values, largest first. `group_keys` has room for one key per group.
template <typename F>
__device__ inline void keep_best_groups(const Groups& groups, int experts, F value, uint32_t* keys,
                                        uint32_t* group_keys) {
  const int size = experts / groups.count;
  for (int g = 0; g < groups.count; ++g) {
    uint64_t last = next_best(keys, g * size, (g + 1) * size, kFromTheStart);
    float sum = value(id_of(last));
    for (int i = 1; i < groups.score_k; ++i) {
      last = next_best(keys, g * size, (g + 1) * size, last);
      sum += value(id_of(last));
    }
    if (lane_id() == 0) group_keys[g] = math::order_key(sum) + 1;
  }
  __syncwarp();
  uint64_t worst_kept = kFromTheStart;
  for (int i = 0; i < groups.kept; ++i)
    worst_kept = next_best(group_keys, 0, groups.count, worst_kept);
  for (int e = lane_id(); e < experts; e += kLanes) {
    if (composite(group_keys[e / size], e / size) < worst_kept) keys[e] = kOut;
  }
  __syncwarp();
}

}  // namespace duomoe::cuda
