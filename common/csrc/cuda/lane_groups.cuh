// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Tokens of E <= 64 experts and K <= 8 slots: eight experts to a lane, so that a group of 1 to 8
// lanes holds a token and a warp several.
//
// A lane's two vectors are 4 P experts apart, P being the lanes of a token: the first step of the
// butterfly of math/router.h is then within a lane.
#pragma once

#include <type_traits>

#include "logits.cuh"

namespace duomoe::cuda::lanes {

constexpr int kMaxTop = 8;
constexpr int kMaxExperts = 64;
constexpr int kVectors = 2;
constexpr int kElements = kVectors * kAdjacent;
using Values = float[kElements];
using Vectors = Raw[kVectors];

// Calls launch with P, a constant: the lanes that a token of so many experts takes.
template <typename F>
void with_lanes(int experts, F launch) {
  if (experts <= kElements) {
    launch(std::integral_constant<int, 1>{});
  } else if (experts <= 2 * kElements) {
    launch(std::integral_constant<int, 2>{});
  } else if (experts <= 4 * kElements) {
    launch(std::integral_constant<int, 4>{});
  } else {
    launch(std::integral_constant<int, 8>{});
  }
}

template <int P>
struct LaneGroup {
  static constexpr int kPadded = kElements * P;
  static constexpr int kSlots = kMaxTop / P;  // of a lane: own, own + P, ...

  int own = lane_id() % P;        // this lane's number among the token's
  int first = lane_id() / P * P;  // the token's first lane

  __device__ int expert(int i) const {
    return kAdjacent * (own + i / kAdjacent * P) + i % kAdjacent;
  }

  template <typename F>
  __device__ static float join(float x, F f) {
#pragma unroll
    for (int width = P / 2; width > 0; width /= 2) x = f(x, __shfl_xor_sync(kAllLanes, x, width));
    return x;
  }
  __device__ static float sum(float x) {
    return join(x, [](float one, float two) { return one + two; });
  }
  __device__ static float row_sum(const Values& x) {
    return sum(((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])));
  }
  // Over the slots, in the lane order of math/router.h.
  __device__ static float slot_sum(const float (&of_slots)[kSlots]) {
    float part[kSlots];
#pragma unroll
    for (int n = 0; n < kSlots; ++n) part[n] = of_slots[n];
#pragma unroll
    for (int half = kSlots / 2; half > 0; half /= 2) {
#pragma unroll
      for (int n = 0; n < half; ++n) part[n] += part[n + half];
    }
    return sum(part[0]);
  }
  // The bits of a ballot that belong to the token.
  __device__ unsigned bits(bool yes) const {
    if (P == 1) return yes;
    return __ballot_sync(kAllLanes, yes) >> first & ((1u << P) - 1);
  }

  // The lane's part of the row that starts at element `row` of `data`.
  template <typename Index>
  __device__ void load_row(DType dtype, const void* data, Index row, int experts, bool whole,
                           Vectors& raw) const {
    const auto load_as = [&](DType dtype) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        raw[j] = load_raw(dtype, data, row, expert(kAdjacent * j), experts, true);
    };
    if (!whole) {
#pragma unroll 1
      for (int j = 0; j < kVectors; ++j) {
        const Raw one = load_raw(dtype, data, row, expert(kAdjacent * j), experts, false);
        (j == 0 ? raw[0] : raw[1]) = one;
      }
    } else if (dtype == DType::kFloat32) {
      load_as(DType::kFloat32);
    } else {
      load_as(DType::kBFloat16);  // of the same size as float16
    }
  }

  // The lane's part of the padded row of floats at `row`.
  __device__ void store_row(float* row, const Values& x) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float* v = x + kAdjacent * j;
      *reinterpret_cast<float4*>(row + expert(kAdjacent * j)) = make_float4(v[0], v[1], v[2], v[3]);
    }
  }

  __device__ static void unpack_row(DType dtype, const Vectors& raw, Values& z) {
    const auto as = [&](DType dtype) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) unpack(dtype, raw[j], z + kAdjacent * j);
    };
    if (dtype == DType::kFloat32) {
      as(DType::kFloat32);
    } else if (dtype == DType::kBFloat16) {
      as(DType::kBFloat16);
    } else {
      as(DType::kFloat16);
    }
  }
};

}  // namespace duomoe::cuda::lanes
