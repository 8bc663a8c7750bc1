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
#include "row_streams.cuh"

namespace duomoe::cuda::rows {

constexpr int kStepVectors = 2;  // of a lane, in work side by side
constexpr int kStep = kStepVectors * kColumns;

// kAny: rows of any type and alignment, and blocks whose sums or counts are in the workspace. The
// others are whole vectors, with all that a block keeps in shared memory.
enum class Input { kFloat32, kBFloat16, kAny };

// Of a logit; kAny: not used.
template <Input kInput>
constexpr int kBytes = kInput == Input::kFloat32 ? 4 : 2;

// Whether Warp::find_rarely has the candidates.
inline bool is_rare(const Route& a) {
  return a.on_logit || a.separate_loss_counts || a.given ||
         (a.options.score == Score::kSoftmax && a.bias);
}

// Four scores in one copy of the code.
static __device__ __noinline__ float4 sqrt_softplus_four(float4 z) {
  const auto score = [](float x) { return math::elementwise_score(Score::kSqrtSoftplus, x); };
  return make_float4(score(z.x), score(z.y), score(z.z), score(z.w));
}

// step(e, kVectors, kWhole) for the lane's vectors of a row: kVectors of them together, of which e
// is the first expert and the others follow at a distance of kColumns; only where kWhole holds is a
// vector's last expert surely there.
template <typename F>
__device__ void for_vectors(int experts, F step) {
  int e = kAdjacent * lane_id();
#pragma unroll 1
  for (; e - kAdjacent * lane_id() + kStep <= experts; e += kStep)
    step(e, std::integral_constant<int, kStepVectors>{}, std::true_type{});
#pragma unroll 1
  for (; e < experts; e += kColumns) step(e, std::integral_constant<int, 1>{}, std::false_type{});
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
  __device__ void start_copy(const char* logits) const {
    if constexpr (!kAny) {
      constexpr int kTogether = 4, kBytes = rows::kBytes<kInput>;
      int e = kAdjacent * lane_id();
      float* to = row + e;
      const char* from = logits + e * kBytes;
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

  // Puts the scores in the row; the columns' sums, and the largest of what a row is chosen by, if
  // that is the score. Softmax: of exponentials, without the bias. False if the lane has a number
  // that is not moderate.
  __device__ bool compute_scores(int64_t t, Columns& exponentials, Columns& scores,
                                 Columns& maxima) const {
    float magnitude = 0.0f;
    for_vectors(a.experts, [&](int e, auto vectors, auto whole) {
      constexpr int kVectors = decltype(vectors)::value;
      float z[kVectors][kAdjacent], b[kVectors][kAdjacent], s[kVectors][kAdjacent];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        load_logits<true>(t, e + v * kColumns, z[v]);
        if (!kSoftmax) load_bias(e + v * kColumns, b[v]);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = e + v * kColumns;
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
    return magnitude <= math::moderate_limit(kScore);
  }

  // What an expert is chosen by.
  template <bool kOnLogit>
  static __device__ float value_of(float z, float s, float b, float inverse, float bias_factor) {
    return math::fma(b, bias_factor, kOnLogit ? z : kSoftmax ? s * inverse : s);
  }
  __device__ float score_of(int e, float inverse) const {
    return kSoftmax ? row[e] * inverse : row[e];
  }
  template <bool kOnLogit>
  __device__ float value(int64_t t, int e, float inverse, float bias_factor) const {
    const float b = kAny && !bias ? 0.0f : bias[e];
    return value_of<kOnLogit>(kOnLogit ? a.row(t)(e) : 0.0f, row[e], b, inverse, bias_factor);
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

  // Adds `share` times the row to the sums.
  __device__ void add_row(float share) const {
    const float *from = row + kAdjacent * lane_id(), *end = row + a.experts;
    float* to = sums + kAdjacent * lane_id();
    const auto add = [&](auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      float s[kVectors][kAdjacent], sum[kVectors][kAdjacent];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        load_four(from + v * kColumns, s[v]);
        load_four(to + v * kColumns, sum[v]);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kAdjacent; ++i) sum[v][i] = math::fma(s[v][i], share, sum[v][i]);
        *reinterpret_cast<float4*>(to + v * kColumns) =
            make_float4(sum[v][0], sum[v][1], sum[v][2], sum[v][3]);
      }
      from += kVectors * kColumns;
      to += kVectors * kColumns;
    };
#pragma unroll 1
    while (from + kColumns < end) add(std::integral_constant<int, 2>{});
    if (from < end) add(std::integral_constant<int, 1>{});
  }

  // Puts the ids of the values that reach `bound` in found.ids, of experts `first`, first + stride
  // and so on: the first of them at `place`, if that is not negative, the others at places that are
  // claimed. Those beyond the room are only counted.
  template <bool kOnLogit, typename Stride>
  __device__ void scan(int64_t t, float inverse, float bias_factor, float bound, int first,
                       Stride stride, int place) const {
    constexpr int kBits = 32, kTogether = 4;
#pragma unroll 1
    for (int begin = first; begin < a.experts; begin += kBits * stride) {
      const int end = min(begin + kBits * stride, a.experts);
      unsigned mask = 0;  // the lowest bit for the last
      int e = begin;
#pragma unroll 1
      for (; e + (kTogether - 1) * stride < end; e += kTogether * stride) {
        float v[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
          v[j] = value<kOnLogit>(t, e + j * stride, inverse, bias_factor);
        mask <<= kTogether;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (v[j] >= bound) mask |= 1u << (kTogether - 1 - j);
        }
      }
#pragma unroll 1
      for (; e < end; e += stride)
        mask = mask << 1 | (value<kOnLogit>(t, e, inverse, bias_factor) >= bound ? 1u : 0u);
#pragma unroll 1
      for (; mask != 0; mask &= mask - 1) {
        if (place < 0) place = atomicAdd(&found.claimed, 1);
        if (place < Found::kRoom) found.ids[place] = e - __ffs(static_cast<int>(mask)) * stride;
        place = -1;
      }
    }
  }

  // Puts the ids of the values that reach `bound` in found.ids and returns their number, which may
  // be more than there is room for. A column has such values if its maximum is one.
  template <bool kOnLogit>
  __device__ int gather(int64_t t, float inverse, float bias_factor, float bound,
                        const Columns& maxima) const {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i) own += maxima[i] >= bound;
    int place = 0;
    if (own != 0) place = atomicAdd(&found.claimed, own);
    uint32_t address = shared_address(found.columns) + kWordBytes * place;
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i)
      append_if_reached(address, maxima[i], bound, kAdjacent * lane_id() + i);
    __syncwarp();
    const int columns = found.claimed;
    __syncwarp();
    // So many are mostly equal.
    if (columns > (a.top_k <= kLanes ? limit() : enough_maxima(a.top_k))) return Found::kRoom + 1;
    // A lane has one of the first 32; of those that are left a lane has a part.
    if (columns > kLanes) {
      if (lane_id() == 0) found.claimed = kLanes;
      __syncwarp();
    }
    if (lane_id() < columns) {
      scan<kOnLogit>(t, inverse, bias_factor, bound, found.columns[lane_id()],
                     std::integral_constant<int, kColumns>{}, lane_id());
    }
#pragma unroll 1
    for (int left = columns - kLanes, next = kLanes; left > 0; left -= kLanes, next += kLanes) {
      const int shift = left <= kLanes / 8   ? 3
                        : left <= kLanes / 4 ? 2
                        : left <= kLanes / 2 ? 1
                                             : 0;
      const int column = lane_id() >> shift, part = lane_id() & ((1 << shift) - 1);
      if (column < left) {
        scan<kOnLogit>(t, inverse, bias_factor, bound,
                       found.columns[next + column] + part * kColumns, kColumns << shift, -1);
      }
    }
    __syncwarp();
    return found.claimed;
  }

  // More candidates than that are too many if others are equal to the K-th value.
  __device__ int limit() const { return a.top_k <= kLanes ? 2 * kLanes : Found::kRoom; }

  // The same where too many values reach `bound`: the ids of those above a bound that K reach, and
  // of the first that are equal to it, K or more together.
  template <bool kOnLogit>
  static __device__ __noinline__ int gather_ties(Warp self, int64_t t, float inverse,
                                                 float bias_factor, float bound) {
    const int experts = self.a.experts, top_k = self.a.top_k;
    const auto values = [&](int e, float* v) {
      float z[kAdjacent] = {}, s[kAdjacent] = {}, b[kAdjacent] = {};
      if (e < experts) {
        if (kOnLogit) self.template load_logits<false>(t, e, z);
        load_four(self.row + e, s);
        self.load_bias(e, b);
      }
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        v[i] = e + i < experts ? value_of<kOnLogit>(z[i], s[i], b[i], inverse, bias_factor)
                               : -math::infinity();
      }
    };
    const auto count = [&](auto counts) {
      int n = 0;
#pragma unroll 1
      for (int e = kAdjacent * lane_id(); e < experts; e += kColumns) {
        float v[kAdjacent];
        values(e, v);
#pragma unroll
        for (int i = 0; i < kAdjacent; ++i) n += counts(v[i]);
      }
      return static_cast<int>(__reduce_add_sync(kAllLanes, n));
    };
    int above = count([&](float v) { return v > bound; });
    if (above > Found::kRoom) {
      // K or more reach `low`, fewer reach `high`.
      int low = key_of(bound), high = key_of(math::infinity());
#pragma unroll 1
      for (unsigned width;
           (width = static_cast<unsigned>(high) - static_cast<unsigned>(low)) > 1;) {
        const int middle = static_cast<int>(low + width / 2);
        const float x = value_of_signed_key(middle);
        const int reach = count([&](float v) { return v >= x; });
        (reach >= top_k ? low : high) = middle;
        if (reach >= top_k && reach <= Found::kRoom) break;
      }
      bound = value_of_signed_key(low);
      above = count([&](float v) { return v > bound; });
    }
    int ties = max(0, top_k - above);
    const unsigned lanes_before = (1u << lane_id()) - 1;
    __syncwarp();
    if (lane_id() == 0) self.found.claimed = 0;
    __syncwarp();
#pragma unroll 1
    for (int begin = 0; begin < experts; begin += kColumns) {
      const int e = begin + kAdjacent * lane_id();
      float v[kAdjacent];
      values(e, v);
      int before = 0, all = 0;
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        const unsigned equal = __ballot_sync(kAllLanes, v[i] == bound);
        before += __popc(equal & lanes_before);
        all += __popc(equal);
      }
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        const bool tie = v[i] == bound;
        if (v[i] > bound || (tie && before < ties))
          self.found.ids[atomicAdd(&self.found.claimed, 1)] = e + i;
        before += tie;
      }
      ties -= min(ties, all);
      if (above == 0 && ties == 0) break;
    }
    __syncwarp();
    return max(above, top_k);
  }

  // The candidates' ids, values and scores; the number of them.
  template <bool kOnLogit>
  __device__ int find(int64_t t, float inverse, float bias_factor, const Columns& maxima) const {
    const bool all_there = a.experts >= kColumns;
    if (lane_id() == 0) found.claimed = 0;
    float bound;
    if (all_there && a.top_k <= kFewTop) {
      bound = bound_of_lanes(maxima, a.top_k, found);
    } else {
      bound = bound_of_maxima(maxima, all_there, a.top_k);
      __syncwarp();
    }
    int count = gather<kOnLogit>(t, inverse, bias_factor, bound, maxima);
    if (count > limit()) count = gather_ties<kOnLogit>(*this, t, inverse, bias_factor, bound);
#pragma unroll 1
    for (int i = lane_id(); i < count; i += kLanes) {
      const int32_t e = found.ids[i];
      found.values[i] = value<kOnLogit>(t, e, inverse, bias_factor);
      found.scores[i] = score_of(e, inverse);
    }
    return count;
  }
  template <bool kOnLogit>
  __device__ int find_all(int64_t t, float inverse, float bias_factor) const {
    Columns maxima;
#pragma unroll
    for (int i = 0; i < kAdjacent; ++i) maxima[i] = -math::infinity();
    find_maxima<kOnLogit>(t, inverse, bias_factor, maxima);
    return find<kOnLogit>(t, inverse, bias_factor, maxima);
  }

  // The same with rare options, where compute_scores has no maxima of what is chosen on; counts the
  // loss's own selection. None: `found` is ready.
  static __device__ __noinline__ int find_rarely(Warp self, int64_t t, float inverse,
                                                 int32_t* loss_counts) {
    const Route& a = self.a;
    Found& found = self.found;
    const auto find = [&](bool on_logit, float bias_factor) {  // of which 0 and 1 are exact
      return on_logit ? self.template find_all<true>(t, inverse, bias_factor)
                      : self.template find_all<false>(t, inverse, bias_factor);
    };
    if (a.separate_loss_counts) {
      const int count = find(a.on_logit, 0.0f);
      rank_found(count, a.top_k, found);
      for (int k = lane_id(); k < a.top_k; k += kLanes)
        atomicAdd(loss_counts + found.ids[found.index_of_best(k)], 1);
      __syncwarp();
    }
    if (!a.given) return find(a.on_logit, 1.0f);
    for (int k = lane_id(); k < a.top_k; k += kLanes) {
      const int32_t id = given_id(a, t * a.top_k + k);
      found.ids[k] = id;
      found.scores[k] = id >= 0 ? self.score_of(id, inverse) : 0.0f;
      found.best[k] = k;
    }
    return 0;
  }
  // One moderate token, whose scores are ready: leaves its slots' experts and scores in `found`.
  // row_done() comes when they no longer need the row.
  template <typename F>
  __device__ void choose(bool rare, int64_t t, float inverse, Columns& maxima, F row_done,
                         int32_t* loss_counts) const {
    int count;
    if (rare) {
      count = find_rarely(*this, t, inverse, loss_counts);
    } else {
#pragma unroll
      for (int i = 0; kSoftmax && i < kAdjacent; ++i) maxima[i] *= inverse;  // which is monotone
      count = find<false>(t, inverse, 1.0f, maxima);
    }
    row_done();
    if (count > 0) rank_found(count, a.top_k, found);
  }

  // The token's slots from `first` on; count(id) for each that is used.
  template <typename F>
  __device__ void write_slots(int64_t first, F count) const {
    const int top_k = a.top_k, slot = lane_id();
    int32_t id[2] = {-1, -1};
    float score[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (slot + i * kLanes >= top_k) break;
      const int best = found.index_of_best(slot + i * kLanes);
      id[i] = found.ids[best];
      score[i] = found.scores[best];
    }
    const float sum = warp_sum(score[0] + score[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = slot + i * kLanes;
      if (i > 0 && top_k <= kLanes) break;
      const float weight = divided_weight(a, score[i], sum);
      if (k >= top_k) break;
      a.indices[first + k] = id[i];
      a.weights[first + k] = weight;
      if (id[i] >= 0) count(id[i]);
    }
  }
};

}  // namespace duomoe::cuda::rows
