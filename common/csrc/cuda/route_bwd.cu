// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients of tokens, recomputed from their logits. Here: any E and K, one warp per token, its row
// in shared memory. Warps walk through the tokens.
#include "route_bwd.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kWarps = 4;   // of a block
constexpr int kBlocks = 4;  // that a multiprocessor holds at once if its shared memory has room

// Vectors of a lane that are loaded together; one where the code of a score is long.
constexpr int ahead_for(Score score) { return score == Score::kSqrtSoftplus ? 1 : 4; }

// Brings [data, data + bytes) into the L2 cache, by one warp.
__device__ inline void prefetch(const void* data, int64_t bytes) {
#if defined(__CUDA_ARCH__)
  constexpr int kLine = 128;
  const char* from = static_cast<const char*>(data);
  for (int64_t i = kLine * lane_id(); i < bytes; i += kLine * kLanes)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
#endif
}

// One moderate row whose slots have different experts. Pass 1 leaves its scores in shared memory
// and sums; pass 2 writes what every expert gets; then the elements of the slots' experts are
// written once more, with the slots' parts.
template <Score kScore, Rows kRows>
struct ModerateRow {
  static constexpr bool kSoftmax = kScore == Score::kSoftmax, kAny = kRows == Rows::kAny;
  static constexpr int kAhead = ahead_for(kScore);

  const RouteBwd& a;
  DType dtype;
  int64_t t;
  const float* g;  // the cotangents of P
  float* scores;   // exponentials for softmax
  float* slopes;   // not for softmax
  float magnitude = 0.0f, exponential_sum = 0.0f, inverse = 0.0f, share = 0.0f, mean = 0.0f;
  bool of_logsumexp = false;  // whether its part, softmax_e * softmax_factor, is not 0
  float factor = 0.0f, rest = 0.0f;
  Columns exponentials = {}, sums = {}, dots = {};

  // Vector j of those from expert `first` on.
  __device__ int end(int first) const {
    return kAny ? a.experts - first : std::numeric_limits<int>::max();
  }
  __device__ Raw load(int first, int j) const {
    const char* from = a.logits + (t * a.experts + first) * item_bytes(dtype);
    return load_raw(dtype, from, 0, j * kColumns, end(first), !kAny || a.whole_vectors);
  }
  __device__ float4 load_cotangents(int first, int j) const {
    const float* from = g + first;
    if (!kAny) return __ldg(reinterpret_cast<const float4*>(from + j * kColumns));
    const auto at = [&](int i) { return i < end(first) ? from[i] : 0.0f; };
    return make_float4(at(j * kColumns), at(j * kColumns + 1), at(j * kColumns + 2),
                       at(j * kColumns + 3));
  }

  // f(first, count) for the vectors of this lane, `count` (a constant) at a time: those at `first`,
  // first + kColumns, ...
  template <typename F>
  __device__ void for_vectors(F f) const {
    int first = kAdjacent * lane_id(), begin = 0;
    for (; kAhead > 1 && begin + kAhead * kColumns <= a.experts; begin += kAhead * kColumns) {
      f(first, std::integral_constant<int, kAhead>{});
      first += kAhead * kColumns;
    }
    for (; first < a.experts; first += kColumns) f(first, std::integral_constant<int, 1>{});
  }

