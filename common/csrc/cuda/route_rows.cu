// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for any E and K: one warp per token, whose scores are in shared memory. A warp takes one
// or more streams of a chunk.
#include "route.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kMaxTop = 2 * kLanes;
using Found = Candidates<kMaxTop>;
constexpr int kAhead = 4;  // vectors of a lane that are loaded together

// Where a block keeps what, in words of shared memory. What has no room is in the workspace, or
// null.
struct Layout {
  int warps, padded;  // padded: E as whole vectors
  bool shared_streams, shared_counts;

  __host__ __device__ int64_t streams() const {
    return shared_streams ? static_cast<int64_t>(kStreams) * padded : 0;
  }
  __host__ __device__ int64_t rows() const { return static_cast<int64_t>(warps) * padded; }
  __host__ int64_t words(const Route& a) const {
    return streams() + rows() + (shared_counts ? a.count_words() : 0) +
           (a.groups.all_stay() ? 0 : static_cast<int64_t>(warps) * a.groups.count);
  }
};

// One token by the short way; false, and nothing written, where it is not for it. On return
// `share` times row_scores[e] is P.
template <bool kSoftmax>
__device__ bool route_moderate(const Route& a, int64_t t, float* row_scores, Found& candidates,
                               int32_t* counts, int32_t* loss_counts, LogSumExps& logsumexps,
                               float& share) {
  const int experts = a.experts, first = kAdjacent * lane_id();
  const float limit = math::moderate_limit(a.options.score);
  float magnitude = 0.0f;
  Columns exponentials = {}, scores = {};
  for (int begin = first; begin < experts; begin += kAhead * kColumns) {
    Raw raw[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      raw[j] = load_raw(a.dtype, a.logits, t * experts, begin + j * kColumns, experts,
                        a.whole_vectors);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int e = begin + j * kColumns;
      if (e >= experts) break;
      float z[kAdjacent], s[kAdjacent];
      unpack(a.dtype, raw[j], z);
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        magnitude = largest_magnitude(magnitude, z[i]);
        float u = math::exp_moderate(z[i]);
        if (kSoftmax) {
          s[i] = u;
        } else {
          s[i] = a.options.score == Score::kSigmoid
                     ? math::moderate_sigmoid(z[i], u).value
                     : math::elementwise_score(Score::kSqrtSoftplus, z[i]);
        }
        if (e + i >= experts) u = s[i] = 0.0f;
        exponentials[i] += u;
        if (!kSoftmax) scores[i] += s[i];
      }
      *reinterpret_cast<float4*>(row_scores + e) = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  if (!__all_sync(kAllLanes, magnitude <= limit)) return false;
  const float exponential_sum = warp_sum(join_columns(exponentials));
  const float inverse = math::reciprocal(exponential_sum);
  share = kSoftmax ? inverse : math::reciprocal(warp_sum(join_columns(scores)));
  __syncwarp();

  const Logits z = a.row(t);
  const auto score_of = [&](int e) { return kSoftmax ? row_scores[e] * inverse : row_scores[e]; };
  const auto biased = [&](int e, bool with_bias) {
    return (a.on_logit ? z(e) : score_of(e)) + (with_bias && a.bias ? a.bias[e] : 0.0f);
  };
  int32_t* ids = a.indices + t * a.top_k;  // slot k is written and read by lane k % 32
  if (a.given) {
    for (int k = lane_id(); k < a.top_k; k += kLanes) ids[k] = given_id(a, t * a.top_k + k);
  } else {
    for (int pass = 0; pass <= a.separate_loss_counts; ++pass) {
      const auto value = [&](int e) { return biased(e, pass == 0); };
      constexpr int kParts = 4;
      float maxima[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) maxima[p] = -math::infinity();
      for (int begin = first; begin < experts; begin += kParts * kColumns) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const int e = begin + p * kColumns;
#pragma unroll
          for (int i = 0; i < kAdjacent; ++i) {
            if (e + i >= experts) continue;
            const float v = value(e + i);
            maxima[p] = v > maxima[p] ? v : maxima[p];
          }
        }
      }
      const float bound = bound_of_best(maxima, a.top_k);
      int count = 0;
      for (int begin = 0; begin < experts; begin += kColumns) {
        const int e = begin + first;
        unsigned mask = 0;
#pragma unroll
        for (int i = 0; i < kAdjacent; ++i) {
          if (e + i < experts && value(e + i) >= bound) mask |= 1u << i;
        }
        count = gather(mask, count, [=](int i) { return e + i; }, candidates);
        __syncwarp();
      }
      if (count < a.top_k || count > Found::kRoom) {
        // The values above the bound and the first of those equal to it.
        int above = 0;
        for (int e = lane_id(); e < experts; e += kLanes) above += value(e) > bound;
        above = __reduce_add_sync(kAllLanes, above);
        if (count < a.top_k || above > Found::kRoom) return false;
        int ties = above < a.top_k ? a.top_k - above : 0;
        count = 0;
        for (int begin = 0; begin < experts; begin += kLanes) {
          const int e = begin + lane_id();
          const float v = e < experts ? value(e) : -math::infinity();
          const unsigned equal = __ballot_sync(kAllLanes, v == bound);
          const int before = __popc(equal & ((1u << lane_id()) - 1));
          const bool taken = v > bound || (v == bound && before < ties);
          ties = ties > __popc(equal) ? ties - __popc(equal) : 0;
          count = gather(taken ? 1u : 0u, count, [=](int) { return e; }, candidates);
          __syncwarp();
        }
      }
      rank(count, a.top_k, value, candidates);
      for (int k = lane_id(); k < a.top_k; k += kLanes) {
        const int32_t id = candidates.best[k];
        if (pass == 0) {
          ids[k] = id;
        } else {
          atomicAdd(loss_counts + id, 1);
        }
      }
      __syncwarp();
    }
  }
  const float sum = lane_sum(a.top_k, [&](int64_t k) { return ids[k] >= 0 ? score_of(ids[k]) : 0.0f; });
  const Divisor divisor =
      math::weight_divisor(a.options.normalize, a.options.eps_mode, sum, a.options.eps);
  for (int k = lane_id(); k < a.top_k; k += kLanes) {
    float weight = 0.0f;
    if (ids[k] >= 0) {
      const float score = score_of(ids[k]);
      weight = (a.options.normalize ? score / divisor.value : score) * a.options.scale;
      atomicAdd(counts + ids[k], 1);
    }
    a.weights[t * a.top_k + k] = weight;
  }
  logsumexps.add(exponential_sum);
  return true;
}

