// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Parts of the top-K of two rows by one warp: first each row in the registers of all lanes, then
// each in half a warp.
#pragma once

#include "route_vectors.cuh"

namespace duomoe::cuda {

constexpr int kHalf = kLanes / 2;

// What a warp's selection takes of shared memory, for each of two tokens; what lanes of both halves
// read together lies in different banks.
struct PairSpace {
  alignas(16) float bins[2][kHalf + kAdjacent];
  // The candidates' math::composite, then zeros.
  alignas(16) uint64_t keys[2][kLanes + kAdjacent + 2];  // room for SelectionSpace's
  uint64_t best[2][kHalf];                               // slot_word
  uint32_t claimed;  // places of the lists that are taken, 16 bits for each token
};

// How many of a lane's values reach the bounds: the first token's in the low half, the second's in
// the high one. Added up as floats, since integer additions share a pipe with the comparisons.
template <int kElements>
__device__ uint32_t count_reaching(const float (&v)[2][kElements], const float (&bound)[2]) {
  constexpr float kIntegers = 0x1p23f;  // from here on the lowest bit of a float is 1
  float count[2] = {kIntegers, 0.0f};
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float one;
      asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(v[p][i]), "f"(bound[p]));
      count[p] += one;
    }
  }
  return math::bits_of(math::fma(count[1], 65536.0f, count[0])) - math::bits_of(kIntegers);
}

// Writes the ids of the values that reach the bounds to the places from `place` on, whose order is
// open and has no part in the result. `id` is that of the lane's first element.
template <int kElements>
__device__ void write_ids(const float (&v)[2][kElements], const float (&bound)[2],
                          uint32_t (&place)[2], int id) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int p = 0; p < 2; ++p) append_if_reached(place[p], v[p][i], bound[p], id);
    // The step is made here lest the compiler keep all ids in registers.
    asm volatile("add.u32 %0, %0, %1;"
                 : "+r"(id)
                 : "r"(i % kAdjacent == kAdjacent - 1 ? kColumns - kAdjacent + 1 : 1));
  }
}

// The bounds of both tokens from the bins x of their halves, each with how many are above it: the
// K-th of 16 has K - 1 above it, or fewer where it is one of equal ones.
__device__ inline void bounds_of_bins(float x, int above, int top_k, float (&bound)[2]) {
  unsigned kth = __ballot_sync(kAllLanes, above == top_k - 1);
#pragma unroll 1
  for (int n = top_k - 2; n >= 0 && ((kth & 0xffffu) == 0 || kth >> kHalf == 0); --n) {
    const unsigned lanes = __ballot_sync(kAllLanes, above == n);
    if ((kth & 0xffffu) == 0) kth |= lanes & 0xffffu;
    if (kth >> kHalf == 0) kth |= lanes & 0xffff0000u;
  }
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    bound[p] =
        __shfl_sync(kAllLanes, x, kHalf * p + __ffs(static_cast<int>(kth >> (kHalf * p))) - 1);
  }
}

// How many of `bins` are above x.
__device__ inline int bins_above(float x, const float* bins) {
  int above[kAdjacent] = {};
#pragma unroll
  for (int i = 0; i < kHalf; i += kAdjacent) {
    count_greater(above, *reinterpret_cast<const float4*>(bins + i), x);
  }
  return total(above);
}

// One token's slots by the whole warp, from all of its values: `count` of them reach the bound,
// whose ids are in the list. False, and nothing written, where that is no way for it.
inline __device__ __noinline__ bool finish_token(const Route& a, int64_t t, int count, float bound,
                                                 const SharedValues& value, const int32_t* list,
                                                 PairSpace& space, int32_t* counts) {
  const int lane = lane_id(), top_k = a.top_k;
  const uint32_t keys = shared_address(space.keys), best = shared_address(space.best);
  __syncwarp();
  if (count < top_k) return false;
  if (count > kLanes) {
    if (!select_ties(value, bound, top_k, keys, best)) return false;
  } else {
    const int32_t id = lane < count ? list[lane] : 0;
    store_shared(keys + 8 * lane, lane < count ? composite_of_number(value(id), id) : 0);
    if (lane < kAdjacent) store_shared(keys + 8 * (kLanes + lane), 0);
    rank_candidates(count, top_k, keys, best, value.chosen_by);
  }
  Slot slot{0, 0.0f};
  if (lane < top_k) slot = load_slot(best + 8 * lane);
  const float weight = slot_weight(a, slot.chosen_by);
  if (lane < top_k) {
    a.indices[t * top_k + lane] = slot.id;
    a.weights[t * top_k + lane] = weight;
    atomicAdd(counts + slot.id, 1);
  }
  __syncwarp();
  return true;
}