  template <int kCount>
  __device__ void score_vectors(int first) {
    Raw raw[kCount];
    float4 cotangents[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      raw[j] = load(first, j);
      cotangents[j] = load_cotangents(first, j);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float z[kAdjacent], s[kAdjacent], slope[kAdjacent];
      const float of_share[] = {cotangents[j].x, cotangents[j].y, cotangents[j].z, cotangents[j].w};
      unpack(dtype, raw[j], z);
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        magnitude = fmaxf(magnitude, fabsf(z[i]));
        float u = math::exp_moderate(z[i]);
        if (kSoftmax) {
          s[i] = u;
        } else if (kScore == Score::kSigmoid) {
          const math::SigmoidPair pair = math::moderate_sigmoid(z[i], u);
          s[i] = pair.value;
          slope[i] = pair.complement;
        } else {
          s[i] = math::elementwise_score(kScore, z[i]);
          slope[i] = math::log_score_slope(kScore, z[i]);
        }
        if (kAny && j * kColumns + i >= end(first)) u = s[i] = 0.0f;
        exponentials[i] += u;
        if (!kSoftmax) sums[i] += s[i];
        dots[i] = math::fma(s[i], of_share[i], dots[i]);
      }
      *reinterpret_cast<float4*>(scores + first + j * kColumns) =
          make_float4(s[0], s[1], s[2], s[3]);
      if (!kSoftmax)
        *reinterpret_cast<float4*>(slopes + first + j * kColumns) =
            make_float4(slope[0], slope[1], slope[2], slope[3]);
    }
  }

  // Pass 1. False for a row that is not moderate; a NaN is seen as in route_bwd_vectors.cu.
  __device__ bool compute(bool regular) {
    for_vectors([&](int first, auto count) { score_vectors<count()>(first); });
    const float lane_exponentials = join_columns(exponentials);
    regular = regular && magnitude <= math::moderate_limit(kScore) && lane_exponentials < 1e37f;
    if (!__all_sync(kAllLanes, regular)) return false;
    exponential_sum = warp_sum(lane_exponentials);
    inverse = math::reciprocal(exponential_sum);
    share = kSoftmax ? inverse : math::reciprocal(warp_sum(join_columns(sums)));
    mean = share * warp_sum(join_columns(dots));
    __syncwarp();
    return true;
  }

  __device__ float score_of(int e) const { return kSoftmax ? scores[e] * inverse : scores[e]; }

  // The gradient of an expert without what its slot adds; u is its exponential.
  template <bool kOfLogsumexp>
  __device__ float gradient(float s, float slope, float of_share, float u) const {
    float sum = s * share * (of_share - mean);
    if (!kSoftmax) sum *= slope;
    if (kOfLogsumexp) sum = math::fma(u, factor, sum);
    if (kSoftmax && rest != 0.0f) sum = math::fma(-(s * inverse), rest, sum);
    return sum;
  }

  template <int kCount, bool kOfLogsumexp>
  __device__ void write_vectors(int first) const {
    constexpr bool kRecompute = kOfLogsumexp && !kSoftmax;
    Raw raw[kCount];
    float4 cotangents[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (kRecompute) raw[j] = load(first, j);
      cotangents[j] = load_cotangents(first, j);
    }
    char* to = a.grad_logits + (t * a.experts + first) * item_bytes(dtype);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float4 s = *reinterpret_cast<const float4*>(scores + first + j * kColumns);
      float4 slope = s, u = s;
      if (!kSoftmax) slope = *reinterpret_cast<const float4*>(slopes + first + j * kColumns);
      if (kRecompute) {
        float z[kAdjacent];
        unpack(dtype, raw[j], z);
        u = make_float4(math::exp_moderate(z[0]), math::exp_moderate(z[1]),
                        math::exp_moderate(z[2]), math::exp_moderate(z[3]));
      }
      const float grad[] = {gradient<kOfLogsumexp>(s.x, slope.x, cotangents[j].x, u.x),
                            gradient<kOfLogsumexp>(s.y, slope.y, cotangents[j].y, u.y),
                            gradient<kOfLogsumexp>(s.z, slope.z, cotangents[j].z, u.z),
                            gradient<kOfLogsumexp>(s.w, slope.w, cotangents[j].w, u.w)};
      if (kRows == Rows::kBFloat16) {
        const float all = (grad[0] + grad[1]) + (grad[2] + grad[3]);  // NaN if one is
        store_bfloat16s(all == all, grad, to, j * kColumns);
      } else {
        store_four(dtype, grad, to, 0, j * kColumns, end(first), !kAny || a.whole_vectors);
      }
    }
  }

  // Pass 2.
  __device__ void write() const {
    if (of_logsumexp) {
      for_vectors([&](int first, auto count) { write_vectors<count(), true>(first); });
    } else {
      for_vectors([&](int first, auto count) { write_vectors<count(), false>(first); });
    }
    __syncwarp();  // before the slots' elements are written again
  }

  __device__ void write_slot(int id, float own) const {
    float u = scores[id], slope = 1.0f;
    if (!kSoftmax) {
      slope = slopes[id];
      if (of_logsumexp) u = math::exp_moderate(a.row(t)(id));
    }
    const float rest_of = of_logsumexp ? gradient<true>(scores[id], slope, g[id], u)
                                       : gradient<false>(scores[id], slope, g[id], u);
    store(dtype, rest_of + (kSoftmax ? own : own * slope), a.grad_logits, t * a.experts + id);
  }
};

