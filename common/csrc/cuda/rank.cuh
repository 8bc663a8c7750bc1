// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Top-K of a row by one warp, in three steps: a bound that at least K selection values reach; the
// few that reach it, the candidates, gathered in shared memory; each candidate's rank by counting.
// Values are finite, and -inf stands for an expert that is out.
#pragma once

#include <climits>

#include "warp.h"

namespace duomoe::cuda {

// A warp's candidates, in any order, and its K <= kMaxTop best in order.
template <int kTop>
struct Candidates {
  static constexpr int kMaxTop = kTop, kRoom = 2 * kTop;
  alignas(16) uint32_t keys[kRoom];
  int32_t ids[kRoom];
  int32_t best[kTop];
};

// An integer with the order of the floats (of numbers, -0 below 0), and its inverse.
__device__ inline int signed_key(float x) {
  const int bits = static_cast<int>(math::bits_of(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ inline float value_of_signed_key(int key) {
  return math::float_of(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7fffffff)));
}

// The `rank`-th largest distinct value among the kParts maxima of every lane, or the smallest
// there is: a bound that at least `rank` of them reach, if there are so many.
template <int kParts>
__device__ float bound_of_best(const float (&maxima)[kParts], int rank) {
  int keys[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    keys[p] = maxima[p] > -math::infinity() ? signed_key(maxima[p]) : INT_MIN;
  }
  int bound = INT_MIN;
  for (int r = 0; r < rank; ++r) {
    int largest = keys[0];
#pragma unroll
    for (int p = 1; p < kParts; ++p) largest = keys[p] > largest ? keys[p] : largest;
    const int next = __reduce_max_sync(kAllLanes, largest);
    if (next == INT_MIN) break;
    bound = next;
#pragma unroll
    for (int p = 0; p < kParts; ++p) keys[p] = keys[p] == next ? INT_MIN : keys[p];
  }
  return bound == INT_MIN ? math::infinity() : value_of_signed_key(bound);
}

// Appends id(i) of the bits i that are set in each lane's mask to `candidates.ids`, of which `count`
// are there. Ids beyond the room for them are only counted.
template <int kTop, typename F>
__device__ int gather(unsigned mask, int count, F id, Candidates<kTop>& candidates) {
  const unsigned lanes_before = (1u << lane_id()) - 1;
  for (unsigned lanes; (lanes = __ballot_sync(kAllLanes, mask != 0)) != 0;
       count += __popc(lanes)) {
    if (mask == 0) continue;
    const int at = count + __popc(lanes & lanes_before);
    if (at < candidates.kRoom) candidates.ids[at] = id(__ffs(static_cast<int>(mask)) - 1);
    mask &= mask - 1;
  }
  return count;
}

// candidates.best[k] of the K <= count first candidates by (value descending, id ascending).
template <int kTop, typename F>
__device__ void rank(int count, int top_k, F value, Candidates<kTop>& candidates) {
  __syncwarp();
  const int end = (count + kLanes - 1) / kLanes * kLanes;
  for (int i = lane_id(); i < end; i += kLanes)
    candidates.keys[i] = i < count ? math::order_key(value(candidates.ids[i])) : 0;
  __syncwarp();
  unsigned ranks[2] = {};
  int taken = 0;
  for (int own = lane_id(); own < count; own += kLanes) {
    const uint32_t key = candidates.keys[own];
    int better = 0;
    for (int i = 0; i < count; i += 4) {
      const uint4 other = *reinterpret_cast<const uint4*>(&candidates.keys[i]);
      better += (other.x > key) + (other.y > key) + (other.z > key) + (other.w > key);
    }
    if (better >= top_k) continue;
    ++taken;
    if (kTop <= kLanes || better < kLanes) {
      ranks[0] |= 1u << better;
    } else {
      ranks[1] |= 1u << (better - kLanes);
    }
    candidates.best[better] = candidates.ids[own];
  }
  // Equal keys leave ranks out, or take one too many.
  taken = __reduce_add_sync(kAllLanes, taken);
  int found = __popc(__reduce_or_sync(kAllLanes, ranks[0]));
  if (kTop > kLanes) found += __popc(__reduce_or_sync(kAllLanes, ranks[1]));
  if (found != top_k || taken != top_k) {
    __syncwarp();
    for (int own = lane_id(); own < count; own += kLanes) {
      const uint32_t key = candidates.keys[own];
      const int32_t id = candidates.ids[own];
      int better = 0;
      for (int i = 0; i < count; ++i) {
        better += candidates.keys[i] > key || (candidates.keys[i] == key && candidates.ids[i] < id);
      }
      if (better < top_k) candidates.best[better] = id;
    }
  }
  __syncwarp();
}

}  // namespace duomoe::cuda
