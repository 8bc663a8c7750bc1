// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What `route` does with tokens of E <= 64 experts and K <= 8 slots, several to a warp. Rows of
// probabilities go to shared memory, where threads add them up stream by stream.
#pragma once

#include "lane_groups.cuh"
#include "route.cuh"

namespace duomoe::cuda::lanes {

// A group has a whole number of vectors.
constexpr int kMaxGroups = kMaxExperts / kAdjacent;

// A chunk's part of the arrays. It is so small that offsets within it are of 32 bits.
struct ChunkView {
  const char* logits;
  const uint8_t* mask;   // may be null
  const int32_t* given;  // may be null
  int32_t* indices;
  float* weights;
  int64_t begin;
  int tokens;

  __device__ ChunkView(const Route& a, const Chunk& chunk)
      : logits(a.logits + chunk.begin * a.experts * item_bytes(a.dtype)),
        mask(a.mask ? a.mask + chunk.begin : nullptr),
        given(a.given ? a.given + chunk.begin * a.top_k : nullptr),
        indices(a.indices + chunk.begin * a.top_k),
        weights(a.weights + chunk.begin * a.top_k),
        begin(chunk.begin),
        tokens(static_cast<int>(chunk.end - chunk.begin)) {}
};

// The results of a block's tokens, P lanes to each.
template <int P, int kWarps>
struct BlockMemory {
  static constexpr int kTokens = kWarps * kLanes / P;
  alignas(16) float rows[kTokens * kElements * P];  // [tokens][8 P], P of the token = row * share
  float shares[kTokens];
  float logsumexps[kTokens];
  int32_t counts[2 * kElements * P];  // [E], then those of the loss
  int32_t tokens;
  uint32_t group_keys[kWarps][kMaxGroups];
};

// Rows that are not moderate, one after the other: those of the lanes `left` of a warp whose first
// token is `first` of the chunk and has row `first_row` of the tile.
template <int P, int kWarps>
__device__ __noinline__ void route_others(const Route& a, unsigned left, int64_t first,
                                          int first_row, BlockMemory<P, kWarps>& to) {
  while (left) {
    const int other = (__ffs(static_cast<int>(left)) - 1) / P, row_of_tile = first_row + other;
    left &= left - 1;
    float* mine = to.rows + row_of_tile * kElements * P;
    __syncwarp();
    Row row{.score = a.options.score, .experts = a.experts, .z = a.row(first + other), .s = mine};
    route_token(a, first + other, row, to.group_keys[warp_id()], to.counts, to.counts + a.experts);
    for (int e = lane_id(); e < a.experts; e += kLanes) mine[e] = row.unscaled_probability(e);
    if (lane_id() == 0) {
      to.shares[row_of_tile] = row.share;
      to.logsumexps[row_of_tile] = row.logsumexp;
    }
  }
}

// The work of the P lanes of a token.
template <int P, Score kScore, bool kPlain>
struct TokenLanes : LaneGroup<P> {
  using Group = LaneGroup<P>;
  using Group::bits, Group::expert, Group::first, Group::join, Group::own, Group::row_sum;
  using Group::kPadded, Group::kSlots;
  static constexpr bool kSoftmax = kScore == Score::kSoftmax;

  const Route& a;
  const ChunkView& chunk;
  Vectors raw;
  Values bias;
  bool regular = true;  // every bias is small enough

  __device__ TokenLanes(const Route& route, const ChunkView& view) : a(route), chunk(view) {}

