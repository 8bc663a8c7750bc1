// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route_bwd` for E <= 512 and K <= 32: one warp per token, its row in registers, four neighbouring
// experts of every 128 to a lane. Warps walk through the tokens.
#include "route_bwd.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = kMaxWarps * kLanes;

// Blocks that a multiprocessor holds at once.
constexpr int blocks_for(int vectors) { return vectors == 1 ? 4 : vectors < 4 ? 3 : 2; }

// Words of shared memory for a warp: the scores (exponentials for softmax), what slots add to
// experts, for elementwise scores the slopes and the exponentials, and a word per slot for
// route_bwd_token.
__host__ __device__ constexpr int words_for(int padded, bool softmax) {
  return (softmax ? 2 : 4) * padded + kLanes;
}

// Cotangents below this, with slots' parts below it too, make a row's gradient without a NaN or an
// overflow on the way: exponentials, their sums and the inverses of these are below e^67.
constexpr float kTame = 1e6f;

// Adds element i of a row, x >= 0, to its column; the first one, to which the 0 need not be added.
__device__ inline void add(Columns& columns, int i, float x) {
  columns[i % kAdjacent] = i < kAdjacent ? x : columns[i % kAdjacent] + x;
}

// The sum over the slots, one to a lane; 0 in the lanes beyond K. A sum that starts at +0 is never
// -0.
__device__ inline float slot_sum(float x) { return warp_sum(x) + 0.0f; }

