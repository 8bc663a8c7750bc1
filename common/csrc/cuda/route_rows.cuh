// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What a warp of route_rows.cu does with a token whose row is in shared memory: scores, selection,
// sums and slots.
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>

#include "rank_many.cuh"
#include "route.cuh"

namespace duomoe::cuda::rows {

constexpr int kStepVectors = 2;  // of a lane, in work side by side
constexpr int kStep = kStepVectors * kColumns;
constexpr int kStepBits = kStepVectors * kAdjacent;
constexpr int kMaskSteps = 32 / kStepBits, kMasks = 3;

// kAny: rows of any type and alignment, and blocks whose sums or counts are in the workspace. The
// others are whole vectors, with all that a block keeps in shared memory.
enum class Input { kFloat32, kBFloat16, kAny };

// Four scores in one copy of the code.
static __device__ __noinline__ float4 sqrt_softplus_four(float4 z) {
  const auto score = [](float x) { return math::elementwise_score(Score::kSqrtSoftplus, x); };
  return make_float4(score(z.x), score(z.y), score(z.z), score(z.w));
}

// step(e, kWhole) for the lane's steps of experts [begin, end): e is the first expert, the others
// follow at a distance of kColumns; only where kWhole holds are all of them below `end`.
template <typename F>
__device__ void for_steps(int begin, int end, F step) {
  const int first = kAdjacent * lane_id();
#pragma unroll 1
  for (; begin + kStep <= end; begin += kStep) step(begin + first, std::true_type{});
  if (begin < end) step(begin + first, std::false_type{});
}

// A warp and what it works with.
template <Score kScore, Input kInput>
struct Warp {
  static constexpr bool kSoftmax = kScore == Score::kSoftmax, kAny = kInput == Input::kAny;

  const Route& a;
  float* row;         // [E] logits as they are in memory, in slots of four words; then scores, or
                      // for softmax exponentials
  float* sums;        // [E] of the stream
  const float* bias;  // [E], 0 without a bias; kAny: may be null
  Found& found;

