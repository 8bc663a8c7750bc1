// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The inner steps of a stable counting sort.
#pragma once

#include "warp.h"

namespace duomoe::cuda {

// f(i, key, rank) for the items i in [begin, end) with key(i) >= 0, and place[key] raised by the
// items of a key. `rank` is the old place[key] plus the number of the key's items before this one.
// All lanes of one warp call it.
template <typename Key, typename F>
__device__ void for_items_in_order(int64_t begin, int64_t end, int32_t* place, Key key, F f) {
  const unsigned lanes_before = (1u << lane_id()) - 1;
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t i = first + lane_id();
    const int32_t k = i < end ? key(i) : -1;
    const bool used = k >= 0;
    const unsigned peers = __match_any_sync(kAllLanes, k);
    const int before = __popc(peers & lanes_before);
    const int32_t old_place = used ? place[k] : 0;
    if (used) f(i, k, old_place + before);
    __syncwarp();
    if (used && before == 0) place[k] = old_place + __popc(peers);
    __syncwarp();
  }
}

// The lanes with this lane's key, for keys in [0, 2^bits) and bits a multiple of 4; of no use to a
// lane with a negative key. The time does not depend on the keys.
__device__ inline unsigned lanes_with_key(int32_t key, int bits) {
  unsigned peers = __ballot_sync(kAllLanes, key >= 0);
#pragma unroll 1
  for (int first = 0; first < bits; first += 4) {
#pragma unroll
    for (int bit = 0; bit < 4; ++bit) {
      const bool set = (key >> (first + bit)) & 1;
      const unsigned votes = __ballot_sync(kAllLanes, set);
      peers &= set ? votes : ~votes;
    }
  }
  return peers;
}

__device__ inline int64_t sum_of_lanes_up_to_mine(int64_t x) {
  for (int width = 1; width < kLanes; width *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, x, width);
    if (lane_id() >= width) x += other;
  }
  return x;
}

}  // namespace duomoe::cuda