__host__ __device__ int64_t words_for(int64_t experts, int64_t top_k) {
  return 2 * ((experts + kAdjacent - 1) / kAdjacent * kAdjacent) +
         (top_k + kAdjacent - 1) / kAdjacent * kAdjacent;
}

// kFloat32, kBFloat16: whole vectors of cotangents too.
template <Score kScore, Rows kRows>
__global__ void __launch_bounds__(kWarps* kLanes, kBlocks)
    route_bwd_rows(const __grid_constant__ RouteBwd a) {
  constexpr bool kSoftmax = kScore == Score::kSoftmax;
  extern __shared__ __align__(16) float shared_memory[];
  const DType dtype = dtype_of<kRows>(a);
  const int experts = a.experts, top_k = a.top_k, lane = lane_id();
  const int padded = (experts + kAdjacent - 1) / kAdjacent * kAdjacent;
  float* scores = shared_memory + warp_id() * words_for(experts, top_k);
  float* slopes = scores + padded;
  const int64_t row_bytes = experts * item_bytes(dtype), stride = grid_warps();
  const int64_t first_token = a.range.first(), last = a.range.last();
  int64_t sequence = 0, end_of_sequence = -1;
  for (int64_t t = grid_warp(); t < last; t += stride) {
    if (t + stride < last) {
      const int64_t next = t + stride, slot = next * top_k;
      prefetch(a.logits + next * row_bytes, row_bytes);
      prefetch(a.indices + slot, top_k * sizeof(int32_t));
      prefetch(a.grad_weights + slot, top_k * sizeof(float));
    }
    if (a.mask && !a.mask[t]) {
      for (int e = lane; e < experts; e += kLanes)
        store(dtype, 0.0f, a.grad_logits, t * experts + e);
      continue;
    }
    if (t >= end_of_sequence) {
      sequence = (first_token + t) / a.range.sequence_length;
      end_of_sequence = (sequence + 1) * a.range.sequence_length - first_token;
    }

    const int32_t* ids = a.indices + t * top_k;
    const float* grads = a.grad_weights + t * top_k;
    const auto is_used = [=](int32_t id) { return id >= 0 && id < experts; };
    // Atomic, for lanes with one id write to one place: which of them stays is all the same.
    for (int k = lane; k < top_k; k += kLanes) {
      if (is_used(ids[k])) atomicExch(reinterpret_cast<int*>(scores + ids[k]), k);
    }
    __syncwarp();
    bool different = true;
    for (int k = lane; k < top_k; k += kLanes) {
      if (is_used(ids[k]))
        different = different && math::bits_of(scores[ids[k]]) == static_cast<uint32_t>(k);
    }
    __syncwarp();

    ModerateRow<kScore, kRows> row{.a = a,
                                   .dtype = dtype,
                                   .t = t,
                                   .g = a.grad_score_sums + sequence * experts,
                                   .scores = scores,
                                   .slopes = slopes};
    if (!row.compute(different)) {
      __syncwarp();
      Row any{.score = kScore, .experts = experts, .z = a.row(t), .s = scores};
      route_bwd_token(a, t, sequence, any, slopes, slopes + padded);
      continue;
    }
    const auto score = [&](int32_t id) { return is_used(id) ? row.score_of(id) : 0.0f; };
    Divisor divisor{1.0f, 0.0f, 1.0f};
    if (a.options.normalize) {
      const float sum = lane_sum(top_k, [&](int64_t k) { return score(ids[k]); });
      divisor = math::weight_divisor(true, a.options.eps_mode, sum, a.options.eps);
    }
    const auto weight = [&](int32_t id) {
      if (!is_used(id)) return 0.0f;
      return a.options.normalize ? score(id) / divisor.value : score(id);
    };
    const auto cotangent = [&](int64_t k) {
      return is_used(ids[k]) ? grads[k] * a.options.scale : 0.0f;
    };
    const float common = lane_sum(top_k, [&](int64_t k) { return weight(ids[k]) * cotangent(k); });
    if (a.grad_logsumexp_sq[sequence] != 0.0f) {
      const float softmax_factor =
          math::square_slope(math::log(row.exponential_sum), a.grad_logsumexp_sq[sequence]);
      row.of_logsumexp = softmax_factor != 0.0f;
      row.factor = row.inverse * softmax_factor;
    }
    row.rest = kSoftmax ? divisor.rest * common : 0.0f;
    row.write();
    for (int k = lane; k < top_k; k += kLanes) {
      if (!is_used(ids[k])) continue;
      row.write_slot(ids[k], weight(ids[k]) * (cotangent(k) - divisor.own * common));
    }
    __syncwarp();
  }
  for (int64_t t = last + grid_warp(); t < a.range.tokens; t += stride) {  // padding of the slice
    for (int e = lane; e < experts; e += kLanes) store(dtype, 0.0f, a.grad_logits, t * experts + e);
  }
}

