// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route_bwd` for E <= 64 and K <= 8: several tokens to a warp, which takes no others after them.
#include "lane_groups.cuh"
#include "route_bwd.cuh"

namespace duomoe::cuda {
namespace {

using namespace lanes;

constexpr int kWarpElements = kLanes * kElements;  // of a warp's tokens

// What a warp has of shared memory: its tokens' rows, or one that is left to route_bwd_token.
template <bool kSoftmax>
struct Space {
  alignas(16) float scores[kWarpElements];  // exponentials for softmax
  alignas(16) float added[kWarpElements];   // by slots; elsewhere -0, which changes no number
  alignas(16) float slopes[kSoftmax ? kAdjacent : kWarpElements];
  float of_slot[kMaxTop];
};

// Whether no two of a token's slots have one expert; -1 is none.
template <int P>
__device__ bool all_differ(const int32_t (&ids)[LaneGroup<P>::kSlots]) {
  uint64_t taken = 0;
  int used = 0;
#pragma unroll
  for (const int32_t id : ids) {
    if (id < 0) continue;
    taken |= uint64_t{1} << id;
    ++used;
  }
#pragma unroll
  for (int width = P / 2; width > 0; width /= 2) {
    taken |= __shfl_xor_sync(kAllLanes, taken, width);
    used += __shfl_xor_sync(kAllLanes, used, width);
  }
  return __popcll(taken) == used;
}

template <int P, Score kScore>
__global__ void __launch_bounds__(kMaxWarps* kLanes, 2)
    route_bwd_lanes(const __grid_constant__ RouteBwd a) {
  using Group = LaneGroup<P>;
  constexpr bool kSoftmax = kScore == Score::kSoftmax;
  constexpr int kSlots = Group::kSlots, kPadded = Group::kPadded;
  constexpr int kTokens = kLanes / P;  // of a warp
  __shared__ Space<kSoftmax> spaces[kMaxWarps];

  const Group group;
  const int experts = a.experts, top_k = a.top_k, own = group.own, in_warp = lane_id() / P;
  const int64_t t = grid_warp() * kTokens + in_warp;
  const bool there = t < a.range.tokens;
  const int64_t sequence = there ? a.sequence(t) : -1;
  const bool live = sequence >= 0;
  Vectors raw = {};
  int32_t ids[kSlots];
  float cotangent[kSlots];
  Values g = {};
  float grad_logsumexp_sq = 0.0f;
#pragma unroll
  for (int n = 0; n < kSlots; ++n) {
    ids[n] = -1;
    cotangent[n] = 0.0f;
  }
  if (live) {
    group.load_row(a.dtype, a.logits, t * experts, experts, a.whole_vectors, raw);
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      const int k = own + n * P;
      if (k >= top_k) break;
      ids[n] = a.indices[t * top_k + k];
      cotangent[n] = a.grad_weights[t * top_k + k];
    }
    Vectors of_shares = {};
    group.load_row(DType::kFloat32, a.grad_score_sums, sequence * experts, experts,
                   a.whole_cotangents, of_shares);
    Group::unpack_row(DType::kFloat32, of_shares, g);
    grad_logsumexp_sq = a.grad_logsumexp_sq[sequence];
  }
  Space<kSoftmax>& space = spaces[warp_id()];
  float* const scores = space.scores + in_warp * kPadded;
  float* const added = space.added + in_warp * kPadded;
  float* const slopes = space.slopes + (kSoftmax ? 0 : in_warp * kPadded);

  // A moderate row whose slots have different experts.
  Values z, u, x, slope;  // x: what P is proportional to
  Group::unpack_row(a.dtype, raw, z);
  float magnitude = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    magnitude = largest_magnitude(magnitude, z[i]);
    const bool inside = group.expert(i) < experts;
    u[i] = inside ? math::exp_moderate(z[i]) : 0.0f;
    if (kSoftmax) {
      x[i] = u[i];
    } else if (kScore == Score::kSigmoid) {
      const math::SigmoidPair pair = math::moderate_sigmoid(z[i], u[i]);
      x[i] = inside ? pair.value : 0.0f;
      slope[i] = pair.complement;
    } else {
      x[i] = inside ? math::elementwise_score(kScore, z[i]) : 0.0f;
      slope[i] = math::log_score_slope(kScore, z[i]);
    }
  }
#pragma unroll
  for (int n = 0; n < kSlots; ++n) ids[n] = ids[n] >= 0 && ids[n] < experts ? ids[n] : -1;
  const bool different = all_differ<P>(ids);
  const bool regular =
      group.bits(magnitude <= math::moderate_limit(kScore) && different) == (1u << P) - 1;
  Values none;
#pragma unroll
  for (int i = 0; i < kElements; ++i) none[i] = -0.0f;
  group.store_row(scores, x);
  group.store_row(added, none);
  if constexpr (!kSoftmax) group.store_row(slopes, slope);
  __syncwarp();

