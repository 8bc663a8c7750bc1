// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Top-K of a long row by one warp, K <= 64, in the three steps of rank.cuh: a bound from the
// largest of a row's kColumns columns, the experts that reach it, and the rank of each by counting.
// Values are finite.
#pragma once

#include "rank.cuh"

namespace duomoe::cuda {

using math::kColumns;

constexpr int kMaxTop = 2 * kLanes;

// The candidates, experts that reach a bound, in any order, and which of them are the K best, in
// order.
struct Found {
  static constexpr int kRoom = 2 * kMaxTop, kTogether = 8, kNone = -1, kOne = 1 << 16;
  alignas(16) float values[kRoom + kTogether];  // -inf after the last
  alignas(16) int32_t ids[kRoom + kAdjacent];
  union {
    float scores[kRoom];
    int32_t columns[kColumns];  // those with candidates, while these are looked for
  };
  int32_t best[kMaxTop];  // the index, plus kOne or 0
  int claimed;            // places of `columns`, and then of `ids`

  __device__ int index_of_best(int k) const { return best[k] & (kOne - 1); }
};

// signed_key with -0 equal to +0.
__device__ inline int key_of(float x) { return signed_key(x + 0.0f); }

// How many maxima may reach a bound: with fewer the search would be longer.
__device__ inline int enough_maxima(int top_k) { return top_k + top_k / 4 + 2; }

// A bound that at least K <= 64 of the lanes' maxima reach, of which there are K or more, and -inf
// in place of those that are not there; few others do unless they equal the K-th. Each round cuts
// the interval of keys in four.
__device__ inline float bound_of_maxima(const Columns& maxima, bool all_there, int top_k) {
  int keys[kAdjacent];
#pragma unroll
  for (int i = 0; i < kAdjacent; ++i)
    keys[i] = maxima[i] > -math::infinity() ? key_of(maxima[i]) : INT_MIN;
  const int most = max(max(keys[0], keys[1]), max(keys[2], keys[3]));
  // 32 lanes' largest, and as many second largest, are reached by 32 and by 64.
  int least = most;
  if (top_k > kLanes) {
    least = max(min(max(keys[0], keys[1]), max(keys[2], keys[3])),
                max(min(keys[0], keys[1]), min(keys[2], keys[3])));
  }
  if (!all_there) {
    least = INT_MAX;
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i) {
      if (keys[i] != INT_MIN) least = min(least, keys[i]);
    }
  }
  // K or more reach `low`, fewer reach `high`.
  int low = __reduce_min_sync(kAllLanes, least);
  int high = __reduce_max_sync(kAllLanes, most) + 1;
  const int enough = enough_maxima(top_k);
#pragma unroll 1
  for (unsigned width; (width = static_cast<unsigned>(high) - static_cast<unsigned>(low)) > 1;) {
    const int one = static_cast<int>(low + width / 4), two = static_cast<int>(low + width / 2);
    const int three = static_cast<int>(two + width / 4);
    unsigned packed = 0;
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i) {
      if (keys[i] >= one) packed += 1;
      if (keys[i] >= two) packed += 1 << 8;
      if (keys[i] >= three) packed += 1 << 16;
    }
    packed = __reduce_add_sync(kAllLanes, packed);  // 128 each at most
    const int reach_one = packed & 0xff, reach_two = packed >> 8 & 0xff, reach_three = packed >> 16;
    int reach = INT_MAX;
    if (reach_two >= top_k) {
      const bool upper = reach_three >= top_k;
      low = upper ? three : two;
      high = upper ? high : three;
      reach = upper ? reach_three : reach_two;
    } else {
      const bool upper = reach_one >= top_k;
      low = upper ? one : low;
      high = upper ? two : one;
      reach = upper ? reach_one : INT_MAX;
    }
    if (reach <= enough) break;
  }
  return value_of_signed_key(low);
}

// The same where all maxima are there and K is small, of the lanes' largest: by the rank of each.
constexpr int kFewTop = 20;
__device__ inline float bound_of_lanes(const Columns& maxima, int top_k, Found& found) {
  const float own = fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]));
  found.values[lane_id()] = own;
  __syncwarp();
  int better[kAdjacent] = {};
#pragma unroll
  for (int i = 0; i < kLanes; i += kAdjacent)
    count_greater(better, *reinterpret_cast<const float4*>(found.values + i), own);
  const int key = total(better) < top_k ? key_of(own) : INT_MAX;
  return value_of_signed_key(__reduce_min_sync(kAllLanes, key));
}