// Rows::kFloat32, kBFloat16: whole vectors, E % 128 = 0 or E < 128, normal_divisors. kAny: no
// condition.
template <int kVectors, Score kScore, Rows kRows>
__global__ void __launch_bounds__(kThreads, blocks_for(kVectors))
    route_bwd_vectors(const __grid_constant__ RouteBwd a) {
  constexpr int kElements = kAdjacent * kVectors;
  constexpr bool kSoftmax = kScore == Score::kSoftmax, kAny = kRows == Rows::kAny;
  constexpr bool kPartial = kAny || kVectors == 1;      // E may be no multiple of 128
  constexpr bool kReload = !kSoftmax && kVectors == 3;  // slopes, for lack of registers
  constexpr int kNoEnd = std::numeric_limits<int>::max();
  extern __shared__ __align__(16) float shared_memory[];
  const DType dtype = dtype_of<kRows>(a);
  const int experts = kPartial ? a.experts : kVectors * kColumns;
  const int padded = (experts + kAdjacent - 1) / kAdjacent * kAdjacent;
  const int lane = lane_id(), first = kAdjacent * lane;  // and kColumns on, 2 kColumns on, ...
  const int end = kPartial ? experts - first : kNoEnd;
  const bool whole = kAny ? a.whole_vectors : true;
  float* scores_of_row = shared_memory + warp_id() * words_for(padded, kSoftmax);
  float* added = scores_of_row + padded;  // -0 but for slots, which leaves every number as it is
  float* slopes_of_row = added + padded;
  float* exponentials_of_row = slopes_of_row + padded;
  float* of_slot = kSoftmax ? slopes_of_row : exponentials_of_row + padded;

  const float limit = math::moderate_limit(kScore);
  const int row_bytes = experts * static_cast<int>(item_bytes(dtype));
  const int stride = static_cast<int>(grid_warps());
  const int row_step = stride * row_bytes, slot_step = stride * a.top_k;
  const bool has_slot = lane < a.top_k, has_mask = a.mask != nullptr;
  const int64_t first_token = a.range.first();
  const int last = static_cast<int>(a.range.last());
  int t = static_cast<int>(grid_warp());
  while (t < last) {
    for (int e = first; e < padded; e += kColumns)
      *reinterpret_cast<float4*>(added + e) = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
    __syncwarp();

    // Up to the next token that is left to route_bwd_token, before which nothing is kept.
    const int64_t offset = static_cast<int64_t>(t) * row_bytes + first * item_bytes(dtype);
    const int64_t slot = static_cast<int64_t>(t) * a.top_k + lane;
    const char* from = a.logits + offset;
    char* to = a.grad_logits + offset;
    const int32_t* ids_from = a.indices + slot;
    const float* grads_from = a.grad_weights + slot;
    Raw raw[kVectors];
    int32_t next_id = -1;
    float next_grad = 0.0f;
    unsigned next_mask = 1;  // tested where it is needed, not where it is loaded
    const auto fetch = [&](int token) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        raw[j] = load_raw(dtype, from, 0, j * kColumns, end, whole);
      if (has_slot) {
        next_id = *ids_from;
        next_grad = *grads_from;
      }
      if (has_mask) next_mask = a.mask[token];
    };
    const auto fetch_next = [&] {
      from += row_step;
      ids_from += slot_step;
      grads_from += slot_step;
      if (t + stride < last) fetch(t + stride);
    };
    fetch(t);
    float g[kElements];
    float grad_logsumexp_sq = 0.0f;
    int end_of_sequence = t;
    bool tame = true;
    for (; t < last; t += stride, to += row_step) {
      float grad[kElements];
      if (has_mask && next_mask == 0) {
        fetch_next();
#pragma unroll
        for (int i = 0; i < kElements; ++i) grad[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          store_four(dtype, grad + kAdjacent * j, to, 0, j * kColumns, end, whole);
        continue;
      }
      if (t >= end_of_sequence) {
        int64_t sequence = 0;
        end_of_sequence = last;
        if (a.range.sequence_length < a.range.total) {
          sequence = (first_token + t) / a.range.sequence_length;
          const int64_t next = (sequence + 1) * a.range.sequence_length - first_token;
          if (next < last) end_of_sequence = static_cast<int>(next);
        }
        grad_logsumexp_sq = a.grad_logsumexp_sq[sequence];
        const float* of_sequence = a.grad_score_sums + sequence * experts + first;
        tame = math::absolute(grad_logsumexp_sq) < kTame;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const int e = i / kAdjacent * kColumns + i % kAdjacent;
          g[i] = e < end ? of_sequence[e] : 0.0f;
          tame = tame && math::absolute(g[i]) < kTame;
        }
      }

      const int32_t id = next_id;
      const float grad_weight = next_grad;
      const bool used = id >= 0 && id < experts;
      float* const own_score = scores_of_row + id;
      float* const own_added = own_score + padded;
      float* const own_slope_at = own_added + padded;
      float magnitude = 0.0f;
      float z[kElements], x[kElements], slope[kElements],
          u[kElements];  // x: what P is proportional to
      Columns exponentials, scores, dots = {};
#pragma unroll
      for (int j = 0; j < kVectors; ++j) unpack(dtype, raw[j], z + kAdjacent * j);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        magnitude = fmaxf(magnitude, fabsf(z[i]));
        u[i] = math::exp_moderate(z[i]);
        x[i] = kScore == Score::kSqrtSoftplus ? z[i] : u[i];
        if (kScore == Score::kSigmoid) {
          const math::SigmoidPair pair = math::moderate_sigmoid(z[i], u[i]);
          x[i] = pair.value;
          slope[i] = pair.complement;
        }
        if (kPartial && i / kAdjacent * kColumns + (kAny ? i % kAdjacent : 0) >= end)
          u[i] = x[i] = 0.0f;
        add(exponentials, i, u[i]);
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (j * kColumns >= end) continue;
        const int i = kAdjacent * j, e = first + j * kColumns;
        *reinterpret_cast<float4*>(scores_of_row + e) =
            make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        if (kScore == Score::kSigmoid)
          *reinterpret_cast<float4*>(slopes_of_row + e) =
              make_float4(slope[i], slope[i + 1], slope[i + 2], slope[i + 3]);
        if (!kSoftmax && grad_logsumexp_sq != 0.0f)  // for each lane itself
          *reinterpret_cast<float4*>(exponentials_of_row + e) =
              make_float4(u[i], u[i + 1], u[i + 2], u[i + 3]);
      }
      // Atomic, for lanes with one id write to one place: which of them stays is all the same.
      // Here, when the id has long been read, since the compiler makes a branch of it.
      if (used) atomicExch(reinterpret_cast<int*>(own_added), lane);
      __syncwarp();
      // A NaN escapes the magnitude, but its exponential is NaN or above 2^127: its bits are those
      // of the NaN 0x7fffffff plus 0xff800000. Those of a moderate row are at most e^60.
      const float lane_exponentials = join_columns(exponentials);
      bool regular = magnitude <= limit && lane_exponentials < 1e37f;
      if (used) regular = regular && math::bits_of(*own_added) == static_cast<uint32_t>(lane);
      if (!__all_sync(kAllLanes, regular)) break;
      fetch_next();

      if (kScore == Score::kSqrtSoftplus) {
#pragma unroll 2
        for (int e = lane; e < padded; e += kLanes) {
          const float logit = scores_of_row[e];
          scores_of_row[e] = math::elementwise_score(Score::kSqrtSoftplus, logit);
          slopes_of_row[e] = math::log_score_slope(Score::kSqrtSoftplus, logit);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const int e = i / kAdjacent * kColumns + i % kAdjacent;
          const bool inside = !kPartial || e < end;
          x[i] = inside ? scores_of_row[first + e] : 0.0f;
          slope[i] = inside ? slopes_of_row[first + e] : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (!kSoftmax) add(scores, i, x[i]);
        dots[i % kAdjacent] = math::fma(x[i], g[i], dots[i % kAdjacent]);
      }
      const float exponential_sum = warp_sum(lane_exponentials);
      const float inverse = math::reciprocal(exponential_sum);
      const float share = kSoftmax ? inverse : math::reciprocal(warp_sum(join_columns(scores)));
      const float mean = share * warp_sum(join_columns(dots));

      // The slots: their weights before `scale`, and what they add to their experts.
      float score = 0.0f, own_slope = 1.0f, cotangent = 0.0f;
      if (used) {
        score = kSoftmax ? *own_score * inverse : *own_score;
        if (!kSoftmax) own_slope = *own_slope_at;
        cotangent = grad_weight * a.options.scale;
      }
      float weight = score, own_share = 0.0f, rest = 1.0f;  // math::Divisor
      if (a.options.normalize) {
        const float sum = slot_sum(score), eps = a.options.eps;
        const auto quotient = [](float n, float d) { return kAny ? n / d : math::quotient(n, d); };
        float divisor = sum;
        if (kAny) {
          const Divisor exact = math::weight_divisor(true, a.options.eps_mode, sum, eps);
          divisor = exact.value;
          own_share = exact.own;
          rest = exact.rest;
        } else if (a.options.eps_mode == EpsMode::kAdd) {
          divisor = sum + eps;
          own_share = 1.0f;
          if (kSoftmax) rest = eps > 0.0f ? quotient(eps, divisor) : 0.0f;
        } else {
          divisor = sum < eps ? eps : sum;
          own_share = sum < eps ? 0.0f : 1.0f;
          rest = sum < eps ? 1.0f : 0.0f;
        }
        weight = used ? quotient(score, used ? divisor : 1.0f) : 0.0f;
      }
      const float common = slot_sum(weight * cotangent);
      float own = weight * (cotangent - own_share * common);
      if (!kSoftmax) own *= own_slope;
      if (used) *own_added = own;
      rest = kSoftmax ? rest * common : 0.0f;
      bool tame_row = tame;
      if (kRows == Rows::kBFloat16)
        tame_row =
            __all_sync(kAllLanes, tame && math::absolute(own) + math::absolute(rest) < kTame);
      __syncwarp();

#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (kReload && j * kColumns < end) {
          const float4 v = *reinterpret_cast<const float4*>(slopes_of_row + first + j * kColumns);
          slope[kAdjacent * j] = v.x;
          slope[kAdjacent * j + 1] = v.y;
          slope[kAdjacent * j + 2] = v.z;
          slope[kAdjacent * j + 3] = v.w;
        }
#pragma unroll
        for (int i = kAdjacent * j; i < kAdjacent * (j + 1); ++i) {
          grad[i] = x[i] * share * (g[i] - mean);
          if (!kSoftmax) grad[i] *= slope[i];
        }
      }
      if (grad_logsumexp_sq != 0.0f) {
        const float softmax_factor =
            math::square_slope(math::log(exponential_sum), grad_logsumexp_sq);
        if (softmax_factor != 0.0f) {
          const float factor = inverse * softmax_factor;
#pragma unroll
          for (int j = 0; j < kVectors; ++j) {
            if (j * kColumns >= end) continue;
            float4 v = make_float4(x[kAdjacent * j], x[kAdjacent * j + 1], x[kAdjacent * j + 2],
                                   x[kAdjacent * j + 3]);
            if (!kSoftmax)
              v = *reinterpret_cast<const float4*>(exponentials_of_row + first + j * kColumns);
            float* four = grad + kAdjacent * j;
            four[0] = math::fma(v.x, factor, four[0]);
            four[1] = math::fma(v.y, factor, four[1]);
            four[2] = math::fma(v.z, factor, four[2]);
            four[3] = math::fma(v.w, factor, four[3]);
          }
        }
      }
      if (kSoftmax && rest != 0.0f) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) grad[i] = math::fma(-(x[i] * inverse), rest, grad[i]);
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (j * kColumns >= end) continue;
        const float4 of_slots = *reinterpret_cast<const float4*>(added + first + j * kColumns);
        float* four = grad + kAdjacent * j;
        four[0] += of_slots.x;
        four[1] += of_slots.y;
        four[2] += of_slots.z;
        four[3] += of_slots.w;
        if (kRows != Rows::kBFloat16) store_four(dtype, four, to, 0, j * kColumns, end, whole);
      }
      if (kRows == Rows::kBFloat16) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (j * kColumns < end) store_bfloat16s(tame_row, grad + kAdjacent * j, to, j * kColumns);
      }
      __syncwarp();
      if (used) *own_added = -0.0f;
      __syncwarp();
    }
    if (t >= last) break;
    __syncwarp();
    Row row{.score = kScore, .experts = experts, .z = a.row(t), .s = scores_of_row};
    route_bwd_token(a, t, a.sequence(t), row, added, of_slot);
    t += stride;
  }

  for (; t < a.range.tokens; t += stride) {  // padding of the slice
    for (int e = lane; e < experts; e += kLanes)
      store(dtype, 0.0f, a.grad_logits, static_cast<int64_t>(t) * experts + e);
  }
}

