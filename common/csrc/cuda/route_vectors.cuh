// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for E <= 512: one warp per token, whose lanes hold four neighbouring experts of every 128.
// One warp per stream of a chunk. Bound by the issue of instructions, not by memory: what is common
// is compiled on its own (kPlain...), without a branch that it does not need.
#pragma once

#include "route.cuh"

namespace duomoe::cuda {

// kPlain: E % 128 = 0, rows in whole vectors, no groups, no mask, no given ids, selection on the
// score, counts of the routing; with logits of one dtype. kAny: everything.
enum class VectorMode { kPlainFloat32, kPlainBFloat16, kAny };

template <int kVectors>
struct VectorRow {
  static constexpr int kElements = kAdjacent * kVectors;
  using Values = float[kElements];
  using Found = Candidates<kLanes>;

  // Expert of a lane's element i.
  static __device__ int expert(unsigned i) {
    return static_cast<int>((i & ~3u) * kLanes + (i & 3u)) + kAdjacent * lane_id();
  }

  // The first `wanted` bits of the lanes' masks, in the order of experts.
  static __device__ __noinline__ unsigned first_of(unsigned mask, int wanted) {
    unsigned kept = 0;
    int base = 0;
#pragma unroll 1
    for (int j = 0; j < kVectors; ++j) {
      const unsigned mine = mask >> (kAdjacent * j) & 15u;
      int before = __popc(mine);
      for (int width = 1; width < kLanes; width *= 2) {
        const int other = __shfl_up_sync(kAllLanes, before, width);
        if (lane_id() >= width) before += other;
      }
      const int all = __shfl_sync(kAllLanes, before, kLanes - 1);
      int position = base + before - __popc(mine);
      for (int i = 0; i < kAdjacent; ++i) {
        if (!(mine >> i & 1)) continue;
        if (position < wanted) kept |= 1u << (kAdjacent * j + i);
        ++position;
      }
      base += all;
    }
    return kept;
  }

  // candidates.best: the K best of v; `value(e)` gives v of any expert. False where there are too
  // many candidates, or too few values.
  template <typename F>
  static __device__ bool select(const Values& v, int top_k, F value, Found& candidates) {
    float maximum[1] = {v[0]};
#pragma unroll
    for (int i = 1; i < kElements; ++i) maximum[0] = fmaxf(maximum[0], v[i]);
    const float bound = bound_of_best(maximum, top_k);
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) mask |= v[i] >= bound ? 1u << i : 0u;
    int count = gather(mask, 0, expert, candidates);
    if (count > kLanes) {
      // Ties at the bound: the values above it and the first of those equal to it.
      unsigned above = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) above |= v[i] > bound ? 1u << i : 0u;
      const int more = __reduce_add_sync(kAllLanes, __popc(above));
      if (more > Found::kRoom) return false;
      __syncwarp();
      const unsigned ties = more < top_k ? first_of(mask & ~above, top_k - more) : 0u;
      count = gather(above | ties, 0, expert, candidates);
    }
    if (count < top_k) return false;
    rank(count, top_k, value, candidates);
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

  // Sets the values of all groups but the best to -inf. Groups are of 2^shift experts; `scratch` has
  // room for 32 values.
  static __device__ void keep_best_groups(const Groups& groups, int shift, Values& v,
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
  }
};

// The lane's part of a token's row.
template <int kVectors, VectorMode kMode>
struct VectorReader {
  const Route& a;
  int64_t next;      // the next token's first element
  int64_t step;      // from a token to the stream's next
  const char* plain;  // this lane's first element of it
  Raw raw[kVectors];

  __device__ VectorReader(const Route& route, int64_t t)
      : a(route), next(t * route.experts), step(static_cast<int64_t>(kStreams) * route.experts) {
    plain = a.logits + (next + kAdjacent * lane_id()) * item_bytes(a.dtype);
  }