// One block per chunk.
template <bool kSoftmax>
__global__ void __launch_bounds__(kMaxWarps* kLanes)
    route_rows(const __grid_constant__ Route a, const Layout layout) {
  extern __shared__ float shared_memory[];
  __shared__ Found all_candidates[kMaxWarps];
  __shared__ float stream_logsumexp_sq[kStreams];
  __shared__ int32_t stream_tokens[kStreams];

  clear_expert_counts(a);
  const Chunk chunk = chunk_of(a, blockIdx.x);
  if (chunk.begin >= chunk.end) return;
  const int experts = a.experts, warp = warp_id(), padded = layout.padded;
  const int threads = static_cast<int>(blockDim.x);
  float* streams = layout.shared_streams ? shared_memory
                                         : a.streams + static_cast<int64_t>(blockIdx.x) * kStreams * padded;
  float* rows = shared_memory + layout.streams();
  float* mine = rows + warp * padded;
  uint32_t* after_rows = reinterpret_cast<uint32_t*>(rows + layout.rows());
  int32_t* counts = layout.shared_counts ? reinterpret_cast<int32_t*>(after_rows)
                                         : a.partials.counts(blockIdx.x, experts);
  uint32_t* group_keys =
      after_rows + (layout.shared_counts ? a.count_words() : 0) + warp * a.groups.count;
  bool regular = a.groups.all_stay() && a.top_k <= kMaxTop;
  if (a.bias && regular) {
    regular = all_lanes(experts, [&](int e) { return math::absolute(a.bias[e]) < 1e30f; });
  }
  for (int i = static_cast<int>(threadIdx.x); i < a.count_words(); i += threads) counts[i] = 0;
  __syncthreads();

  for (int j = warp; j < kStreams; j += warps_per_block()) {
    float* sums = streams + static_cast<int64_t>(j) * padded;
    for (int e = lane_id(); e < padded; e += kLanes) sums[e] = 0.0f;
    __syncwarp();
    LogSumExps logsumexps;
    for (int64_t t = chunk.begin + j; t < chunk.end; t += kStreams) {
      if (a.mask && !a.mask[t]) {
        leave_slots_unused(a, t);
        continue;
      }
      float share = 0.0f;
      if (regular && route_moderate<kSoftmax>(a, t, mine, all_candidates[warp], counts,
                                              counts + experts, logsumexps, share)) {
        for (int e = kAdjacent * lane_id(); e < experts; e += kColumns) {
          const float4 s = *reinterpret_cast<const float4*>(mine + e);
          float4 sum = *reinterpret_cast<float4*>(sums + e);
          sum.x = math::fma(s.x, share, sum.x);
          sum.y = math::fma(s.y, share, sum.y);
          sum.z = math::fma(s.z, share, sum.z);
          sum.w = math::fma(s.w, share, sum.w);
          *reinterpret_cast<float4*>(sums + e) = sum;
        }
      } else {
        __syncwarp();
        Row row{.score = a.options.score, .experts = experts, .z = a.row(t), .s = mine};
        route_token(a, t, row, group_keys, counts, counts + experts);
        logsumexps.add_ready(row.logsumexp);
        for (int e = kAdjacent * lane_id(); e < experts; e += kColumns) {
          for (int i = e; i < e + kAdjacent && i < experts; ++i)
            sums[i] = math::fma(row.unscaled_probability(i), row.share, sums[i]);
        }
      }
      __syncwarp();  // all have read the row
    }
    const float logsumexp_sq = logsumexps.sum_of_squares();
    if (lane_id() == 0) {
      stream_logsumexp_sq[j] = logsumexp_sq;
      stream_tokens[j] = logsumexps.count();
    }
  }
  __syncthreads();
  write_partials(a, counts, layout.shared_counts, stream_logsumexp_sq, stream_tokens,
                 [&](int j, int e) { return streams[static_cast<int64_t>(j) * padded + e]; });
}

}  // namespace

