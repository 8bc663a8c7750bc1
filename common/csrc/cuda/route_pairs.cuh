// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for the common case of route_vectors.cuh, two tokens of a stream at a time: each by the
// whole warp as long as its row is in registers, then each by half a warp. That halves the
// instructions that do not grow with E. Four tokens at a time are slower, though chains of
// dependent instructions overlap: what counts is how many are issued.
#pragma once

#include "pair_selection.cuh"

namespace duomoe::cuda {

// The logits of two tokens of a stream, four neighbouring elements of every 128 on a lane.
template <int kVectors, DType kDType>
class PairReader {
 public:
  // From token t on.
  __device__ PairReader(const Route& a, int64_t t)
      : next_(a.logits + (t * kVectors * kColumns + kAdjacent * lane_id()) * kBytes) {}

  // Asks for the next two tokens, `left` of which are there.
  __device__ void fetch(int left) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= left) continue;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const char* from = next_ + (i * kStreams * kVectors + j) * kColumns * kBytes;
        if constexpr (kDType == DType::kFloat32) {
          raw_[i][j] = __ldcs(reinterpret_cast<const uint4*>(from));
        } else {
          const uint2 words = __ldcs(reinterpret_cast<const uint2*>(from));
          raw_[i][j].x = words.x;
          raw_[i][j].y = words.y;
        }
      }
    }
    next_ += 2 * kStreams * kVectors * kColumns * kBytes;
  }

  __device__ void unpack_into(int token, float* z) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) unpack(kDType, raw_[token][j], z + kAdjacent * j);
  }

 private:
  static constexpr int kBytes = kDType == DType::kFloat32 ? 4 : 2;  // of an element

  const char* next_;
  Raw raw_[2][kVectors] = {};
};

