// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The streams of a chunk in route_rows.cu, whose tokens are routed by more warps than there are
// streams.
#pragma once

#include "route_row.cuh"
#include "shared.cuh"

namespace duomoe::cuda::rows {

// Warps of a block: this many, or kMaxWarps or fewer.
constexpr int kMostWarps = 12;

// One of a chunk's streams, whose tokens are taken in order by different warps: token n waits for
// its turn and then passes it on. The sum of logsumexp^2 takes sums of exponentials, which are held
// until a logarithm serves 32 of them.
struct Stream {
  // Barriers with a phase for each token with an even or odd n. A warp knows the phase it waits for
  // by its parity, for which that before it must have ended, of token n - 3; which it has if that
  // is kTokensBack tokens of the stream before the warp's own, since the warp took one of them.
  static constexpr int kBarriers = 2, kTokensBack = kBarriers + 1;
  static_assert(kTokensBack * kStreams % kMostWarps == 0);
  uint64_t turn[kBarriers];
  float held[kLanes];
  int holds;
  int32_t tokens;
  float logsumexp_sq;

  // By one thread.
  __device__ void init() {
    for (uint64_t& barrier : turn) init_barrier(&barrier, kLanes);
    holds = tokens = 0;
    logsumexp_sq = 0.0f;
  }
  __device__ void wait_for_turn(unsigned n) {
    if (n == 0) return;
    wait_for_barrier(turn + (n - 1) % kBarriers, (n - 1) / kBarriers % 2);
  }
  __device__ void pass_turn(unsigned n) { arrive_at_barrier(turn + n % kBarriers); }

  // The next are for all lanes, whose accesses to the stream before and after are ordered by the
  // caller.
  __device__ void add(float exponential_sum) {
    if (holds == kLanes) flush();
    const int i = holds;
    __syncwarp();
    if (lane_id() == 0) {
      held[i] = exponential_sum;
      holds = i + 1;
    }
  }
  __device__ void add_logsumexp(float logsumexp) {
    flush();
    if (lane_id() == 0) {
      logsumexp_sq = math::fma(logsumexp, logsumexp, logsumexp_sq);
      ++tokens;
    }
  }
  __device__ __noinline__ void flush() {
    const int n = holds;
    const float value = math::log(lane_id() < n ? held[lane_id()] : 1.0f);
    float sum = logsumexp_sq;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      const float one = __shfl_sync(kAllLanes, value, i);
      sum = math::fma(one, one, sum);
    }
    __syncwarp();
    if (lane_id() == 0) {
      logsumexp_sq = sum;
      tokens += n;
      holds = 0;
    }
    __syncwarp();
  }
};

}  // namespace duomoe::cuda::rows
