// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for 4 <= E <= 512: one warp per token, whose lanes hold four neighbouring experts of every
// 128. One warp per stream of a chunk. Bound by the issue of instructions, not by memory.
#include "route.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = kStreams * kLanes;
using Found = Candidates<kLanes>;

template <int kVectors>
struct Kernel {
  static constexpr int kElements = kAdjacent * kVectors;
  using Values = float[kElements];

  // Expert of a lane's element i.
  static __device__ int expert(int i) {
    return i / kAdjacent * kColumns + kAdjacent * lane_id() + i % kAdjacent;
  }

  // The parts of `mask` whose values are `bound`, only the first `wanted` in the order of experts.
  static __device__ unsigned first_of(unsigned mask, int wanted) {
    unsigned kept = 0;
    int base = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const unsigned mine = mask >> (kAdjacent * j) & 15u;
      int before = __popc(mine);
      for (int width = 1; width < kLanes; width *= 2) {
        const int other = __shfl_up_sync(kAllLanes, before, width);
        if (lane_id() >= width) before += other;
      }
      const int all = __shfl_sync(kAllLanes, before, kLanes - 1);
      int position = base + before - __popc(mine);
#pragma unroll
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
    for (int i = 1; i < kElements; ++i) maximum[0] = v[i] > maximum[0] ? v[i] : maximum[0];
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

  // The largest and the second largest of a group's values, on each of its lanes.
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

  // Sets the values of all groups but the best to -inf. `scratch` has room for a value per group,
  // of which there are 32 at most.
  static __device__ void keep_best_groups(const Groups& groups, int size, Values& v,
                                          float* scratch) {
    const int lanes = size / kAdjacent;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float mine = group_value(v + kAdjacent * j, lanes, groups.score_k);
      const int group = expert(kAdjacent * j) / size;
      if (lane_id() % lanes == 0 && group < groups.count) scratch[group] = mine;
    }
    __syncwarp();
    const int own = lane_id();
    const float value = own < groups.count ? scratch[own] : 0.0f;
    int better = own < groups.count ? 0 : kLanes;
    for (int g = 0; g < groups.count; ++g) {
      const float other = scratch[g];
      better += other > value || (other == value && g < own);
    }
    const unsigned kept = __ballot_sync(kAllLanes, better < groups.kept);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int group = expert(kAdjacent * j) / size;
      if (group < groups.count && (kept >> group & 1)) continue;
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) v[kAdjacent * j + i] = -math::infinity();
    }
    __syncwarp();
  }
};