  __device__ void fetch_bias() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) bias[i] = 0.0f;
    if (kPlain || !a.bias) return;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (expert(i) < a.experts) bias[i] = a.bias[expert(i)];
      finite = finite && math::absolute(bias[i]) < 1e30f;
    }
    regular = __all_sync(kAllLanes, finite) != 0;
  }

  // The row of token i of the chunk; zeros past its end.
  __device__ void fetch(int i) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) raw[j] = Raw{};
    if (i >= chunk.tokens) return;
    Group::load_row(a.dtype, chunk.logits, i * a.experts, a.experts, a.whole_vectors, raw);
  }

  // Sorts a vector, largest first and equal ones as they are. The element numbers in their order, a
  // byte each from the lowest.
  __device__ static unsigned sort(float* v) {
    int elements[kAdjacent] = {0, 1, 2, 3};
    const auto sort_two = [&](int at) {
      const float x = v[at], y = v[at + 1];
      const int one = elements[at], two = elements[at + 1];
      const bool swap = y > x;
      v[at] = fmaxf(x, y);
      v[at + 1] = fminf(x, y);
      elements[at] = swap ? two : one;
      elements[at + 1] = swap ? one : two;
    };
    sort_two(0);
    sort_two(1);
    sort_two(2);
    sort_two(0);
    sort_two(1);
    sort_two(0);
    return static_cast<unsigned>(elements[0] | elements[1] << 8 | elements[2] << 16 |
                                 elements[3] << 24);
  }

  // keep(n, id, value) for the K best of v, on the lane of slot k = own + n P. Of equal values the
  // first vector's come first, and in a vector the first lane's.
  template <typename F>
  __device__ void select(Values& v, F keep) const {
    if constexpr (P == 1) {
      select_alone(v, keep);
    } else {
      select_together(v, keep);
    }
  }
  template <typename F>
  __device__ void select_together(Values& v, F keep) const {
    unsigned elements[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) elements[j] = sort(v + kAdjacent * j);
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
#pragma unroll 1
      for (int i = 0; i < P; ++i) {
        if (n * P + i >= a.top_k) return;
        const float best =
            join(fmaxf(v[0], v[kAdjacent]), [](float x, float y) { return fmaxf(x, y); });
        const unsigned at = bits(v[0] == best) | bits(v[kAdjacent] == best) << P;
        const int vector = __ffs(static_cast<int>(at)) - 1;  // of the row
        const int lane = vector & (P - 1), second = vector >= P;
        const unsigned element = (second ? elements[1] : elements[0]) & 0xffu;
        const auto of_best = static_cast<int>(__shfl_sync(kAllLanes, element, first + lane));
        if (i == own) keep(n, kAdjacent * vector + of_best, best);
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          const bool taken = lane == own && second == j;
          float* w = v + kAdjacent * j;
#pragma unroll
          for (int m = 0; m < kAdjacent; ++m)
            w[m] = !taken ? w[m] : m + 1 < kAdjacent ? w[m + 1] : -math::infinity();
          elements[j] = taken ? elements[j] >> 8 : elements[j];
        }
      }
    }
  }
  template <typename F>
  __device__ void select_alone(Values& v, F keep) const {
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      if (n >= a.top_k) return;
      float largest[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float* w = v + kAdjacent * j;
        largest[j] = fmaxf(fmaxf(w[0], w[1]), fmaxf(w[2], w[3]));
      }
      const float best = fmaxf(largest[0], largest[1]);
      const bool second = largest[0] != best;
      int element = kAdjacent - 1;
#pragma unroll
      for (int m = kAdjacent - 2; m >= 0; --m)
        element = (second ? v[kAdjacent + m] : v[m]) == best ? m : element;
      element += second ? kAdjacent : 0;
      keep(n, element, best);
      if (n + 1 >= a.top_k) return;
#pragma unroll
      for (int m = 0; m < kElements; ++m) v[m] = m == element ? -math::infinity() : v[m];
    }
  }

  // Sets the values of all groups but the best to -inf. A group has `lanes` <= P neighbouring lanes
  // of a vector.
  __device__ void keep_best_groups(Values& v) const {
    const int lanes = a.experts / a.groups.count / kAdjacent;
    float value[kVectors];
    int group[kVectors], better[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float* w = v + kAdjacent * j;
      const float x = fmaxf(w[0], w[1]), y = fminf(w[0], w[1]);
      const float p = fmaxf(w[2], w[3]), q = fminf(w[2], w[3]);
      float largest = fmaxf(x, p), next = fmaxf(fminf(x, p), fmaxf(y, q));
#pragma unroll 1
      for (int width = 1; width < lanes; width *= 2) {
        const float other = __shfl_xor_sync(kAllLanes, largest, width);
        const float other_next = __shfl_xor_sync(kAllLanes, next, width);
        next = fmaxf(fminf(largest, other), fmaxf(next, other_next));
        largest = fmaxf(largest, other);
      }
      value[j] = a.groups.score_k == 1 ? largest : largest + next;
      group[j] = (own + j * P) / lanes;
      better[j] = 0;
    }
#pragma unroll 1
    for (int g = 0; g < a.groups.count; ++g) {
      const int vector = g * lanes;
      const float other =
          __shfl_sync(kAllLanes, vector < P ? value[0] : value[1], first + (vector & (P - 1)));
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        better[j] += other > value[j] || (other == value[j] && g < group[j]);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      v[i] = better[i / kAdjacent] < a.groups.kept ? v[i] : -math::infinity();
  }

  // Routes token i of the chunk, whose row is in `raw` and which has row `in_tile` of the tile;
  // then `raw` is that of token `next`.
  template <typename Memory>
  __device__ void route(int i, int in_tile, int next, Memory& to) {
    const bool there = i < chunk.tokens;
    const bool live = there && !(chunk.mask && !chunk.mask[i]);
    Values z, s, u;
    Group::unpack_row(a.dtype, raw, z);
    fetch(next);
    float magnitudes[kVectors] = {};  // of two chains
#pragma unroll
    for (int m = 0; m < kElements; ++m) {
      magnitudes[m % kVectors] = largest_magnitude(magnitudes[m % kVectors], z[m]);
      u[m] = math::exp_moderate(z[m]);
      if (kScore == Score::kSigmoid) s[m] = math::moderate_sigmoid(z[m], u[m]).value;
      if (kScore == Score::kSqrtSoftplus) s[m] = math::elementwise_score(kScore, z[m]);
    }
    if (a.experts < kPadded) {
#pragma unroll
      for (int m = 0; m < kElements; ++m) {
        const bool inside = expert(m) < a.experts;
        u[m] = inside ? u[m] : 0.0f;
        if (!kSoftmax) s[m] = inside ? s[m] : 0.0f;
      }
    }
    const float magnitude = largest_magnitude(magnitudes[0], magnitudes[1]);
    const bool small = magnitude <= math::moderate_limit(kScore) && regular;
    const bool moderate = bits(small) == (1u << P) - 1;
    const float exponential_sum = row_sum(u);
    const float inverse = math::reciprocal(exponential_sum);
    float share = inverse;
    if (kSoftmax) {
#pragma unroll
      for (int m = 0; m < kElements; ++m) s[m] = u[m] * inverse;
    } else {
      share = math::reciprocal(row_sum(s));
    }
    // A row without a live token has a share of 0, but a masked one may hold no numbers.
    Values& shared = kSoftmax ? u : s;
    if (chunk.mask) {
#pragma unroll
      for (int m = 0; m < kElements; ++m) shared[m] = live ? shared[m] : 0.0f;
    }
    float* row = to.rows + in_tile * kPadded;
    Group::store_row(row, shared);

    int32_t ids[kSlots];
    float score[kSlots];
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      ids[n] = -1;
      score[n] = 0.0f;
    }
    if (kPlain) {
      // Moderate scores are above the 0 that stands where there is no expert.
      select(s, [&](int n, int32_t id, float best) {
        ids[n] = id;
        score[n] = best;
      });
    } else {
      Values v;
#pragma unroll 1
      for (int pass = a.separate_loss_counts ? 0 : 1; pass < (a.given ? 1 : 2); ++pass) {
        const float bias_factor = static_cast<float>(pass);  // exact
        const bool on_logit = a.on_logit;
#pragma unroll
        for (int m = 0; m < kElements; ++m) {
          v[m] = math::fma(bias[m], bias_factor, on_logit ? z[m] : s[m]);
          v[m] = expert(m) < a.experts ? v[m] : -math::infinity();
        }
        if (pass == 1 && !a.groups.all_stay()) keep_best_groups(v);
        select(v, [&](int n, int32_t id, float) { ids[n] = id; });
        if (pass == 1) continue;
#pragma unroll
        for (int n = 0; n < kSlots; ++n) {
          if (live && moderate && own + n * P < a.top_k)
            atomicAdd(to.counts + a.experts + ids[n], 1);
        }
      }
      if (a.given) {
#pragma unroll
        for (int n = 0; n < kSlots; ++n) {
          const int k = own + n * P;
          const int32_t e = there && k < a.top_k ? chunk.given[i * a.top_k + k] : -1;
          ids[n] = e < a.experts ? e : -1;
        }
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kSlots; ++n) {
        if (!live || ids[n] < 0) continue;
        const float x = row[ids[n]];
        score[n] = kSoftmax ? x * inverse : x;
      }
    }

    const Divisor divisor = math::weight_divisor(a.options.normalize, a.options.eps_mode,
                                                 Group::slot_sum(score), a.options.eps);
    int32_t* slot_ids = chunk.indices + (i * a.top_k + own);
    float* slot_weights = chunk.weights + (i * a.top_k + own);
    const bool done = there && (moderate || !live);
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      if (n * P >= a.top_k) break;
      if (own + n * P >= a.top_k || !done) continue;
      const bool used = live && ids[n] >= 0;
      float weight = used ? score[n] : 1.0f;
      if (a.options.normalize) weight /= used ? divisor.value : 1.0f;
      slot_ids[n * P] = used ? ids[n] : -1;
      slot_weights[n * P] = used ? weight * a.options.scale : 0.0f;
      if (used) atomicAdd(to.counts + ids[n], 1);
    }
    const float logsumexp = math::log(exponential_sum);
    if (own == 0) {
      to.shares[in_tile] = live ? share : 0.0f;
      to.logsumexps[in_tile] = live ? logsumexp : 0.0f;
    }
    if (chunk.mask) {
      const unsigned alive = __ballot_sync(kAllLanes, live && own == 0);
      if (lane_id() == 0) atomicAdd(&to.tokens, __popc(alive));
    }
    const unsigned others = __ballot_sync(kAllLanes, live && !moderate && own == 0);
    if (others) {
      const int before = lane_id() / P;  // tokens of the warp
      route_others(a, others, chunk.begin + (i - before), in_tile - before, to);
    }
  }
};

// Whether a call has none of the rarer options.
inline bool plain(const Route& a) {
  return !a.bias && !a.given && !a.on_logit && !a.separate_loss_counts && a.groups.all_stay();
}

// Whether TokenLanes has a way for the options.
inline bool fits(const Route& a) {
  if (a.experts > kMaxExperts || a.top_k > kMaxTop) return false;
  if (a.groups.all_stay()) return true;
  const int size = a.experts / a.groups.count, lanes = size / kAdjacent;
  return size % kAdjacent == 0 && (lanes & (lanes - 1)) == 0 && a.groups.score_k <= 2;
}

}  // namespace duomoe::cuda::lanes
