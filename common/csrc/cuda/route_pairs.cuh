// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for the common case of route_vectors.cuh, two tokens of a stream at a time: each by the
// whole warp as long as its row is in registers, then each by half a warp. That halves the
// instructions that do not grow with E, and two chains of dependent instructions overlap.
#pragma once

#include "route_vectors.cuh"

namespace duomoe::cuda {

constexpr int kHalf = kLanes / 2;
constexpr int kMaxPairExperts = 3 * kColumns;

// What a warp's selection takes of shared memory, for each of two tokens; what lanes of both halves
// read together lies in different banks.
struct PairSpace {
  alignas(16) float bins[2][kHalf + kAdjacent];
  // The candidates' math::composite, then zeros.
  alignas(16) uint64_t keys[2][kLanes + kAdjacent + 2];  // room for SelectionSpace's
  uint64_t best[2][kHalf];                               // slot_word
  uint32_t claimed;            // places of the lists that are taken, 16 bits for each token
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
    for (int p = 0; p < 2; ++p) {
      asm volatile(
          "{\n\t.reg .pred p;\n\tsetp.ge.f32 p, %1, %2;\n\t@p st.shared.u32 [%0], %3;\n\t"
          "@p add.u32 %0, %0, 4;\n\t}"
          : "+r"(place[p])
          : "f"(v[p][i]), "f"(bound[p]), "r"(id)
          : "memory");
    }
    // The step is made here lest the compiler keep all ids in registers.
    asm volatile("add.u32 %0, %0, %1;"
                 : "+r"(id)
                 : "r"(i % kAdjacent == kAdjacent - 1 ? kColumns - kAdjacent + 1 : 1));
  }
}

// How many of `bins` are above x.
__device__ inline int bins_above(float x, const float* bins) {
  int above[kAdjacent] = {};
#pragma unroll
  for (int i = 0; i < kHalf; i += kAdjacent) {
    const float4 four = *reinterpret_cast<const float4*>(bins + i);
    count_greater(above[0], four.x, x);
    count_greater(above[1], four.y, x);
    count_greater(above[2], four.z, x);
    count_greater(above[3], four.w, x);
  }
  return (above[0] + above[1]) + (above[2] + above[3]);
}

// A token's candidates once more, where few lanes have most of the large values: those that reach
// the K-th of the maxima of 32 sets of experts. Their ids to `list`.
struct Candidates {
  int count;
  float bound;
};
inline __device__ __noinline__ Candidates gather_again(const SharedValues& value, int top_k,
                                                       int32_t* list) {
  const int lane = lane_id();
  float maximum = -math::infinity();
  for (int e = lane; e < value.experts; e += kLanes) maximum = fmaxf(maximum, value(e));
  Candidates found{.count = 0, .bound = bound_of_best(maximum, top_k)};
  __syncwarp();
  for (int e = lane; e < value.experts; e += kLanes) {
    const bool reaches = value(e) >= found.bound;
    const unsigned all = __ballot_sync(kAllLanes, reaches);
    if (reaches) list[found.count + __popc(all & ((1u << lane) - 1))] = e;
    found.count += __popc(all);
  }
  __syncwarp();
  return found;
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
  const float weight = slot_weight(a.options, slot.chosen_by);
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

// slot_weight for the lanes of a half, K <= 16.
__device__ inline float half_slot_weight(const RouterOptions& options, float score) {
  float sum = score;
  for (int width = kHalf / 2; width > 0; width /= 2) sum += __shfl_xor_sync(kAllLanes, sum, width);
  return divided_weight(options, score, sum);
}

// One block per chunk, one warp per stream; K <= 16.
template <int kVectors, Score kScore, VectorMode kMode, bool kGrouped>
__global__ void __launch_bounds__(kStreams* kLanes, 2)
    route_pairs(const __grid_constant__ Route a, int group_shift) {
  using Vectors = VectorRow<kVectors>;
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
  VectorReader<kVectors, kMode> readers[2] = {{a, t, 2}, {a, t + kStreams, 2}};
  const auto fetch = [&](int tokens) {
    if (tokens > 0) readers[0].fetch();
    if (tokens > 1) readers[1].fetch();
  };
  fetch(left);
  clear_expert_counts(a);
  if (chunk.begin >= chunk.end) return;
  // [streams][2][E]: what a row is chosen by, or the scores of a row that is left to route_token;
  // in the end a stream's sums.
  float* mine = shared_memory + warp * 2 * kExperts;
  // [streams][2][E] ids of candidates.
  int32_t* lists = reinterpret_cast<int32_t*>(shared_memory + (kStreams + warp) * 2 * kExperts);
  float* bias = shared_memory + 2 * kStreams * 2 * kExperts;
  int32_t* counts = reinterpret_cast<int32_t*>(bias + kExperts);
  PairSpace& space = spaces[warp];
  const uint32_t ids = shared_address(lists), keys = shared_address(space.keys),
                 best = shared_address(space.best);
  typename Vectors::Values sums = {};
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
  float* half_mine = mine + half * kExperts;
  int32_t* ids_out = a.indices + (t + half * kStreams) * top_k + half_lane;
  float* weights_out = a.weights + (t + half * kStreams) * top_k + half_lane;
  LogSumExps logsumexps;
#pragma unroll 1
  for (; left > 0; left -= 2, t += 2 * kStreams, ids_out += 2 * kStreams * top_k,
                   weights_out += 2 * kStreams * top_k) {
    typename Vectors::Values z[2], s[2], u[2];
    readers[0].unpack_into(z[0]);
    readers[1].unpack_into(z[1]);  // of a token that is not there: any numbers
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
    fetch(left - 2);  // the logits of these are no longer needed
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
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (p >= left) continue;
        logsumexps.add(exponential_sum[p]);
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          sums[i] = math::fma(kSoftmax ? u[p][i] : s[p][i], share[p], sums[i]);
      }
    }

    typename Vectors::Values v[2];
    float maximum[2], bound[2];
    if (lane == 0) space.claimed = 0;
    unsigned kept_groups[2] = {~0u, ~0u};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int i = kAdjacent * j;
        *reinterpret_cast<float4*>(mine + p * kExperts + Vectors::expert(i)) =
            make_float4(s[p][i], s[p][i + 1], s[p][i + 2], s[p][i + 3]);
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float4 b4 = *reinterpret_cast<const float4*>(bias + Vectors::expert(kAdjacent * j));
        const float b[kAdjacent] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
        for (int i = 0; i < kAdjacent; ++i)
          v[p][kAdjacent * j + i] = s[p][kAdjacent * j + i] + b[i];
      }
    }
    if constexpr (kGrouped)
      keep_best_groups<kVectors>(a.groups, group_shift, v, space, kept_groups);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      maximum[p] = v[p][0];
