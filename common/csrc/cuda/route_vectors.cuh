// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for E <= 384 and K <= 16: one warp per token, whose lanes hold four neighbouring experts
// of every 128. One warp per stream of a chunk. Bound by the issue of instructions, not by memory.
#pragma once

#include "rank.cuh"
#include "route.cuh"

namespace duomoe::cuda {

constexpr int kMaxVectors = 3, kMaxVectorSlots = 16;

// A group_shift with which all experts are in one group.
constexpr int kNoGroups = 31;

// What a warp's selection takes of shared memory.
struct SelectionSpace {
  static constexpr int kRoom = 2 * kLanes;
  alignas(16) uint64_t candidates[kRoom + kAdjacent];  // math::composite, then zeros
  uint64_t best[kLanes];                               // slot_word
};

// A slot's expert and what it is chosen by, for lane k < K; in shared memory as one word.
struct Slot {
  int32_t id;
  float chosen_by;
};
__device__ inline uint64_t slot_word(int32_t id, float chosen_by) {
  return static_cast<uint32_t>(id) | static_cast<uint64_t>(math::bits_of(chosen_by)) << 32;
}
__device__ inline Slot load_slot(uint32_t address) {
  const uint64_t word = load_shared(address);
  return {static_cast<int32_t>(word), math::float_of(static_cast<uint32_t>(word >> 32))};
}

// The value of an expert: chosen_by[e] + bias[e] * bias_factor, which is 0 or 1; -inf if its group
// is out. Groups have 2^group_shift experts.
struct SharedValues {
  const float* chosen_by;
  const float* bias;
  float bias_factor;
  int experts;
  unsigned kept_groups;
  int group_shift;

  __device__ float operator()(int e) const {
    if (e >= experts || !(kept_groups >> (e >> group_shift) & 1)) return -math::infinity();
    return math::fma(bias[e], bias_factor, chosen_by[e]);
  }
};

// Fills space.best with the K <= 32 best of `count` candidates, which are followed by zeros.
__device__ inline void rank_candidates(int count, int top_k, uint32_t candidates, uint32_t best,
                                       const float* chosen_by) {
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < count; first += kLanes) {
    const int own = first + lane_id();
    const uint64_t key = load_shared(candidates + 8 * own);
    const int better = count_above(key, candidates, count);
    if (own < count && better < top_k) {
      const int32_t id = math::id_of(key);
      store_shared(best + 8 * better, slot_word(id, chosen_by[id]));
    }
  }
  __syncwarp();
}

// The same for values of which too many reach the bound: the best of those above it, then the first
// of those equal to it. If the former are too many, since few lanes have most of the large values,
// again with the K-th of the maxima of 32 other sets of experts. False where they still are, or all
// that reach the bound are too few.
inline __device__ __noinline__ bool select_ties(const SharedValues& values, float bound, int top_k,
                                                uint32_t candidates, uint32_t best) {
  const SharedValues value = values;
  const unsigned lanes_before = (1u << lane_id()) - 1;
  int above;
  __syncwarp();  // all lanes' values are there
#pragma unroll 1
  for (bool again = false;; again = true) {
    above = 0;
#pragma unroll 1
    for (int first = 0; first < value.experts; first += kLanes) {
      const float v = value(first + lane_id());
      const unsigned all = __ballot_sync(kAllLanes, v > bound);
      const int place = above + __popc(all & lanes_before);
      if (v > bound && place < SelectionSpace::kRoom)
        store_shared(candidates + 8 * place, composite_of_number(v, first + lane_id()));
      above += __popc(all);
    }
    if (above <= SelectionSpace::kRoom) break;
    if (again) return false;
    float maximum = -math::infinity();
#pragma unroll 1
    for (int e = lane_id(); e < value.experts; e += kLanes) maximum = fmaxf(maximum, value(e));
    bound = bound_of_best(maximum, top_k);
    __syncwarp();  // before the candidates are written again
  }
  int taken = above;
#pragma unroll 1
  for (int first = 0; first < value.experts && taken < top_k; first += kLanes) {
    const int e = first + lane_id();
    const bool equal = value(e) == bound;
    const unsigned all = __ballot_sync(kAllLanes, equal);
    const int place = taken + __popc(all & lanes_before);
    if (equal && place < top_k) store_shared(best + 8 * place, slot_word(e, value.chosen_by[e]));
    taken += __popc(all);
  }
  if (taken < top_k) return false;
  if (lane_id() < kAdjacent) store_shared(candidates + 8 * (above + lane_id()), 0);
  rank_candidates(above, top_k, candidates, best, value.chosen_by);
  return true;
}