template <int kVectors, Score kScore>
auto kernel_for(Rows rows) {
  return rows == Rows::kFloat32    ? route_bwd_vectors<kVectors, kScore, Rows::kFloat32>
         : rows == Rows::kBFloat16 ? route_bwd_vectors<kVectors, kScore, Rows::kBFloat16>
                                   : route_bwd_vectors<kVectors, kScore, Rows::kAny>;
}

template <int kVectors>
auto kernel_for(Score score, Rows rows) {
  return score == Score::kSoftmax   ? kernel_for<kVectors, Score::kSoftmax>(rows)
         : score == Score::kSigmoid ? kernel_for<kVectors, Score::kSigmoid>(rows)
                                    : kernel_for<kVectors, Score::kSqrtSoftplus>(rows);
}

}  // namespace

bool launch_route_bwd_vectors(Queue& queue, const RouteBwd& a) {
  const int vectors = static_cast<int>(ceil_div(a.experts, kColumns));
  if (vectors > 4 || a.top_k > kLanes || a.range.tokens > (1 << 30)) return false;
  const bool fast = a.whole_vectors && (vectors == 1 || a.experts % kColumns == 0) &&
                    normal_divisors(a.options) && a.dtype != DType::kFloat16;
  const Rows rows = !fast                        ? Rows::kAny
                    : a.dtype == DType::kFloat32 ? Rows::kFloat32
                                                 : Rows::kBFloat16;
  const auto kernel = vectors == 1   ? kernel_for<1>(a.options.score, rows)
                      : vectors == 2 ? kernel_for<2>(a.options.score, rows)
                      : vectors == 3 ? kernel_for<3>(a.options.score, rows)
                                     : kernel_for<4>(a.options.score, rows);
  const int padded = static_cast<int>(ceil_div(a.experts, kAdjacent)) * kAdjacent;
  const size_t bytes =
      sizeof(float) * kMaxWarps * words_for(padded, a.options.score == Score::kSoftmax);
  if (bytes > 48 * 1024) queue.allow_shared(kernel, bytes);
  const int64_t blocks =
      std::min(ceil_div(a.range.tokens, kMaxWarps), blocks_for(vectors) * queue.multiprocessors());
  queue.launch(kernel, blocks, kThreads, bytes, a);
  return true;
}

}  // namespace duomoe::cuda