  const float exponential_sum = Group::row_sum(u);
  const float inverse = math::reciprocal(exponential_sum);
  const float share = kSoftmax ? inverse : math::reciprocal(Group::row_sum(x));
  Values dots;
#pragma unroll
  for (int i = 0; i < kElements; ++i) dots[i] = math::fma(x[i], g[i], 0.0f);
  const float mean = share * (Group::row_sum(dots) + 0.0f);  // never -0

  float score[kSlots], weight[kSlots], product[kSlots];
#pragma unroll
  for (int n = 0; n < kSlots; ++n) {
    score[n] = 0.0f;
    if (ids[n] >= 0) score[n] = kSoftmax ? scores[ids[n]] * inverse : scores[ids[n]];
    cotangent[n] *= a.options.scale;
  }
  const Divisor divisor = math::weight_divisor(a.options.normalize, a.options.eps_mode,
                                               Group::slot_sum(score) + 0.0f, a.options.eps);
#pragma unroll
  for (int n = 0; n < kSlots; ++n) {
    weight[n] = score[n];
    if (a.options.normalize && ids[n] >= 0) weight[n] /= divisor.value;
    product[n] = ids[n] >= 0 ? weight[n] * cotangent[n] : 0.0f;
  }
  const float common = Group::slot_sum(product) + 0.0f;
#pragma unroll
  for (int n = 0; n < kSlots; ++n) {
    if (ids[n] < 0 || !regular) continue;  // of one id twice: two lanes' writes
    const float grad = weight[n] * (cotangent[n] - divisor.own * common);
    added[ids[n]] = kSoftmax ? grad : grad * slopes[ids[n]];
  }
  __syncwarp();

  const float rest = kSoftmax ? divisor.rest * common : 0.0f;
  float softmax_factor = 0.0f;
  if (grad_logsumexp_sq != 0.0f)
    softmax_factor = math::square_slope(math::log(exponential_sum), grad_logsumexp_sq);
  const float factor = inverse * softmax_factor;
  Values grad;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    grad[i] = x[i] * share * (g[i] - mean);
    if (!kSoftmax) grad[i] *= slope[i];
    if (softmax_factor != 0.0f) grad[i] = math::fma(u[i], factor, grad[i]);
    if (kSoftmax && rest != 0.0f) grad[i] = math::fma(-(x[i] * inverse), rest, grad[i]);
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const float4 of_slots = *reinterpret_cast<const float4*>(added + group.expert(kAdjacent * j));
    float* four = grad + kAdjacent * j;
    four[0] = live ? four[0] + of_slots.x : 0.0f;
    four[1] = live ? four[1] + of_slots.y : 0.0f;
    four[2] = live ? four[2] + of_slots.z : 0.0f;
    four[3] = live ? four[3] + of_slots.w : 0.0f;
  }
  if (there && (regular || !live)) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      store_four(a.dtype, grad + kAdjacent * j, a.grad_logits, t * experts,
                 group.expert(kAdjacent * j), experts, a.whole_vectors);
    }
  }

  for (unsigned others = __ballot_sync(kAllLanes, live && !regular && own == 0); others;
       others &= others - 1) {
    const int lane = __ffs(static_cast<int>(others)) - 1;
    const int64_t other = t - in_warp + lane / P;
    __syncwarp();
    Row row{.score = kScore, .experts = experts, .z = a.row(other), .s = space.scores};
    route_bwd_token(a, other, a.sequence(other), row, space.added, space.of_slot);
  }
}

template <int P>
auto kernel_of(Score score) {
  return score == Score::kSoftmax   ? route_bwd_lanes<P, Score::kSoftmax>
         : score == Score::kSigmoid ? route_bwd_lanes<P, Score::kSigmoid>
                                    : route_bwd_lanes<P, Score::kSqrtSoftplus>;
}

}  // namespace

bool launch_route_bwd_lanes(Queue& queue, const RouteBwd& a) {
  if (a.experts > kMaxExperts || a.top_k > kMaxTop) return false;
  with_lanes(a.experts, [&]<int P>(std::integral_constant<int, P>) {
    // Few warps to a block as long as there are multiprocessors without one.
    const int64_t warps = ceil_div(a.range.tokens, kLanes / P);
    const auto of_block =
        static_cast<int>(std::clamp<int64_t>(warps / queue.multiprocessors(), 1, kMaxWarps));
    queue.launch(kernel_of<P>(a.options.score), ceil_div(warps, of_block), of_block * kLanes, 0, a);
  });
  return true;
}

}  // namespace duomoe::cuda
