// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for E <= 64 and K <= 8: four neighbouring experts to a lane, so that 1 to 16 lanes hold a
// token and a warp several. A block goes through its chunk in tiles; the tile's probabilities lie in
// shared memory, where threads add them up stream by stream.
#include "route.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kMaxTop = 8;
constexpr int kMaxExperts = 64;
// Sums of a thread: 8 streams of up to 65 columns over at least chunk_length / 8 * E / 4 threads.
constexpr int kMaxSums = 3;

struct Layout {
  int lanes;  // of a token, a power of two
  int warps;

  __host__ __device__ int padded() const { return kAdjacent * lanes; }
  __host__ __device__ int tile() const { return warps * kLanes / lanes; }
};

// The lanes of one token.
struct TokenLanes {
  int count, first, own;  // own: this lane's number among them
  unsigned mask;          // of `count` bits

  __device__ explicit TokenLanes(int lanes)
      : count(lanes),
        first(lane_id() / lanes * lanes),
        own(lane_id() % lanes),
        mask(0xffffffffu >> (kLanes - lanes)) {}

  template <typename F>
  __device__ float join(float x, F f) const {
    for (int width = count / 2; width > 0; width /= 2)
      x = f(x, __shfl_xor_sync(kAllLanes, x, width));
    return x;
  }
  __device__ float sum(float x) const {
    return join(x, [](float a, float b) { return a + b; });
  }
  __device__ bool all(bool yes) const {
    return (__ballot_sync(kAllLanes, yes) >> first & mask) == mask;
  }
};

// Sets the values of all groups but the best to -inf. A group has `lanes` whole lanes.
__device__ void keep_best_groups(const Groups& groups, int lanes, const TokenLanes& token,
                                 float (&v)[kAdjacent]) {
  const float a = fmaxf(v[0], v[1]), b = fminf(v[0], v[1]);
  const float c = fmaxf(v[2], v[3]), d = fminf(v[2], v[3]);
  float first = fmaxf(a, c), second = fmaxf(fminf(a, c), fmaxf(b, d));
  for (int width = 1; width < lanes; width *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, first, width);
    const float other_second = __shfl_xor_sync(kAllLanes, second, width);
    second = fmaxf(fminf(first, other), fmaxf(second, other_second));
    first = fmaxf(first, other);
  }
  const float value = groups.score_k == 1 ? first : first + second;
  const int own = token.own / lanes;
  int better = 0;
  for (int g = 0; g < groups.count; ++g) {
    const float other = __shfl_sync(kAllLanes, value, token.first + g * lanes);
    better += other > value || (other == value && g < own);
  }
  if (better < groups.kept) return;
#pragma unroll
  for (int i = 0; i < kAdjacent; ++i) v[i] = -math::infinity();
}

// ids[k] of the K best values of a token, on all of its lanes. Lanes are in the order of experts, so
// that of equal values the first lane's first is the one with the lower id.
__device__ void select(float (&v)[kAdjacent], int top_k, const TokenLanes& token,
                       int32_t (&ids)[kMaxTop]) {
#pragma unroll
  for (int k = 0; k < kMaxTop; ++k) {
    ids[k] = -1;
    if (k >= top_k) continue;
    const float mine = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
    const float best = token.join(mine, [](float a, float b) { return fmaxf(a, b); });
    const unsigned at = __ballot_sync(kAllLanes, mine == best) >> token.first & token.mask;
    const int lane = __ffs(static_cast<int>(at)) - 1;
    const int element = v[0] == best ? 0 : v[1] == best ? 1 : v[2] == best ? 2 : 3;
    ids[k] = kAdjacent * lane + __shfl_sync(kAllLanes, element, token.first + lane);
    if (lane != token.own) continue;
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i) v[i] = i == element ? -math::infinity() : v[i];
  }
}