template <Score kScore>
auto kernel_for(Rows rows) {
  return rows == Rows::kFloat32    ? route_bwd_rows<kScore, Rows::kFloat32>
         : rows == Rows::kBFloat16 ? route_bwd_rows<kScore, Rows::kBFloat16>
                                   : route_bwd_rows<kScore, Rows::kAny>;
}

Status launch_route_bwd_rows(Queue& queue, const RouteBwd& a) {
  if (a.range.tokens == 0) return queue.status();
  const Rows rows = !a.whole_vectors || !a.whole_cotangents || a.dtype == DType::kFloat16
                        ? Rows::kAny
                    : a.dtype == DType::kFloat32 ? Rows::kFloat32
                                                 : Rows::kBFloat16;
  const auto kernel = a.options.score == Score::kSoftmax   ? kernel_for<Score::kSoftmax>(rows)
                      : a.options.score == Score::kSigmoid ? kernel_for<Score::kSigmoid>(rows)
                                                           : kernel_for<Score::kSqrtSoftplus>(rows);
  const int64_t limit = static_cast<int64_t>(queue.shared_limit());
  const auto bytes = [&](int warps) { return kWordBytes * warps * words_for(a.experts, a.top_k); };
  int warps = kWarps;
  while (warps > 1 && bytes(warps) > limit) warps /= 2;
  if (queue.status().ok() && bytes(warps) > limit)
    return row_too_long(a.experts, bytes(warps), limit);
  queue.allow_shared(kernel, limit);
  // A block takes 1 KB more, and a multiprocessor has 1 KB more than its largest block may ask for.
  const int64_t resident = std::clamp<int64_t>((limit + 1024) / (bytes(warps) + 1024), 1, kBlocks);
  const int64_t blocks =
      std::min(ceil_div(a.range.tokens, warps), resident * queue.multiprocessors());
  queue.launch(kernel, blocks, warps * kLanes, bytes(warps), a);
  return queue.status();
}

DUOMOE_KERNEL(kCuda, route_bwd) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), top_k = call.axis('K');
  const TensorView &mask = call.in("token_mask"), &logits = call.in("logits"),
                   &grad_logits = call.out("grad_logits"),
                   &grad_score_sums = call.in("grad_score_sums");
  const RouteBwd a{
      .options = options_of(call),
      .range = range_of(call),
      .experts = static_cast<int>(experts),
      .top_k = static_cast<int>(top_k),
      .dtype = logits.dtype,
      .whole_vectors = whole_vectors(logits.data, logits.dtype, experts) &&
                       whole_vectors(grad_logits.data, logits.dtype, experts),
      .whole_cotangents = whole_vectors(grad_score_sums.data, DType::kFloat32, experts),
      .logits = logits.as<const char>(),
      .indices = call.in("indices").as<const int32_t>(),
      .mask = mask.present() ? mask.as<const uint8_t>() : nullptr,
      .grad_weights = call.in("grad_weights").as<const float>(),
      .grad_score_sums = grad_score_sums.as<const float>(),
      .grad_logsumexp_sq = call.in("grad_logsumexp_sq").as<const float>(),
      .grad_logits = grad_logits.as<char>()};
  Queue queue(call);
  if (launch_route_bwd_lanes(queue, a) || launch_route_bwd_vectors(queue, a)) return queue.status();
  return launch_route_bwd_rows(queue, a);
}

}  // namespace
}  // namespace duomoe::cuda