template <int kVectors>
struct VectorRow {
  static constexpr int kElements = kAdjacent * kVectors;
  using Values = float[kElements];

  // Expert of a lane's element i.
  static __device__ int expert(int i) {
    return i / kAdjacent * kColumns + i % kAdjacent + kAdjacent * lane_id();
  }

  struct Votes {
    unsigned lanes[kElements];
    int count;

    __device__ Votes(const Values& v, float bound) : count(0) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        lanes[i] = __ballot_sync(kAllLanes, v[i] >= bound);
        count += __popc(lanes[i]);
      }
    }
  };

  // space.best: the K best of v, whose values by expert are `shared_values`. Any bound that K to 32
  // values reach will do: `bound` is one that did for a token before, and what is tried first.
  // False where there are too many candidates, or too few values.
  static __device__ bool select(const Values& v, int top_k, const SharedValues& shared_values,
                                uint32_t candidates, uint32_t best, float& bound) {
    Votes votes(v, bound);
    if (votes.count < top_k || votes.count > kLanes) {
      float maximum = v[0];
#pragma unroll
      for (int i = 1; i < kElements; ++i) maximum = fmaxf(maximum, v[i]);
      // So that about twice K values reach it.
      bound = bound_of_best(maximum, min(top_k + top_k * 3 / 4, top_k + 8));
      votes = Votes(v, bound);
      if (votes.count < top_k) return false;
      if (votes.count > kLanes) {
        bound = bound_of_best(maximum, top_k);
        return select_ties(shared_values, bound, top_k, candidates, best);
      }
    }
    const unsigned lanes_before = (1u << lane_id()) - 1;
    uint32_t end = candidates;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (v[i] >= bound) {
        store_shared(end + 8 * __popc(votes.lanes[i] & lanes_before),
                     composite_of_number(v[i], expert(i)));
      }
      end += 8 * __popc(votes.lanes[i]);
    }
    if (lane_id() < kAdjacent) store_shared(end + 8 * lane_id(), 0);
    rank_candidates(votes.count, top_k, candidates, best, shared_values.chosen_by);
    return true;
  }

  // A group's value, on each of its lanes.
  static __device__ float group_value(const float* v, int lanes, int score_k) {
    const float a = fmaxf(v[0], v[1]), b = fminf(v[0], v[1]);
    const float c = fmaxf(v[2], v[3]), d = fminf(v[2], v[3]);
    float first = fmaxf(a, c), second = fmaxf(fminf(a, c), fmaxf(b, d));
    for (int width = 1; width < lanes; width *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, first, width);
      const float other_second = __shfl_xor_sync(kAllLanes, second, width);
      second = fmaxf(fminf(first, other), fmaxf(second, other_second));
      first = fmaxf(first, other);
    }
    return score_k == 1 ? first : first + second;
  }

  // Sets the values of all groups but the best to -inf; the bits of the best. Groups are of 2^shift
  // experts; `scratch` has room for 32 values.
  static __device__ unsigned keep_best_groups(const Groups& groups, int shift, Values& v,
                                              float* scratch) {
    const int lanes = 1 << shift >> 2;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float mine = group_value(v + kAdjacent * j, lanes, groups.score_k);
      const int group = expert(kAdjacent * j) >> shift;
      if ((lane_id() & (lanes - 1)) == 0 && group < groups.count) scratch[group] = mine;
    }
    __syncwarp();
    const int own = lane_id();
    const float value = scratch[own < groups.count ? own : 0];
    int better = own < groups.count ? 0 : kLanes;
    for (int g = 0; g < groups.count; ++g) {
      const float other = scratch[g];
      better += other > value || (other == value && g < own);
    }
    const unsigned kept = __ballot_sync(kAllLanes, better < groups.kept);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int group = expert(kAdjacent * j) >> shift;
      const bool stays = group < groups.count && (kept >> group & 1);
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        if (!stays) v[kAdjacent * j + i] = -math::infinity();
      }
    }
    __syncwarp();
    return kept;
  }
};

// The lane's part of a token's row.
template <int kVectors>
struct VectorReader {
  const Route& a;
  int64_t next;  // the next token's first element
  Raw raw[kVectors] = {};