// One block per chunk.
template <bool kSoftmax>
__global__ void __launch_bounds__(kMaxWarps* kLanes)
    route_lanes(const __grid_constant__ Route a, const Layout layout) {
  extern __shared__ float shared_memory[];
  __shared__ float bias[kMaxExperts];
  __shared__ int32_t counts[2 * kMaxExperts];
  __shared__ float streams[kStreams * (kMaxExperts + 1)];
  __shared__ float stream_logsumexp_sq[kStreams];
  __shared__ int32_t stream_tokens[kStreams];
  __shared__ uint32_t group_keys[kMaxWarps][kMaxExperts];

  clear_expert_counts(a);
  const Chunk chunk = chunk_of(a, blockIdx.x);
  if (chunk.begin >= chunk.end) return;
  const int experts = a.experts, padded = layout.padded(), tile = layout.tile();
  const int threads = static_cast<int>(blockDim.x);
  float* rows = shared_memory;           // [tile][E as whole lanes], P = row * share
  float* shares = rows + tile * padded;  // [tile]
  float* logsumexps = shares + tile;     // [tile]
  for (int e = static_cast<int>(threadIdx.x); e < kMaxExperts; e += threads) {
    bias[e] = a.bias && e < experts ? a.bias[e] : 0.0f;
    counts[e] = counts[e + kMaxExperts] = 0;
  }
  for (int j = static_cast<int>(threadIdx.x); j < kStreams; j += threads) stream_tokens[j] = 0;
  __syncthreads();
  int32_t* loss_counts = counts + experts;

  const TokenLanes token(layout.lanes);
  const int first = kAdjacent * token.own, group_lanes = experts / a.groups.count / kAdjacent;
  const float limit = math::moderate_limit(a.options.score);
  float b[kAdjacent];
  bool finite_bias = true;
#pragma unroll
  for (int i = 0; i < kAdjacent; ++i) {
    b[i] = bias[first + i];
    finite_bias = finite_bias && math::absolute(b[i]) < 1e30f;
  }
  const bool regular = __all_sync(kAllLanes, finite_bias) != 0;
  float sums[kMaxSums] = {};
  int32_t tokens = 0;

  const int in_tile = static_cast<int>(threadIdx.x) / layout.lanes;
  const auto fetch = [&](int64_t t) {
    return t < chunk.end ? load_raw(a.dtype, a.logits, t * experts, first, experts, a.whole_vectors)
                         : Raw{};
  };
  Raw raw = fetch(chunk.begin + in_tile);
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += tile) {
    const int64_t t = begin + in_tile;
    const bool there = t < chunk.end;
    const bool live = there && !(a.mask && !a.mask[t]);
    float z[kAdjacent], s[kAdjacent];
    unpack(a.dtype, raw, z);
    raw = fetch(t + tile);
    float magnitude = 0.0f, exponentials[kAdjacent], scores[kAdjacent];
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i) {
      const bool inside = first + i < experts;
      magnitude = largest_magnitude(magnitude, z[i]);
      exponentials[i] = inside ? math::exp_moderate(z[i]) : 0.0f;
      if (kSoftmax) continue;
      s[i] = a.options.score == Score::kSigmoid
                 ? math::moderate_sigmoid(z[i], exponentials[i]).value
                 : math::elementwise_score(Score::kSqrtSoftplus, z[i]);
      scores[i] = s[i] = inside ? s[i] : 0.0f;
    }
    const bool moderate = token.all(magnitude <= limit && regular);
    const float exponential_sum = token.sum(join_columns(exponentials));
    const float inverse = math::reciprocal(exponential_sum);
    float share = inverse;
    if (!kSoftmax) share = math::reciprocal(token.sum(join_columns(scores)));
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i) {
      if (kSoftmax) s[i] = exponentials[i] * inverse;
      rows[in_tile * padded + first + i] = !live ? 0.0f : kSoftmax ? exponentials[i] : s[i];
    }
    if (token.own == 0) {
      shares[in_tile] = live ? share : 0.0f;
      logsumexps[in_tile] = live ? math::log(exponential_sum) : 0.0f;
    }

    int32_t ids[kMaxTop];
    if (a.given) {
#pragma unroll
      for (int k = 0; k < kMaxTop; ++k)
        ids[k] = live && k < a.top_k ? given_id(a, t * a.top_k + k) : -1;
    } else {
      const auto values = [&](float (&v)[kAdjacent], float bias_factor) {
#pragma unroll
        for (int i = 0; i < kAdjacent; ++i) {
          v[i] = first + i < experts ? math::fma(b[i], bias_factor, a.on_logit ? z[i] : s[i])
                                     : -math::infinity();
        }
      };
      float v[kAdjacent];
      if (a.separate_loss_counts) {
        values(v, 0.0f);
        select(v, a.top_k, token, ids);
#pragma unroll
        for (int k = 0; k < kMaxTop; ++k) {
          if (live && moderate && k < a.top_k && k % token.count == token.own)
            atomicAdd(loss_counts + ids[k], 1);
        }
      }
      values(v, 1.0f);
      if (!a.groups.all_stay()) keep_best_groups(a.groups, group_lanes, token, v);
      select(v, a.top_k, token, ids);
    }
    __syncwarp();
    // The scores in the lane order of math/router.h.
    float score[kMaxTop];