Layout layout_of(const Route& a, size_t limit) {
  Layout layout{.warps = kMaxWarps,
                .padded = static_cast<int>(ceil_div(a.experts, kAdjacent)) * kAdjacent,
                .shared_streams = true,
                .shared_counts = true};
  const auto fits = [&] {
    return kWordBytes * layout.words(a) + static_cast<int64_t>(sizeof(Found)) * kMaxWarps + 128 <=
           static_cast<int64_t>(limit);
  };
  while (!fits() && layout.warps > 2) layout.warps /= 2;
  if (!fits()) {
    layout.shared_streams = layout.shared_counts = false;
    layout.warps = kMaxWarps;
    while (!fits() && layout.warps > 1) layout.warps /= 2;
  }
  if (!fits()) layout.warps = 0;
  return layout;
}

Status launch_route_rows(Queue& queue, const Route& a, int64_t chunks) {
  const size_t limit = queue.shared_limit();
  const Layout layout = layout_of(a, limit);
  if (queue.status().ok() && layout.warps == 0)
    return row_too_long(a.experts, kWordBytes * a.experts, limit);
  const auto kernel =
      a.options.score == Score::kSoftmax ? route_rows<true> : route_rows<false>;
  queue.allow_shared(kernel, limit - sizeof(Found) * kMaxWarps - 128);
  queue.launch(kernel, chunks, layout.warps * kLanes, kWordBytes * layout.words(a), a, layout);
  return queue.status();
}

}  // namespace duomoe::cuda