// One block per chunk, one warp per stream; K <= 16.
template <int kVectors, Score kScore, DType kDType, bool kGrouped>
__global__ void __launch_bounds__(kStreams* kLanes, 2)
    route_pairs(const __grid_constant__ Route a, int group_shift) {
  using Vectors = VectorRow<kVectors>;
  using Values = typename Vectors::Values;
  constexpr bool kSoftmax = kScore == Score::kSoftmax;
  constexpr int kElements = Vectors::kElements, kThreads = kStreams * kLanes;
  constexpr int kExperts = kVectors * kColumns;
  extern __shared__ __align__(16) float shared_memory[];
  __shared__ PairSpace spaces[kStreams];
  __shared__ float stream_logsumexp_sq[kStreams];
  __shared__ int32_t stream_tokens[kStreams];

  const Chunk chunk = chunk_of(a, blockIdx.x);
  const int warp = warp_id(), lane = lane_id(), top_k = a.top_k;
  int64_t t = chunk.begin + warp;
  int left = t < chunk.end ? static_cast<int>((chunk.end - t + kStreams - 1) / kStreams) : 0;
  // The bias is asked for first: the logits of all warps keep the memory busy for a while.
  constexpr int kBiases = (kExperts + kThreads - 1) / kThreads;
  float own_bias[kBiases];
#pragma unroll
  for (int i = 0; i < kBiases; ++i) {
    const int e = i * kThreads + static_cast<int>(threadIdx.x);
    own_bias[i] = a.bias && e < kExperts ? a.bias[e] : 0.0f;
  }
  PairReader<kVectors, kDType> reader(a, t);
  reader.fetch(left);
  clear_expert_counts(a);
  if (chunk.begin >= chunk.end) return;
  // [streams][2][E]: what a row is chosen by, or the scores of a row that is left to
  // route_token; in the end a stream's sums.
  float* mine = shared_memory + warp * 2 * kExperts;
  // [streams][2][E] ids of candidates.
  int32_t* lists = reinterpret_cast<int32_t*>(shared_memory + (kStreams + warp) * 2 * kExperts);
  float* bias = shared_memory + 2 * kStreams * 2 * kExperts;
  int32_t* counts = reinterpret_cast<int32_t*>(bias + kExperts);
  PairSpace& space = spaces[warp];
  const uint32_t ids = shared_address(lists), keys = shared_address(space.keys),
                 best = shared_address(space.best);
  Values sums = {};
  bool finite_bias = true;
#pragma unroll
  for (int i = 0; i < kBiases; ++i) {
    const int e = i * kThreads + static_cast<int>(threadIdx.x);
    finite_bias = finite_bias && math::absolute(own_bias[i]) < 1e30f;
    if (e >= kExperts) continue;
    bias[e] = own_bias[i] + 0.0f;  // -0 + 0 = +0
    counts[e] = 0;
  }
  // With other biases no row is moderate.
  const float limit = __syncthreads_and(finite_bias) ? math::moderate_limit(kScore) : -1.0f;

  const int half = lane / kHalf, half_lane = lane % kHalf;
  // The lane of the other half in a pair is this one ^ partner. A quarter of the lanes may have
  // groups that are all out, so each quarter of the one half has pairs with both of the other.
  const int partner = kGrouped ? kHalf + lane % 8 / 4 * 8 : kHalf;
  int32_t* ids_out = a.indices + (t + half * kStreams) * top_k + half_lane;
  float* weights_out = a.weights + (t + half * kStreams) * top_k + half_lane;
  LogSumExps logsumexps;
#pragma unroll 1
  for (; left > 0; left -= 2, t += 2 * kStreams, ids_out += 2 * kStreams * top_k,
                   weights_out += 2 * kStreams * top_k) {
    const bool there = half < left;  // the half's token
    Values z[2], s[2], u[2];
    reader.unpack_into(0, z[0]);
    reader.unpack_into(1, z[1]);  // of a token that is not there: any numbers
    float lane_exponentials[2], lane_scores[2], exponential_sum[2], share[2];
    bool moderate = true;  // both
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float magnitude = 0.0f;
      Columns exponentials, scores;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        magnitude = fmaxf(magnitude, fabsf(z[p][i]));
        u[p][i] = math::exp_moderate(z[p][i]);
        if (!kSoftmax) s[p][i] = moderate_score<kScore>(z[p][i], u[p][i]);
        // Sums of positive numbers: 0 + u = u.
        const int c = i % kAdjacent;
        exponentials[c] = i < kAdjacent ? u[p][i] : exponentials[c] + u[p][i];
        if (!kSoftmax) scores[c] = i < kAdjacent ? s[p][i] : scores[c] + s[p][i];
      }
      lane_exponentials[p] = join_columns(exponentials);
      if (!kSoftmax) lane_scores[p] = join_columns(scores);
      // fmaxf passes over NaN, of which exp_moderate makes more than a moderate row can have.
      const bool row = magnitude <= limit && lane_exponentials[p] < 1e37f;
      moderate = moderate && (__all_sync(kAllLanes, row) != 0 || p >= left);
    }
    reader.fetch(left - 2);  // the logits of these are no longer needed
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      exponential_sum[p] = warp_sum(lane_exponentials[p]);
      if constexpr (kSoftmax) {
        share[p] = math::reciprocal(exponential_sum[p]);
#pragma unroll
        for (int i = 0; i < kElements; ++i) s[p][i] = u[p][i] * share[p];
      } else {
        share[p] = math::reciprocal(warp_sum(lane_scores[p]));
      }
    }
    if (moderate) {
      logsumexps.add(exponential_sum, min(left, 2));
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (p >= left) continue;
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          sums[i] = math::fma(kSoftmax ? u[p][i] : s[p][i], share[p], sums[i]);
      }
    }

    Values v[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int i = kAdjacent * j, e = Vectors::expert(i);
        *reinterpret_cast<float4*>(mine + p * kExperts + e) =
            make_float4(s[p][i], s[p][i + 1], s[p][i + 2], s[p][i + 3]);
        const float4 b = *reinterpret_cast<const float4*>(bias + e);
        v[p][i] = s[p][i] + b.x;
        v[p][i + 1] = s[p][i + 1] + b.y;
        v[p][i + 2] = s[p][i + 2] + b.z;
        v[p][i + 3] = s[p][i + 3] + b.w;
      }
    }
    unsigned kept_groups[2] = {~0u, ~0u};
    if constexpr (kGrouped)
      keep_best_groups<kVectors>(a.groups, group_shift, v, space, kept_groups);
    float maximum[2], bound[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      maximum[p] = v[p][0];
#pragma unroll
      for (int i = 1; i < kElements; ++i) maximum[p] = fmaxf(maximum[p], v[p][i]);
    }
    // A bound that K values reach: the K-th of the maxima of 16 pairs of lanes, or of all lanes;
    // equal ones count one by one.
    if (lane == 0) space.claimed = 0;
    if (top_k <= kHalf / 2) {
      const float other = __shfl_xor_sync(kAllLanes, half ? maximum[0] : maximum[1], partner);
      const float x = fmaxf(half ? maximum[1] : maximum[0], other);
      space.bins[half][half_lane] = x;
      __syncwarp();
      bounds_of_bins(x, bins_above(x, space.bins[half]), top_k, bound);
    } else {
#pragma unroll
      for (int p = 0; p < 2; ++p) bound[p] = bound_of_best(maximum[p], top_k);
      __syncwarp();
    }
    const uint32_t own = count_reaching(v, bound);
    uint32_t first = 0;
    if (own != 0) first = atomicAdd(&space.claimed, own);
    uint32_t place[2] = {ids + 4 * (first & 0xffffu), ids + 4 * (kExperts + (first >> 16))};
    write_ids(v, bound, place, kAdjacent * lane);
    __syncwarp();
    const int count =
        there ? static_cast<int>(space.claimed >> (16 * half) & 0xffffu) : 0;  // the half's
    const auto values_of = [&](int p) {
      return SharedValues{mine + p * kExperts,
                          bias,
                          1.0f,
                          kExperts,
                          p == 0 ? kept_groups[0] : kept_groups[1],
                          kGrouped ? group_shift : kNoGroups};
    };
    const bool short_way = moderate && count <= kLanes && (count >= top_k || !there);
    if (__all_sync(kAllLanes, short_way)) {
      const uint32_t own_keys = keys + half * static_cast<uint32_t>(sizeof(space.keys[0]));
      const auto candidate = [&](int i) {
        const int32_t id = i < count ? lists[half * kExperts + i] : 0;
        const Slot slot{id, mine[half * kExperts + id]};
        const uint64_t key = i < count ? composite_of_number(slot.chosen_by + bias[id], id) : 0;
        store_shared(own_keys + 8 * i, key);
        return std::pair{slot, key};
      };
      const auto place_candidate = [&](const Slot& slot, int i, int better) {
        if (i < count && better < top_k)
          store_shared(best + 8 * (half * kHalf + better), slot_word(slot.id, slot.chosen_by));
      };
      constexpr int kUsual = 3 * kAdjacent;
      const auto [slot, key] = candidate(half_lane);
      if (__any_sync(kAllLanes, count > kHalf)) {
        const auto [next, next_key] = candidate(kHalf + half_lane);
        __syncwarp();
        place_candidate(next, kHalf + half_lane, count_above(next_key, own_keys, kLanes));
        place_candidate(slot, half_lane, count_above(key, own_keys, kLanes));
      } else {
        __syncwarp();
        int better = count_above<kUsual>(key, own_keys);
        if (__any_sync(kAllLanes, count > kUsual))
          better += count_above<kHalf - kUsual>(key, own_keys + 8 * kUsual);
        place_candidate(slot, half_lane, better);
      }
      __syncwarp();
      Slot own_slot{0, 0.0f};
      if (half_lane < top_k && there) own_slot = load_slot(best + 8 * lane);
      const float weight = half_slot_weight(a, own_slot.chosen_by);
      if (half_lane < top_k && there) {
        *ids_out = own_slot.id;
        *weights_out = weight;
        atomicAdd(counts + own_slot.id, 1);
      }
    } else {
#pragma unroll 1
      for (int p = 0; p < min(left, 2); ++p) {
        const int own_count = __shfl_sync(kAllLanes, count, kHalf * p);
        const Rest rest = route_alone<kScore>(a, t + p * kStreams, moderate, own_count,
                                              p == 0 ? bound[0] : bound[1], values_of(p),
                                              lists + p * kExperts, space, counts);
        if (!rest.statistics) continue;
        logsumexps.add_ready(rest.logsumexp);
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          sums[i] = math::fma(mine[p * kExperts + Vectors::expert(i)], rest.share, sums[i]);
      }
    }
    __syncwarp();  // all have read `mine`
  }

  const float logsumexp_sq = logsumexps.sum_of_squares();
  if (lane == 0) {
    stream_logsumexp_sq[warp] = logsumexp_sq;
    stream_tokens[warp] = logsumexps.count();
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = kAdjacent * j;
    *reinterpret_cast<float4*>(mine + Vectors::expert(i)) =
        make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }
  __syncthreads();
  write_partials(a, counts, true, stream_logsumexp_sq, stream_tokens,
                 [&](int j, int e) { return shared_memory[j * 2 * kExperts + e]; });
}

void launch_route_pairs(Queue& queue, const Route& a, int64_t chunks, int group_shift);

}  // namespace duomoe::cuda