  __device__ void fetch() {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kMode == VectorMode::kPlainFloat32) {
        raw[j] = __ldcs(reinterpret_cast<const uint4*>(plain) + j * kLanes);
      } else if constexpr (kMode == VectorMode::kPlainBFloat16) {
        const uint2 half = __ldcs(reinterpret_cast<const uint2*>(plain) + j * kLanes);
        raw[j].x = half.x;
        raw[j].y = half.y;
      } else {
        raw[j] = load_raw(a.dtype, a.logits, next, VectorRow<kVectors>::expert(kAdjacent * j),
                          a.experts, a.whole_vectors);
      }
    }
    if constexpr (kMode == VectorMode::kPlainFloat32) plain += step * 4;
    if constexpr (kMode == VectorMode::kPlainBFloat16) plain += step * 2;
    next += step;
  }

  __device__ void unpack_into(float* z) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      unpack(kMode == VectorMode::kPlainFloat32    ? DType::kFloat32
             : kMode == VectorMode::kPlainBFloat16 ? DType::kBFloat16
                                                   : a.dtype,
             raw[j], z + kAdjacent * j);
    }
  }
};

template <Score kScore>
__device__ float moderate_score(float z, float u) {
  return kScore == Score::kSigmoid ? math::moderate_sigmoid(z, u).value
                                   : math::elementwise_score(kScore, z);
}