// One block per chunk, one warp per stream.
template <int kVectors, bool kSoftmax>
__global__ void __launch_bounds__(kThreads, 2) route_vectors(const __grid_constant__ Route a) {
  using K = Kernel<kVectors>;
  constexpr int kElements = K::kElements;
  extern __shared__ float shared_memory[];
  __shared__ Found all_candidates[kStreams];
  __shared__ float stream_logsumexp_sq[kStreams];
  __shared__ int32_t stream_tokens[kStreams];

  clear_expert_counts(a);
  let_next_kernel_start();
  const Chunk chunk = chunk_of(a, blockIdx.x);
  if (chunk.begin >= chunk.end) return;
  const int experts = a.experts, warp = warp_id(), lane = lane_id();
  const int padded = (experts + kAdjacent - 1) / kAdjacent * kAdjacent;
  // [streams][E]: what a row is chosen by, or the scores of a row that is left to route_token; in
  // the end a stream's sums.
  float* mine = shared_memory + warp * padded;
  float* bias = shared_memory + kStreams * padded;
  int32_t* counts = reinterpret_cast<int32_t*>(bias + padded);
  Found& candidates = all_candidates[warp];
  for (int i = static_cast<int>(threadIdx.x); i < a.count_words(); i += kThreads) counts[i] = 0;

  typename K::Values b, sums;
  bool finite_bias = true;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int e = K::expert(i);
    b[i] = a.bias && e < experts ? a.bias[e] : 0.0f;
    finite_bias = finite_bias && math::absolute(b[i]) < 1e30f;
    if (e < experts) bias[e] = b[i];  // the same from every warp
    sums[i] = 0.0f;
  }
  const bool regular = __all_sync(kAllLanes, finite_bias) != 0;
  __syncthreads();

  const float limit = math::moderate_limit(a.options.score);
  const int group_size = experts / a.groups.count;
  LogSumExps logsumexps;

  Raw raw[kVectors];
  const auto fetch = [&](int64_t t) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      raw[j] = load_raw(a.dtype, a.logits, t * experts, K::expert(kAdjacent * j), experts,
                        a.whole_vectors);
    }
  };
  int64_t t = chunk.begin + warp;
  if (t < chunk.end) fetch(t);
  for (; t < chunk.end; t += kStreams) {
    typename K::Values z, s, u;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) unpack(a.dtype, raw[j], z + kAdjacent * j);
    if (t + kStreams < chunk.end) fetch(t + kStreams);
    if (a.mask && !a.mask[t]) {
      leave_slots_unused(a, t);
      continue;
    }
    float magnitude = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) magnitude = largest_magnitude(magnitude, z[i]);
    bool done = false;
    float share = 0.0f;
    if (__all_sync(kAllLanes, magnitude <= limit) && regular) {
      Columns exponentials = {}, scores = {};
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        u[i] = math::exp_moderate(z[i]);
        if (!kSoftmax) {
          s[i] = a.options.score == Score::kSigmoid
                     ? math::moderate_sigmoid(z[i], u[i]).value
                     : math::elementwise_score(Score::kSqrtSoftplus, z[i]);
        }
        if (i >= kElements - kAdjacent && K::expert(i) >= experts) u[i] = s[i] = 0.0f;
        exponentials[i % kAdjacent] += u[i];
        if (!kSoftmax) scores[i % kAdjacent] += s[i];
      }
      const float exponential_sum = warp_sum(join_columns(exponentials));
      const float inverse = math::reciprocal(exponential_sum);
      if (kSoftmax) {
        share = inverse;
#pragma unroll
        for (int i = 0; i < kElements; ++i) s[i] = u[i] * inverse;
      } else {
        share = math::reciprocal(warp_sum(join_columns(scores)));
      }

      int32_t id = -1;
      done = true;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int e = K::expert(kAdjacent * j);
        if (e >= experts) continue;
        const int i = kAdjacent * j;
        *reinterpret_cast<float4*>(mine + e) =
            a.on_logit ? make_float4(z[i], z[i + 1], z[i + 2], z[i + 3])
                       : make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
      }
      if (a.given) {
        if (lane < a.top_k) id = given_id(a, t * a.top_k + lane);
        __syncwarp();
      } else {
        for (int pass = 0; done && pass <= a.separate_loss_counts; ++pass) {
          const float bias_factor = pass == 0 ? 1.0f : 0.0f;  // exact
          typename K::Values v;
#pragma unroll
          for (int i = 0; i < kElements; ++i) {
            v[i] = math::fma(b[i], bias_factor, a.on_logit ? z[i] : s[i]);
            if (i >= kElements - kAdjacent && K::expert(i) >= experts) v[i] = -math::infinity();
          }
          if (pass == 0 && !a.groups.all_stay()) {
            K::keep_best_groups(a.groups, group_size, v,
                                reinterpret_cast<float*>(candidates.keys));
          }
          done = K::select(
              v, a.top_k, [&](int e) { return math::fma(bias[e], bias_factor, mine[e]); },
              candidates);
          if (!done) break;
          const int32_t best = lane < a.top_k ? candidates.best[lane] : -1;
          if (pass == 0) {
            id = best;
          } else if (best >= 0) {
            atomicAdd(counts + experts + best, 1);
          }
        }
      }
      if (done) {
        float score = 0.0f;
        if (id >= 0) {
          if (!a.on_logit) {
            score = mine[id];
          } else if (kSoftmax) {
            score = math::exp_moderate(mine[id]) * inverse;
          } else {
            score = a.options.score == Score::kSigmoid
                        ? math::moderate_sigmoid(mine[id], math::exp_moderate(mine[id])).value
                        : math::elementwise_score(Score::kSqrtSoftplus, mine[id]);
          }
        }
        const float weight = slot_weight(a.options, a.top_k, score);
        if (lane < a.top_k) {
          a.indices[t * a.top_k + lane] = id;
          a.weights[t * a.top_k + lane] = id >= 0 ? weight : 0.0f;
          if (id >= 0) atomicAdd(counts + id, 1);
        }
        logsumexps.add(exponential_sum);
      }
      __syncwarp();  // all have read `mine`
    }
    if (!done) {
      Row row{.score = a.options.score, .experts = experts, .z = a.row(t), .s = mine};
      route_token(a, t, row, candidates.keys, counts, counts + experts);
      logsumexps.add_ready(row.logsumexp);
      share = row.share;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int e = K::expert(i);
        const float x = e < experts ? row.unscaled_probability(e) : 0.0f;
        if (kSoftmax) u[i] = x;
        s[i] = x;
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
    if (K::expert(i) < experts) mine[K::expert(i)] = sums[i];
  }
  __syncthreads();
  write_partials(a, counts, true, stream_logsumexp_sq, stream_tokens,
                 [&](int j, int e) { return shared_memory[j * padded + e]; });
}

bool power_of_two(int n) { return (n & (n - 1)) == 0; }

}  // namespace

bool launch_route_vectors(Queue& queue, const Route& a, int64_t chunks) {
  const int vectors = static_cast<int>(ceil_div(a.experts, kColumns));
  const int lanes = std::min(kLanes, static_cast<int>(ceil_div(a.experts, kAdjacent)));
  if (vectors > 4 || a.top_k > lanes) return false;
  if (!a.groups.all_stay()) {
    const int size = a.experts / a.groups.count;
    if (size % kAdjacent != 0 || !power_of_two(size) || size > kColumns || a.groups.count > kLanes ||
        a.groups.score_k > 2)
      return false;
  }
  const int padded = static_cast<int>(ceil_div(a.experts, kAdjacent)) * kAdjacent;
  const size_t bytes = sizeof(float) * ((kStreams + 1) * padded + a.count_words());
  const bool softmax = a.options.score == Score::kSoftmax;
  const auto launch = [&](auto softmax_kernel, auto other_kernel) {
    queue.launch(softmax ? softmax_kernel : other_kernel, chunks, kThreads, bytes, a);
  };
  switch (vectors) {
    case 1:
      launch(route_vectors<1, true>, route_vectors<1, false>);
      break;
    case 2:
      launch(route_vectors<2, true>, route_vectors<2, false>);
      break;
    case 3:
      launch(route_vectors<3, true>, route_vectors<3, false>);
      break;
    default:
      launch(route_vectors<4, true>, route_vectors<4, false>);
  }
  return true;
}

}  // namespace duomoe::cuda