// found.best by value and id, of any number of candidates.
static __device__ __noinline__ void rank_ties(int count, int top_k, Found& found) {
  if (lane_id() < kAdjacent) found.ids[count + lane_id()] = 0;
  __syncwarp();
#pragma unroll 1
  for (int own = lane_id(); own < count; own += kLanes) {
    const float value = found.values[own];
    const int32_t id = found.ids[own];
    int place = 0;
#pragma unroll 2
    for (int i = 0; i < count; i += kAdjacent) {
      const float4 x = *reinterpret_cast<const float4*>(found.values + i);
      const int4 ids = *reinterpret_cast<const int4*>(found.ids + i);
      place += x.x > value || (x.x == value && ids.x < id);
      place += x.y > value || (x.y == value && ids.y < id);
      place += x.z > value || (x.z == value && ids.z < id);
      place += x.w > value || (x.w == value && ids.w < id);
    }
    if (place < top_k) found.best[place] = own;
  }
  __syncwarp();
}

// Adds candidates `first` to first + 2 kLanes to found.best: kOne and the index of each at its
// place by value alone, which equal ones share. The places of the lane's own two, or kNone.
struct Places {
  int first, second;
};
__device__ inline Places place_two(int first, int count, int top_k, Found& found) {
  const int own = first + lane_id(), second = own + kLanes;
  const float4 *values = reinterpret_cast<const float4*>(found.values),
               *end = values + (count + kAdjacent - 1) / kAdjacent;
  Places places{Found::kNone, Found::kNone};
  const auto place_candidate = [&](int own, const int (&above)[kAdjacent]) {
    const int place = total(above);
    if (own >= count || place >= top_k) return Found::kNone;
    atomicAdd(found.best + place, Found::kOne + own);
    return place;
  };
  const float value = own < count ? found.values[own] : 0.0f;
  int above[kAdjacent] = {};
  if (first + kLanes < count) {
    const float second_value = second < count ? found.values[second] : 0.0f;
    int second_above[kAdjacent] = {};
#pragma unroll 1
    for (; values < end; values += 2) {
      const float4 four = values[0], next = values[1];
      count_greater(above, four, value);
      count_greater(second_above, four, second_value);
      count_greater(above, next, value);
      count_greater(second_above, next, second_value);
    }
    places.second = place_candidate(second, second_above);
  } else {
#pragma unroll 1
    for (; values < end; values += 2) {
      const float4 four = values[0], next = values[1];
      count_greater(above, four, value);
      count_greater(above, next, value);
    }
  }
  places.first = place_candidate(own, above);
  return places;
}

// The same for all candidates; true if no two of them are equal.
static __device__ __noinline__ bool place_many(int count, int top_k, Found& found) {
#pragma unroll 1
  for (int first = 0; first < count; first += 2 * kLanes) place_two(first, count, top_k, found);
  __syncwarp();
  bool single = true;
  for (int k = lane_id(); k < top_k; k += kLanes)
    single = single && found.best[k] < 2 * Found::kOne;
  return __all_sync(kAllLanes, single);
}

// Gives two candidates with one place this and the next, by their ids.
static __device__ __noinline__ void part_pairs(Places places, int top_k, Found& found) {
  const auto part = [&](int own, int place) {
    if (place == Found::kNone || found.best[place] < 2 * Found::kOne) return place;
    const int other = found.best[place] - 2 * Found::kOne - own;
    return place + (found.ids[other] < found.ids[own] ? 1 : 0);
  };
  const int own = lane_id(), second = own + kLanes;
  const int place = part(own, places.first), second_place = part(second, places.second);
  __syncwarp();
  if (place != Found::kNone && place < top_k) found.best[place] = own;
  if (second_place != Found::kNone && second_place < top_k) found.best[second_place] = second;
  __syncwarp();
}

// found.best: the K of the `count` candidates that are first by (value descending, id ascending).
__device__ inline void rank_found(int count, int top_k, Found& found) {
  if (lane_id() < Found::kTogether) found.values[count + lane_id()] = -math::infinity();
#pragma unroll
  for (int k = lane_id(); k < kMaxTop; k += kLanes) found.best[k] = 0;
  __syncwarp();
  if (count > 2 * kLanes) {
    if (!place_many(count, top_k, found)) rank_ties(count, top_k, found);
    return;
  }
  const Places places = place_two(0, count, top_k, found);
  __syncwarp();
  const auto at = [&](int place) { return place == Found::kNone ? 0 : found.best[place]; };
  const int most = max(at(places.first), at(places.second));
  if (__all_sync(kAllLanes, most < 2 * Found::kOne)) return;
  if (__all_sync(kAllLanes, most < 3 * Found::kOne)) {
    part_pairs(places, top_k, found);
  } else {
    rank_ties(count, top_k, found);
  }
}

}  // namespace duomoe::cuda