// One block per chunk, one warp per stream.
template <int kVectors, Score kScore, VectorMode kMode>
__global__ void __launch_bounds__(kStreams* kLanes, 2)
    route_vectors(const __grid_constant__ Route a, int group_shift) {
  using Vectors = VectorRow<kVectors>;
  using Found = typename Vectors::Found;
  constexpr bool kSoftmax = kScore == Score::kSoftmax, kAny = kMode == VectorMode::kAny;
  constexpr int kElements = Vectors::kElements, kThreads = kStreams * kLanes;
  extern __shared__ float shared_memory[];
  __shared__ Found all_candidates[kStreams];
  __shared__ float stream_logsumexp_sq[kStreams];
  __shared__ int32_t stream_tokens[kStreams];

  const Chunk chunk = chunk_of(a, blockIdx.x);
  const int experts = a.experts, warp = warp_id(), lane = lane_id(), top_k = a.top_k;
  int64_t t = chunk.begin + warp;
  int left = t < chunk.end ? static_cast<int>((chunk.end - t + kStreams - 1) / kStreams) : 0;
  VectorReader<kVectors, kMode> reader(a, t);
  if (left > 0) reader.fetch();
  clear_expert_counts(a);
  let_next_kernel_start();
  if (chunk.begin >= chunk.end) return;
  const int padded = (experts + kAdjacent - 1) / kAdjacent * kAdjacent;
  // [streams][E]: what a row is chosen by, or the scores of a row that is left to route_token; in
  // the end a stream's sums.
  float* mine = shared_memory + warp * padded;
  float* bias = shared_memory + kStreams * padded;
  int32_t* counts = reinterpret_cast<int32_t*>(bias + padded);
  Found& candidates = all_candidates[warp];
  for (int i = static_cast<int>(threadIdx.x); i < a.count_words(); i += kThreads) counts[i] = 0;

  typename Vectors::Values b, sums;
  bool finite_bias = true;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int e = Vectors::expert(i);
    b[i] = a.bias && e < experts ? a.bias[e] : 0.0f;
    finite_bias = finite_bias && math::absolute(b[i]) < 1e30f;
    if (warp == 0 && e < experts) bias[e] = b[i];
    sums[i] = 0.0f;
  }
  // With other biases no row is moderate.
  const float limit = __all_sync(kAllLanes, finite_bias) ? math::moderate_limit(kScore) : -1.0f;
  __syncthreads();

  int32_t* ids_out = a.indices + t * top_k + lane;
  float* weights_out = a.weights + t * top_k + lane;
  LogSumExps logsumexps;
  for (; left > 0; --left, t += kStreams, ids_out += kStreams * top_k,
                   weights_out += kStreams * top_k) {
    typename Vectors::Values z, s, u;
    reader.unpack_into(z);
    if (left > 1) reader.fetch();
    if (kAny && a.mask && !a.mask[t]) {
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
      if (kAny && i >= kElements - kAdjacent && Vectors::expert(i) >= experts) u[i] = s[i] = 0.0f;
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
    const bool on_logit = kAny && a.on_logit;
    if (done) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int e = Vectors::expert(kAdjacent * j), i = kAdjacent * j;
        if (kAny && e >= experts) continue;
        *reinterpret_cast<float4*>(mine + e) =
            on_logit ? make_float4(z[i], z[i + 1], z[i + 2], z[i + 3])
                     : make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
      }
      int32_t id = -1;
      if (kAny && a.given) {
        if (lane < top_k) id = given_id(a, t * top_k + lane);
        __syncwarp();
      } else {
        typename Vectors::Values v;
        const auto values = [&](float bias_factor) {  // 1 or 0, which is exact
#pragma unroll
          for (int i = 0; i < kElements; ++i) {
            v[i] = kAny ? math::fma(b[i], bias_factor, on_logit ? z[i] : s[i]) : s[i] + b[i];
            if (kAny && i >= kElements - kAdjacent && Vectors::expert(i) >= experts)
              v[i] = -math::infinity();
          }
        };
        values(1.0f);
        if (kAny && !a.groups.all_stay())
          Vectors::keep_best_groups(a.groups, group_shift, v,
                                    reinterpret_cast<float*>(candidates.keys));
        done = Vectors::select(v, top_k, [&](int e) { return mine[e] + bias[e]; }, candidates);
        if (lane < top_k) id = candidates.best[lane];
        if (kAny && done && a.separate_loss_counts) {
          __syncwarp();
          values(0.0f);
          done = Vectors::select(v, top_k, [&](int e) { return mine[e]; }, candidates);
          if (done && lane < top_k) atomicAdd(counts + experts + candidates.best[lane], 1);
        }
      }
      if (done) {
        float score = 0.0f;
        if (id >= 0) {
          score = mine[id];
          if (on_logit) {
            const float own_u = math::exp_moderate(score);
            score = kSoftmax ? own_u * share : moderate_score<kScore>(score, own_u);
          }
        }
        const float weight = slot_weight(a.options, score);
        if (lane < top_k) {
          *ids_out = id;
          *weights_out = weight;
          if (!kAny || id >= 0) atomicAdd(counts + id, 1);
        }
        logsumexps.add(exponential_sum);
      }
      __syncwarp();  // all have read `mine`
    }
    if (!done) {
      Row row{.score = kScore, .experts = experts, .z = a.row(t), .s = mine};
      route_token(a, t, row, reinterpret_cast<uint32_t*>(candidates.keys), counts, counts + experts);
      logsumexps.add_ready(row.logsumexp);
      share = row.share;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int e = Vectors::expert(i);
        u[i] = s[i] = !kAny || e < experts ? mine[e] : 0.0f;
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
    if (!kAny || Vectors::expert(i) < experts) mine[Vectors::expert(i)] = sums[i];
  }
  __syncthreads();
  write_partials(a, counts, true, stream_logsumexp_sq, stream_tokens,
                 [&](int j, int e) { return shared_memory[j * padded + e]; });
}

// Launches the kernel for the score, which is one of kScores.
template <VectorMode kMode, Score... kScores>
void launch_vectors(Queue& queue, const Route& a, int64_t chunks, int group_shift) {
  const int padded = static_cast<int>(ceil_div(a.experts, kAdjacent)) * kAdjacent;
  const size_t bytes = sizeof(float) * ((kStreams + 1) * padded + a.count_words());
  const auto launch = [&](auto kernel) {
    queue.launch(kernel, chunks, kStreams * kLanes, bytes, a, group_shift);
  };
  const auto with_vectors = [&]<Score kScore>() {
    if (a.options.score != kScore) return;
    switch (ceil_div(a.experts, kColumns)) {
      case 1:
        return launch(route_vectors<1, kScore, kMode>);
      case 2:
        return launch(route_vectors<2, kScore, kMode>);
      case 3:
        return launch(route_vectors<3, kScore, kMode>);
      default:
        return launch(route_vectors<4, kScore, kMode>);
    }
  };
  (with_vectors.template operator()<kScores>(), ...);
}

void launch_plain_vectors(Queue& queue, const Route& a, int64_t chunks);

}  // namespace duomoe::cuda