  // The row's copy in shared memory, which a lane fills for itself.
  __device__ void start_copy(int64_t t) const {
    if constexpr (!kAny) {
      constexpr int kBytes = kInput == Input::kFloat32 ? 4 : 2;
      constexpr int kTogether = 4;
      int e = kAdjacent * lane_id();
      float* to = row + e;
      const char* from = a.logits + (t * a.experts + e) * kBytes;
      const auto copy = [&](int i) {
        __pipeline_memcpy_async(to + i * kColumns, from + i * kColumns * kBytes,
                                kAdjacent * kBytes);
      };
#pragma unroll 1
      for (; e + (kTogether - 1) * kColumns < a.experts; e += kTogether * kColumns) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) copy(i);
        to += kTogether * kColumns;
        from += kTogether * kColumns * kBytes;
      }
#pragma unroll
      for (int i = 0; i < kTogether - 1; ++i) {
        if (e + i * kColumns < a.experts) copy(i);
      }
      __pipeline_commit();
    }
  }
  __device__ void wait_for_copy() const {
    if constexpr (!kAny) __pipeline_wait_prior(0);
  }

  // Four logits; 0 from E on. kCopied: of the copy, before the scores take its place.
  template <bool kCopied>
  __device__ void load_logits(int64_t t, int e, float* z) const {
    if constexpr (kAny) {
      unpack(a.dtype, load_raw(a.dtype, a.logits, t * a.experts, e, a.experts, a.whole_vectors), z);
    } else {
      Raw raw{};
      if constexpr (kCopied) {
        raw = *reinterpret_cast<const uint4*>(row + e);
      } else if constexpr (kInput == Input::kFloat32) {
        raw = *reinterpret_cast<const uint4*>(a.logits + (t * a.experts + e) * 4);
      } else {
        const uint2 half = *reinterpret_cast<const uint2*>(a.logits + (t * a.experts + e) * 2);
        raw = {half.x, half.y, 0, 0};
      }
      unpack(kInput == Input::kFloat32 ? DType::kFloat32 : DType::kBFloat16, raw, z);
    }
  }

  __device__ void load_bias(int e, float* b) const {
    if constexpr (kAny) {
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) b[i] = bias && e + i < a.experts ? bias[e + i] : 0.0f;
    } else {
      load_four(bias + e, b);
    }
  }
  static __device__ void load_four(const float* from, float* x) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  }

  // Whether a step has the experts from e on, and whether expert e + i is one of them.
  template <typename Whole>
  __device__ bool has(Whole, int e) const {
    return Whole::value || e < a.experts;
  }

  // Puts the scores in the row; the columns' sums, and the largest of what a row is chosen by, if
  // that is the score. Softmax: of exponentials, without the bias. False if the row is not
  // moderate.
  __device__ bool compute_scores(int64_t t, Columns& exponentials, Columns& scores,
                                 Columns& maxima) const {
    float magnitude = 0.0f;
    for_steps(0, a.experts, [&](int e, auto whole) {
      float z[kStepVectors][kAdjacent], b[kStepVectors][kAdjacent], s[kStepVectors][kAdjacent];
#pragma unroll
      for (int v = 0; v < kStepVectors; ++v) {
        if (!has(whole, e + v * kColumns)) continue;
        load_logits<true>(t, e + v * kColumns, z[v]);
        if (!kSoftmax) load_bias(e + v * kColumns, b[v]);
      }
#pragma unroll
      for (int v = 0; v < kStepVectors; ++v) {
        const int at = e + v * kColumns;
        if (!has(whole, at)) continue;
        if constexpr (kScore == Score::kSqrtSoftplus) {
          const float4 four = sqrt_softplus_four(make_float4(z[v][0], z[v][1], z[v][2], z[v][3]));
          s[v][0] = four.x, s[v][1] = four.y, s[v][2] = four.z, s[v][3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < kAdjacent; ++i) {
          magnitude = fmaxf(magnitude, fabsf(z[v][i]));
          float u = math::exp_moderate(z[v][i]);
          if constexpr (kSoftmax) s[v][i] = u;
          if constexpr (kScore == Score::kSigmoid)
            s[v][i] = math::moderate_sigmoid(z[v][i], u).value;
          const bool there = !kAny || decltype(whole)::value || at + i < a.experts;
          if (!there) u = s[v][i] = 0.0f;
          exponentials[i] += u;
          if (!kSoftmax) scores[i] += s[v][i];
          if (there) maxima[i] = fmaxf(maxima[i], kSoftmax ? u : s[v][i] + b[v][i]);
        }
        *reinterpret_cast<float4*>(row + at) = make_float4(s[v][0], s[v][1], s[v][2], s[v][3]);
      }
    });
    return __all_sync(kAllLanes, magnitude <= math::moderate_limit(kScore)) != 0;
  }

  // What an expert is chosen by.
  template <bool kOnLogit>
  static __device__ float value_of(float z, float s, float b, float inverse, float bias_factor) {
    return math::fma(b, bias_factor, kOnLogit ? z : kSoftmax ? s * inverse : s);
  }
  __device__ float score_of(int e, float inverse) const {
    return kSoftmax ? row[e] * inverse : row[e];
  }
  __device__ float value(int64_t t, int e, float inverse, float bias_factor) const {
    const float b = kAny && !bias ? 0.0f : bias[e];
    return math::fma(b, bias_factor, a.on_logit ? a.row(t)(e) : score_of(e, inverse));
  }

  template <bool kOnLogit>
  __device__ void find_maxima(int64_t t, float inverse, float bias_factor, Columns& maxima) const {
#pragma unroll 2
    for (int e = kAdjacent * lane_id(); e < a.experts; e += kColumns) {
      float z[kAdjacent] = {}, s[kAdjacent], b[kAdjacent];
      if (kOnLogit) load_logits<false>(t, e, z);
      load_four(row + e, s);
      load_bias(e, b);
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        if (!kAny || e + i < a.experts)
          maxima[i] = fmaxf(maxima[i], value_of<kOnLogit>(z[i], s[i], b[i], inverse, bias_factor));
      }
    }
  }

  // The experts of a lane that reach a bound: in the lowest bits of masks[0] those of the last
  // step, that of expert e, in higher bits and masks those of steps before it.
  struct Hits {
    unsigned masks[kMasks] = {};
    int steps = 0;  // in masks[0]

    __device__ void add(unsigned bits) {
      if (steps == kMaskSteps) {
#pragma unroll
        for (int m = kMasks - 1; m > 0; --m) masks[m] = masks[m - 1];
        masks[0] = steps = 0;
      }
      masks[0] = masks[0] << kStepBits | bits;
      ++steps;
    }
  };

  // Appends them to found.ids, of which `count` are there; those beyond the room are only counted.
  __device__ int gather(const Hits& hits, int e, int count) const {
    int own = 0;
#pragma unroll
    for (int m = 0; m < kMasks; ++m) own += __popc(hits.masks[m]);
    int upto = own;
#pragma unroll
    for (int width = 1; width < kLanes; width *= 2) {
      const int before = __shfl_up_sync(kAllLanes, upto, width);
      if (lane_id() >= width) upto += before;
    }
    int at = count + upto - own;
#pragma unroll
    for (int m = 0; m < kMasks; ++m) {
      if (m > 0) e -= (m == 1 ? hits.steps : kMaskSteps) * kStep;
#pragma unroll 1
      for (unsigned mask = hits.masks[m]; mask != 0; mask &= mask - 1) {
        const int bit = __ffs(static_cast<int>(mask)) - 1;
        const int id = e - (bit >> 3) * kStep + (bit >> 2 & 1) * kColumns + (bit & 3);
        if (at < Found::kRoom) found.ids[at] = id;
        ++at;
      }
    }
    return count + __shfl_sync(kAllLanes, upto, kLanes - 1);
  }
  static_assert(kStepVectors == 2 && kAdjacent == 4);

  // Adds `share` times the row to the sums, and counts and gathers the experts that reach `bound`.
  template <bool kOnLogit>
  __device__ int sweep(int64_t t, float share, float inverse, float bias_factor,
                       float bound) const {
    int count = 0;
#pragma unroll 1
    for (int begin = 0; begin < a.experts; begin += kMasks * kMaskSteps * kStep) {
      const int end = min(begin + kMasks * kMaskSteps * kStep, a.experts);
      Hits hits;
      int last = 0;
      for_steps(begin, end, [&](int e, auto whole) {
        float z[kStepVectors][kAdjacent] = {}, b[kStepVectors][kAdjacent],
              s[kStepVectors][kAdjacent], sum[kStepVectors][kAdjacent];
#pragma unroll
        for (int v = 0; v < kStepVectors; ++v) {
          const int at = e + v * kColumns;
          if (!has(whole, at)) continue;
          load_four(row + at, s[v]);
          load_four(sums + at, sum[v]);
          load_bias(at, b[v]);
          if (kOnLogit) load_logits<false>(t, at, z[v]);
        }
        unsigned bits = 0;
#pragma unroll
        for (int v = 0; v < kStepVectors; ++v) {
          const int at = e + v * kColumns;
          if (!has(whole, at)) continue;
#pragma unroll
          for (int i = 0; i < kAdjacent; ++i) {
            sum[v][i] = math::fma(s[v][i], share, sum[v][i]);
            const bool there = !kAny || decltype(whole)::value || at + i < a.experts;
            if (there &&
                value_of<kOnLogit>(z[v][i], s[v][i], b[v][i], inverse, bias_factor) >= bound)
              bits |= 1u << (v * kAdjacent + i);
          }
          *reinterpret_cast<float4*>(sums + at) =
              make_float4(sum[v][0], sum[v][1], sum[v][2], sum[v][3]);
        }
        last = e;
        hits.add(bits);
      });
      count = gather(hits, last, count);
    }
    return count;
  }

  // Where more experts reach `bound` than there is room for: gathers those that reach a higher one
  // which still K or more reach, or, where too many equal the K-th value, the first of these.
  template <typename F>
  __device__ int gather_fewer(int count, float bound, F value) const {
    const auto reaching = [&](int key) {
      int n = 0;
      for (int e = lane_id(); e < a.experts; e += kLanes) n += key_of(value(e)) >= key;
      return static_cast<int>(__reduce_add_sync(kAllLanes, n));
    };
    int low = key_of(bound), high = key_of(math::infinity());
    for (unsigned width; (width = static_cast<unsigned>(high) - static_cast<unsigned>(low)) > 1;) {
      if (count <= Found::kRoom) break;
      const int middle = static_cast<int>(low + width / 2), n = reaching(middle);
      if (n >= a.top_k) {
        low = middle;
        count = n;
      } else {
        high = middle;
      }
    }
    int ties = count <= Found::kRoom ? count : a.top_k - reaching(low + 1);
    count = 0;
    for (int begin = 0; begin < a.experts; begin += kLanes) {
      const int e = begin + lane_id();
      const int key = e < a.experts ? key_of(value(e)) : INT_MIN;
      const unsigned equal = __ballot_sync(kAllLanes, key == low);
      const unsigned before = (1u << lane_id()) - 1;
      const bool taken = key > low || (key == low && __popc(equal & before) < ties);
      const unsigned all = __ballot_sync(kAllLanes, taken);
      if (taken) found.ids[count + __popc(all & before)] = e;
      count += __popc(all);
      ties -= min(ties, __popc(equal));
    }
    return count;
  }

  // One moderate token, whose scores are ready: adds it to the sums, and leaves its slots' experts
  // and scores in `found`. row_done() comes when the row is no longer needed; count_loss(id) for
  // each expert of the loss's own selection.
  template <typename F, typename G>
  __device__ void choose(int64_t t, float share, float inverse, Columns& maxima, F row_done,
                         G count_loss) const {
    const int top_k = a.top_k;
    const bool have_maxima = !a.on_logit && !a.separate_loss_counts && !(kSoftmax && a.bias);
#pragma unroll
    for (int i = 0; kSoftmax && i < kAdjacent; ++i) maxima[i] *= inverse;  // which is monotone
#pragma unroll 1
    for (int loss = a.separate_loss_counts; loss >= 0; --loss) {
      const bool given = a.given && !loss, on_logit = a.on_logit && !given;
      const float bias_factor = loss ? 0.0f : 1.0f;  // exact, as are the shares 0 that are added
      if (!have_maxima && !given) {
#pragma unroll
        for (int i = 0; i < kAdjacent; ++i) maxima[i] = -math::infinity();
        if (on_logit) {
          find_maxima<true>(t, inverse, bias_factor, maxima);
        } else {
          find_maxima<false>(t, inverse, bias_factor, maxima);
        }
      }
      float bound = math::infinity();
      if (!given) {
        const bool all_there = a.experts >= kColumns;
        bound = all_there && top_k <= kFewTop ? bound_of_lanes(maxima, top_k, found)
                                              : bound_of_maxima(maxima, all_there, top_k);
      }
      const float part = loss ? 0.0f : share;
      int count = on_logit ? sweep<true>(t, part, inverse, bias_factor, bound)
                           : sweep<false>(t, part, inverse, bias_factor, bound);
      const auto own_value = [&](int e) { return value(t, e, inverse, bias_factor); };
      if (count > Found::kRoom) count = gather_fewer(count, bound, own_value);
      __syncwarp();
      if (given) {
        for (int k = lane_id(); k < top_k; k += kLanes) {
          const int32_t id = given_id(a, t * top_k + k);
          found.ids[k] = id;
          found.scores[k] = id >= 0 ? score_of(id, inverse) : 0.0f;
          found.best[k] = k;
        }
      } else {
#pragma unroll 1
        for (int i = lane_id(); i < count; i += kLanes) {
          const int32_t e = found.ids[i];
          found.values[i] = own_value(e);
          found.scores[i] = score_of(e, inverse);
        }
      }
      __syncwarp();
      if (!loss) row_done();
      if (!given) rank_found(count, top_k, found);
      if (loss) {
        for (int k = lane_id(); k < top_k; k += kLanes) count_loss(found.ids[found.best[k]]);
        __syncwarp();
      }
    }
  }

  // The token's slots; count(id) for each that is used.
  template <typename F>
  __device__ void write_slots(int64_t t, F count) const {
    const int top_k = a.top_k, slot = lane_id();
    int32_t id[2] = {-1, -1};
    float score[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (slot + i * kLanes >= top_k) break;
      const int best = found.best[slot + i * kLanes];
      id[i] = found.ids[best];
      score[i] = found.scores[best];
    }
    float sum = score[0] + score[1];
#pragma unroll
    for (int width = kLanes / 2; width > 0; width /= 2) {
      if (width < top_k) sum += __shfl_xor_sync(kAllLanes, sum, width);  // the others are 0
    }
    const Divisor divisor =
        math::weight_divisor(a.options.normalize, a.options.eps_mode, sum, a.options.eps);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = slot + i * kLanes;
      if (i > 0 && top_k <= kLanes) break;
      const bool used = k < top_k && id[i] >= 0;
      // 1: a division of 0 takes a long way.
      float weight = used ? score[i] : 1.0f;
      if (a.options.normalize) weight = weight / divisor.value;
      if (k >= top_k) break;
      a.indices[t * top_k + k] = id[i];
      a.weights[t * top_k + k] = used ? weight * a.options.scale : 0.0f;
      if (used) count(id[i]);
    }
  }
};

}  // namespace duomoe::cuda::rows