  // From token t on, every one of a stream.
  __device__ VectorReader(const Route& route, int64_t t) : a(route), next(t * route.experts) {}

  __device__ void fetch() {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      raw[j] = load_raw(a.dtype, a.logits, next, VectorRow<kVectors>::expert(kAdjacent * j),
                        a.experts, a.whole_vectors);
    }
    next += static_cast<int64_t>(kStreams) * a.experts;
  }

  __device__ void unpack_into(float* z) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) unpack(a.dtype, raw[j], z + kAdjacent * j);
  }
};

template <Score kScore>
__device__ float moderate_score(float z, float u) {
  return kScore == Score::kSigmoid ? math::moderate_sigmoid(z, u).value
                                   : math::elementwise_score(kScore, z);
}

// One block per chunk, one warp per stream.
template <int kVectors, Score kScore>
__global__ void __launch_bounds__(kStreams* kLanes, 2)
    route_vectors(const __grid_constant__ Route a, int group_shift) {
  using Vectors = VectorRow<kVectors>;
  constexpr bool kSoftmax = kScore == Score::kSoftmax;
  constexpr int kElements = Vectors::kElements, kThreads = kStreams * kLanes;
  extern __shared__ __align__(16) float shared_memory[];
  __shared__ SelectionSpace spaces[kStreams];
  __shared__ float stream_logsumexp_sq[kStreams];
  __shared__ int32_t stream_tokens[kStreams];

  const Chunk chunk = chunk_of(a, blockIdx.x);
  const int experts = a.experts, warp = warp_id(), lane = lane_id(), top_k = a.top_k;
  int64_t t = chunk.begin + warp;
  int left = t < chunk.end ? static_cast<int>((chunk.end - t + kStreams - 1) / kStreams) : 0;
  VectorReader<kVectors> reader(a, t);
  if (left > 0) reader.fetch();
  clear_expert_counts(a);
  if (chunk.begin >= chunk.end) return;
  const int padded = (experts + kAdjacent - 1) / kAdjacent * kAdjacent;
  // [streams][E]: what a row is chosen by, or the scores of a row that is left to route_token; in
  // the end a stream's sums.
  float* mine = shared_memory + warp * padded;
  float* bias = shared_memory + kStreams * padded;
  int32_t* counts = reinterpret_cast<int32_t*>(bias + padded);
  float* scratch = reinterpret_cast<float*>(spaces[warp].candidates);
  const uint32_t candidates = shared_address(spaces[warp].candidates);
  const uint32_t best = shared_address(spaces[warp].best);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < a.count_words(); i += kThreads) counts[i] = 0;

  typename Vectors::Values b, sums;
  bool finite_bias = true;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int e = Vectors::expert(i);
    sums[i] = b[i] = 0.0f;
    if (!a.bias) continue;
    b[i] = e < experts ? a.bias[e] + 0.0f : 0.0f;  // -0 + 0 = +0
    finite_bias = finite_bias && math::absolute(b[i]) < 1e30f;
  }
  if (warp == 0) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int e = Vectors::expert(kAdjacent * j), i = kAdjacent * j;
      if (e < experts)
        *reinterpret_cast<float4*>(bias + e) = make_float4(b[i], b[i + 1], b[i + 2], b[i + 3]);
    }
  }
  // With other biases no row is moderate.
  const float limit = __all_sync(kAllLanes, finite_bias) ? math::moderate_limit(kScore) : -1.0f;
  __syncthreads();

  int32_t* ids_out = a.indices + t * top_k + lane;
  float* weights_out = a.weights + t * top_k + lane;
  LogSumExps logsumexps;
  float bound = math::infinity(), loss_bound = math::infinity();
  for (; left > 0;
       --left, t += kStreams, ids_out += kStreams * top_k, weights_out += kStreams * top_k) {
    typename Vectors::Values z, s, u;
    reader.unpack_into(z);
    if (left > 1) reader.fetch();
    if (a.mask && !a.mask[t]) {
      leave_slots_unused(a, t);
      continue;
    }
    float magnitude = 0.0f;
    Columns exponentials, scores;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      magnitude = fmaxf(magnitude, fabsf(z[i]));
      u[i] = math::exp_moderate(z[i]);
      if (!kSoftmax) s[i] = moderate_score<kScore>(z[i], u[i]);
      if (i >= kElements - kAdjacent && Vectors::expert(i) >= experts) u[i] = s[i] = 0.0f;
      // Sums of positive numbers: 0 + u = u.
      exponentials[i % kAdjacent] = i < kAdjacent ? u[i] : exponentials[i % kAdjacent] + u[i];
      if (!kSoftmax) scores[i % kAdjacent] = i < kAdjacent ? s[i] : scores[i % kAdjacent] + s[i];
    }
    const float lane_exponentials = join_columns(exponentials);
    // fmaxf passes over NaN, of which exp_moderate makes more than a moderate row can have.
    bool done = __all_sync(kAllLanes, magnitude <= limit && lane_exponentials < 1e37f) != 0;
    const float exponential_sum = warp_sum(lane_exponentials);
    float share;
    if (kSoftmax) {
      share = math::reciprocal(exponential_sum);
#pragma unroll
      for (int i = 0; i < kElements; ++i) s[i] = u[i] * share;
    } else {
      share = math::reciprocal(warp_sum(join_columns(scores)));
    }
    const bool on_logit = a.on_logit;
    if (done) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int e = Vectors::expert(kAdjacent * j), i = kAdjacent * j;
        if (e >= experts) continue;
        *reinterpret_cast<float4*>(mine + e) =
            on_logit ? make_float4(z[i], z[i + 1], z[i + 2], z[i + 3])
                     : make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
      }
      Slot slot{-1, 0.0f};
      typename Vectors::Values v;
      const auto set_values = [&](float bias_factor) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          v[i] = math::fma(b[i], bias_factor, on_logit ? z[i] : s[i]);
          if (i >= kElements - kAdjacent && Vectors::expert(i) >= experts) v[i] = -math::infinity();
        }
      };
      const auto select = [&](float bias_factor, unsigned kept_groups, float& bound) {
        const SharedValues values{mine, bias, bias_factor, experts, kept_groups, group_shift};
        return Vectors::select(v, top_k, values, candidates, best, bound);
      };
      if (a.given) {
        __syncwarp();
        if (lane < top_k) slot.id = given_id(a, t * top_k + lane);
        if (slot.id >= 0) slot.chosen_by = mine[slot.id];
      } else {
        set_values(1.0f);
        unsigned kept_groups = ~0u;
        if (!a.groups.all_stay())
          kept_groups = Vectors::keep_best_groups(a.groups, group_shift, v, scratch);
        done = select(1.0f, kept_groups, bound);
        if (done && lane < top_k) slot = load_slot(best + 8 * lane);
      }
      if (done && a.separate_loss_counts) {
        __syncwarp();
        set_values(0.0f);
        done = select(0.0f, ~0u, loss_bound);
        if (done && lane < top_k)
          atomicAdd(counts + experts + static_cast<int32_t>(load_shared(best + 8 * lane)), 1);
      }
      if (done) {
        float score = slot.chosen_by;
        if (on_logit && slot.id >= 0) {
          const float own_u = math::exp_moderate(score);
          score = kSoftmax ? own_u * share : moderate_score<kScore>(score, own_u);
        }
        const float weight = slot_weight(a, score);
        if (lane < top_k) {
          *ids_out = slot.id;
          *weights_out = weight;
          if (slot.id >= 0) atomicAdd(counts + slot.id, 1);
        }
        logsumexps.add(exponential_sum);
      }
      __syncwarp();  // all have read `mine`
    }
    if (!done) {
      Row row{.score = kScore, .experts = experts, .z = a.row(t), .s = mine};
      route_token(a, t, row, reinterpret_cast<uint32_t*>(scratch), counts, counts + experts);
      logsumexps.add_ready(row.logsumexp);
      share = row.share;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int e = Vectors::expert(i);
        u[i] = s[i] = e < experts ? mine[e] : 0.0f;
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums[i] = math::fma(kSoftmax ? u[i] : s[i], share, sums[i]);
  }

  const float logsumexp_sq = logsumexps.sum_of_squares();
  if (lane == 0) {
    stream_logsumexp_sq[warp] = logsumexp_sq;
    stream_tokens[warp] = logsumexps.count();
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (Vectors::expert(i) < experts) mine[Vectors::expert(i)] = sums[i];
  }
  __syncthreads();
  write_partials(a, counts, true, stream_logsumexp_sq, stream_tokens,
                 [&](int j, int e) { return shared_memory[j * padded + e]; });
}

}  // namespace duomoe::cuda