// What is left of a token that was routed on its own: whether, and from what, its statistics are
// still to be taken.
struct Rest {
  bool statistics;
  float share, logsumexp;
};

// Routes token t by the whole warp. `values.chosen_by` are its scores, to be overwritten with P /
// share where its statistics are left. Out of line, lest the loop over tokens become long.
template <Score kScore>
__device__ __noinline__ Rest route_alone(const Route& a, int64_t t, bool moderate, int count,
                                         float bound, const SharedValues& values,
                                         const int32_t* list, PairSpace& space, int32_t* counts) {
  if (moderate && finish_token(a, t, count, bound, values, list, space, counts)) return {};
  __syncwarp();
  float* scores = const_cast<float*>(values.chosen_by);
  Row row{.score = kScore, .experts = values.experts, .z = a.row(t), .s = scores};
  route_token(a, t, row, reinterpret_cast<uint32_t*>(space.keys[0]), counts, counts);
  return {.statistics = !moderate, .share = row.share, .logsumexp = row.logsumexp};
}

// The groups' values of one of both tokens, of the first on even lanes and of the second on odd
// ones: that of the lane's j-th vector in values[j]. Groups have `lanes` >= 2 whole lanes;
// `score_k` is 1 or 2.
template <int kVectors>
__device__ void group_values(const float (&v)[2][kAdjacent * kVectors], int lanes, int score_k,
                             float (&values)[kVectors]) {
  const bool odd = lane_id() % 2 != 0;
  float second[kVectors];
  const auto join = [&](int j, float other, float other_next) {
    second[j] = fmaxf(fminf(values[j], other), fmaxf(second[j], other_next));
    values[j] = fmaxf(values[j], other);
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float largest[2], next[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const float* four = v[p] + j * kAdjacent;
      const float a = fmaxf(four[0], four[1]), b = fminf(four[0], four[1]);
      const float c = fmaxf(four[2], four[3]), d = fminf(four[2], four[3]);
      largest[p] = fmaxf(a, c);
      next[p] = fmaxf(fminf(a, c), fmaxf(b, d));
    }
    values[j] = odd ? largest[1] : largest[0];
    second[j] = odd ? next[1] : next[0];
    const float other = __shfl_xor_sync(kAllLanes, odd ? largest[0] : largest[1], 1);
    join(j, other, __shfl_xor_sync(kAllLanes, odd ? next[0] : next[1], 1));
  }
#pragma unroll
  for (int width = 2; width < kLanes; width *= 2) {
    if (width >= lanes) break;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float other = __shfl_xor_sync(kAllLanes, values[j], width);
      join(j, other, __shfl_xor_sync(kAllLanes, second[j], width));
    }
  }
  if (score_k == 1) return;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) values[j] += second[j];
}

// Sets the values of all groups but the best to -inf, for both tokens; the bits of the best. Groups
// have 2^shift >= 8 experts, and there are 16 at most.
template <int kVectors>
__device__ void keep_best_groups(const Groups& groups, int shift,
                                 float (&v)[2][kAdjacent * kVectors], PairSpace& space,
                                 unsigned (&kept)[2]) {
  const int lanes = 1 << shift >> 2, lane = lane_id(), half_lane = lane % kHalf;
  float values[kVectors];
  group_values<kVectors>(v, lanes, groups.score_k, values);
  const auto group_of = [&](int j) { return (j * kColumns + kAdjacent * lane) >> shift; };
  if ((lane & (lanes - 1)) < 2) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      space.keys[lane % 2][group_of(j)] = composite_of_number(values[j], group_of(j));
  }
  if (lane < 2 * kAdjacent) space.keys[lane / kAdjacent][groups.count + lane % kAdjacent] = 0;
  __syncwarp();
  const uint64_t* keys = space.keys[lane / kHalf];
  const bool there = half_lane < groups.count;
  const uint64_t key = there ? keys[half_lane] : 0;
  const int better = count_above(key, shared_address(keys), groups.count);
  const unsigned best = __ballot_sync(kAllLanes, there && better < groups.kept);
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    kept[p] = best >> (kHalf * p) & 0xffffu;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const bool stays = kept[p] >> group_of(j) & 1;
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i)
        v[p][kAdjacent * j + i] = stays ? v[p][kAdjacent * j + i] : -math::infinity();
    }
  }
}

// slot_weight for the lanes of a half, K <= 16 and eps <= 1: the scores of a moderate row, and so
// their sum, are within the bounds of math::quotient.
__device__ inline float half_slot_weight(const Route& a, float score) {
  float sum = score;
  for (int width = kHalf / 2; width > 0; width /= 2) sum += __shfl_xor_sync(kAllLanes, sum, width);
  const float weight = math::quotient(score, a.divisor(sum)) * a.options.scale;
  return score > 0.0f ? weight : 0.0f;
}

}  // namespace duomoe::cuda