#pragma unroll
      for (int i = 1; i < kElements; ++i) maximum[p] = fmaxf(maximum[p], v[p][i]);
    }
    // A bound that K values reach: the K-th of the maxima of 16 pairs of lanes, or of all lanes;
    // equal ones count one by one.
    if (top_k <= kHalf / 2) {
      const float other = __shfl_xor_sync(kAllLanes, half ? maximum[0] : maximum[1], kHalf);
      const float x = fmaxf(half ? maximum[1] : maximum[0], other);
      space.bins[half][half_lane] = x;
      __syncwarp();
      // The K-th has K - 1 above it, or fewer where it is one of equal ones.
      const int above = bins_above(x, space.bins[half]);
      unsigned kth = __ballot_sync(kAllLanes, above == top_k - 1);
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
    int own_count = static_cast<int>(space.claimed >> (16 * half) & 0xffffu);
    const auto values_of = [&](int p) {
      return SharedValues{
          mine + p * kExperts, bias, 1.0f, kExperts, p == 0 ? kept_groups[0] : kept_groups[1],
          kGrouped ? group_shift : kNoGroups};
    };
    if (moderate && __any_sync(kAllLanes, own_count > kLanes)) {
#pragma unroll 1
      for (int p = 0; p < min(left, 2); ++p) {
        if (__shfl_sync(kAllLanes, own_count, kHalf * p) <= kLanes) continue;
        const Candidates found = gather_again(values_of(p), top_k, lists + p * kExperts);
        if (half == p) own_count = found.count;
        (p == 0 ? bound[0] : bound[1]) = found.bound;
      }
    }
    const bool short_way = own_count >= top_k && own_count <= kLanes;
    if (moderate && left > 1 && __all_sync(kAllLanes, short_way)) {
      const uint32_t own_keys = keys + half * static_cast<uint32_t>(sizeof(space.keys[0]));
      const int32_t* own_ids = lists + half * kExperts;
      const auto candidate = [&](int i) {
        const int32_t id = i < own_count ? own_ids[i] : 0;
        const Slot slot{id, half_mine[id]};
        const uint64_t key =
            i < own_count ? composite_of_number(slot.chosen_by + bias[id], id) : 0;
        store_shared(own_keys + 8 * i, key);
        return std::pair{slot, key};
      };
      const auto place_candidate = [&](const Slot& slot, int i, int better) {
        if (i < own_count && better < top_k)
          store_shared(best + 8 * (half * kHalf + better), slot_word(slot.id, slot.chosen_by));
      };
      const auto [slot, key] = candidate(half_lane);
      if (__any_sync(kAllLanes, own_count > kHalf)) {
        const auto [next, next_key] = candidate(kHalf + half_lane);
        __syncwarp();
        place_candidate(next, kHalf + half_lane, count_above(next_key, own_keys, kLanes));
        place_candidate(slot, half_lane, count_above(key, own_keys, kLanes));
      } else {
        __syncwarp();
        int better = count_above<3 * kAdjacent>(key, own_keys);
        if (__any_sync(kAllLanes, own_count > 3 * kAdjacent))
          better += count_above<kAdjacent>(key, own_keys + 8 * 3 * kAdjacent);
        place_candidate(slot, half_lane, better);
      }
      __syncwarp();
      Slot own{0, 0.0f};
      if (half_lane < top_k) own = load_slot(best + 8 * lane);
      const float weight = half_slot_weight(a.options, own.chosen_by);
      if (half_lane < top_k) {
        *ids_out = own.id;
        *weights_out = weight;
        atomicAdd(counts + own.id, 1);
      }
    } else {
#pragma unroll 1
      for (int p = 0; p < min(left, 2); ++p) {
        const Rest rest = route_alone<kScore>(
            a, t + p * kStreams, moderate, __shfl_sync(kAllLanes, own_count, kHalf * p),
            p == 0 ? bound[0] : bound[1], values_of(p), lists + p * kExperts, space, counts);
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