#pragma unroll
    for (int k = 0; k < kMaxTop; ++k) {
      score[k] = 0.0f;
      if (live && k < a.top_k && ids[k] >= 0) {
        const float x = rows[in_tile * padded + ids[k]];
        score[k] = kSoftmax ? x * inverse : x;
      }
    }
    const float sum = ((score[0] + score[4]) + (score[2] + score[6])) +
                      ((score[1] + score[5]) + (score[3] + score[7]));
    const Divisor divisor =
        math::weight_divisor(a.options.normalize, a.options.eps_mode, sum, a.options.eps);
#pragma unroll
    for (int k = 0; k < kMaxTop; ++k) {
      if (k >= a.top_k || k % token.count != token.own || !there || (live && !moderate)) continue;
      const bool used = live && ids[k] >= 0;
      const float weight = a.options.normalize ? score[k] / divisor.value : score[k];
      a.indices[t * a.top_k + k] = used ? ids[k] : -1;
      a.weights[t * a.top_k + k] = used ? weight * a.options.scale : 0.0f;
      if (used) atomicAdd(counts + ids[k], 1);
    }
    const unsigned first_lanes = __ballot_sync(kAllLanes, live && token.own == 0);
    tokens += __popc(first_lanes);

    // Rows that are not moderate, one after the other.
    unsigned left = first_lanes & ~__ballot_sync(kAllLanes, moderate);
    while (left) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const int other = (warp_id() * kLanes + lane) / layout.lanes;
      float* mine = rows + other * padded;
      __syncwarp();
      Row row{.score = a.options.score, .experts = experts, .z = a.row(begin + other), .s = mine};
      route_token(a, begin + other, row, group_keys[warp_id()], counts, loss_counts);
      for (int e = lane_id(); e < experts; e += kLanes) mine[e] = row.unscaled_probability(e);
      if (lane_id() == 0) {
        shares[other] = row.share;
        logsumexps[other] = row.logsumexp;
      }
    }

    __syncthreads();
    const int filled = static_cast<int>(chunk.end - begin < tile ? chunk.end - begin : tile);
#pragma unroll
    for (int n = 0; n < kMaxSums; ++n) {
      const int at = static_cast<int>(threadIdx.x) + n * threads, column = at / kStreams;
      if (column > experts) continue;
      for (int i = at % kStreams; i < filled; i += kStreams) {
        const float x = column < experts ? rows[i * padded + column] : logsumexps[i];
        sums[n] = math::fma(x, column < experts ? shares[i] : x, sums[n]);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int n = 0; n < kMaxSums; ++n) {
    const int at = static_cast<int>(threadIdx.x) + n * threads, column = at / kStreams;
    if (column < experts) streams[at % kStreams * experts + column] = sums[n];
    if (column == experts) stream_logsumexp_sq[at % kStreams] = sums[n];
  }
  if (lane_id() == 0) stream_tokens[warp_id()] = tokens;
  __syncthreads();
  write_partials(a, counts, true, stream_logsumexp_sq, stream_tokens,
                 [&](int j, int e) { return streams[j * experts + e]; });
}

}  // namespace

bool launch_route_lanes(Queue& queue, const Route& a, int64_t chunks) {
  if (a.experts > kMaxExperts || a.top_k > kMaxTop) return false;
  Layout layout{.lanes = 1, .warps = 1};
  while (layout.padded() < a.experts) layout.lanes *= 2;
  layout.warps = static_cast<int>(
      std::clamp<int64_t>(a.chunk_length * layout.lanes / kLanes, 1, kMaxWarps));
  if (!a.groups.all_stay()) {
    const int size = a.experts / a.groups.count, lanes = size / kAdjacent;
    if (size % kAdjacent != 0 || (lanes & (lanes - 1)) != 0 || a.groups.score_k > 2) return false;
  }
  const size_t bytes = sizeof(float) * layout.tile() * (layout.padded() + 2);
  queue.launch(a.options.score == Score::kSoftmax ? route_lanes<true> : route_lanes<false>, chunks,
               layout.warps * kLanes, bytes, a, layout);
  return true;
}

}  // namespace duomoe::cuda
