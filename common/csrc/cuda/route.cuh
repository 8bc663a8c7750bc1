// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of `route` share. One block sums the statistics of one chunk of tokens
// (math/router.h); a second kernel, in route.cu, joins the chunks. The first of these that fits the
// call does the routing:
//   route_cluster.cu  E <= 8, K <= 8, one sequence of at most 8192 tokens: joins the chunks too
//   route_lanes.cu    E <= 64, K <= 8: 1 to 8 lanes a token
//   route_pairs.cu    E = 128, 256 or 384, K <= 16, no rare option: a warp two tokens at a time
//   route_vectors.cu  E <= 384, K <= 16: a warp a token, its row in registers
//   route_rows.cu     any other: a warp a token, its row in shared memory
// All have a short way for the rows that occur in training and leave the others, row by row, to
// route_token: rows that are not moderate, selections with too many candidates, rare options.
#pragma once

#include "route_row.cuh"
#include "select.cuh"

namespace duomoe::cuda {

// A chunk's results: [E] sums of P, the sum of logsumexp^2, the number of tokens; from a multiple
// of eight words on [E] counts of slots and, where the loss counts another selection, [E] counts of
// that.
struct Partials {
  uint32_t* words;
  int experts;
  int64_t stride;  // words of a chunk, a multiple of eight

  static __host__ __device__ int64_t whole_sectors(int64_t words) { return (words + 7) / 8 * 8; }
  static int64_t stride_of(int64_t experts, int64_t count_words) {
    return whole_sectors(whole_sectors(experts + 2) + count_words);
  }
  __host__ __device__ int64_t counts_at() const { return whole_sectors(experts + 2); }
  __device__ float* sums(int64_t chunk) const {
    return reinterpret_cast<float*>(words + chunk * stride);
  }
  __device__ float* logsumexp_sq(int64_t chunk) const { return sums(chunk) + experts; }
  __device__ int32_t* tokens(int64_t chunk) const {
    return reinterpret_cast<int32_t*>(words + chunk * stride + experts + 1);
  }
  __device__ int32_t* counts(int64_t chunk) const {
    return reinterpret_cast<int32_t*>(words + chunk * stride + counts_at());
  }
};

struct Route {
  RouterOptions options;
  SumDivisor divisor;
  TokenRange range;
  int experts, top_k;
  bool on_logit;
  Groups groups;
  DType dtype;
  bool whole_vectors;  // of the logits
  const char* logits;
  const float* bias;  // may be null, as the next two
  const int32_t* given;
  const uint8_t* mask;
  int32_t* indices;
  float* weights;
  int32_t* expert_counts;
  bool separate_loss_counts;  // the loss counts another selection than the routing's
  bool clear_expert_counts;   // several sequences add to them
  int64_t chunk_length, chunks_per_run;
  bool one_run;  // all tokens are of one sequence
  Partials partials;
  float* streams;  // [chunks][kStreams][E as whole vectors], if needs_streams

  __device__ Logits row(int64_t t) const {
    return {dtype, logits + t * experts * item_bytes(dtype)};
  }
  __host__ __device__ int count_words() const {
    return separate_loss_counts ? 2 * experts : experts;
  }
};

// The results per sequence.
struct Join {
  int64_t runs, sequences;
  float* score_sums;
  float* logsumexp_sq;
  int32_t* num_tokens;
  int32_t* sequence_counts;
};

// The chunk of a block.
struct Chunk {
  int64_t begin, end;
};
__device__ inline Chunk chunk_of(const Route& a, int64_t chunk) {
  if (a.one_run) {
    const int64_t begin = chunk * a.chunk_length, end = begin + a.chunk_length;
    return {begin, end < a.range.tokens ? end : a.range.tokens};
  }
  const Run run = run_of(a.range, chunk / a.chunks_per_run);
  const int64_t begin = run.begin + chunk % a.chunks_per_run * a.chunk_length;
  const int64_t end = begin + a.chunk_length < run.end ? begin + a.chunk_length : run.end;
  return {begin, end};
}

__device__ inline void clear_expert_counts(const Route& a) {
  if (!a.clear_expert_counts || blockIdx.x != 0) return;
  for (int e = static_cast<int>(threadIdx.x); e < a.experts; e += static_cast<int>(blockDim.x))
    a.expert_counts[e] = 0;
}

// For the lanes k < K <= 32: the slots of a token without a part in anything.
__device__ inline void leave_slots_unused(const Route& a, int64_t t) {
  for (int k = lane_id(); k < a.top_k; k += kLanes) {
    a.indices[t * a.top_k + k] = -1;
    a.weights[t * a.top_k + k] = 0.0f;
  }
}

__device__ inline int32_t given_id(const Route& a, int64_t slot) {
  const int32_t e = a.given[slot];
  return e >= 0 && e < a.experts ? e : -1;
}

// Routes token t whatever its row and the options. `row` is ready for compute() and ends with P =
// row.s * row.share; counts[e] and loss_counts[e] go up by the token's slots. `group_keys` has room
// for one key per group.
inline __device__ __noinline__ void route_token(const Route& a, int64_t t, Row& row,
                                                uint32_t* group_keys, int32_t* counts,
                                                int32_t* loss_counts) {
  row.compute();
  int32_t* ids = a.indices + t * a.top_k;  // slot k is written and read by lane k % 32
  float* weights = a.weights + t * a.top_k;
  if (a.given) {
    for (int k = lane_id(); k < a.top_k; k += kLanes) ids[k] = given_id(a, t * a.top_k + k);
  } else {
    const SelectionValue value{.row = row, .on_logit = a.on_logit, .bias = a.bias};
    const auto take = [&](int k, int32_t id) {
      if (k % kLanes == lane_id()) ids[k] = id;
    };
    const auto key = [&](int e) { return math::order_key(value(e)) + 1; };
    if (a.groups.all_stay()) {
      select(key, a.experts, a.top_k, take);
    } else {
      const uint64_t worst = worst_kept_group(a.groups, a.experts, value, group_keys);
      const int size = a.experts / a.groups.count;
      select(
          [&](int e) { return composite(group_keys[e / size], e / size) < worst ? kOut : key(e); },
          a.experts, a.top_k, take);
    }
  }
  const SlotWeights weight(a.options, row, ids, a.top_k);
  for (int k = lane_id(); k < a.top_k; k += kLanes) {
    weights[k] = ids[k] >= 0 ? weight(ids[k]) * a.options.scale : 0.0f;
    if (ids[k] >= 0) atomicAdd(counts + ids[k], 1);
  }
  if (a.separate_loss_counts) {
    const SelectionValue value{.row = row, .on_logit = a.on_logit, .bias = nullptr};
    select([&](int e) { return math::order_key(value(e)) + 1; }, a.experts, a.top_k,
           [&](int k, int32_t id) {
             if (k % kLanes == lane_id()) atomicAdd(loss_counts + id, 1);
           });
  }
  __syncwarp();  // all have read the row and the group keys
  for (int e = lane_id(); e < a.experts; e += kLanes) row.s[e] = row.unscaled_probability(e);
  __syncwarp();
}

// The weight of a slot of a moderate row: `score` is the slot's, 0 where it has no expert, `sum`
// that of all slots. Lanes without an expert divide something that is no trouble.
__device__ inline float divided_weight(const Route& a, float score, float sum) {
  const float divisor = a.divisor(sum);
  const bool used = score > 0.0f;
  return used ? score / (used ? divisor : 1.0f) * a.options.scale : 0.0f;
}
// For K <= 32 and slot k in lane k.
__device__ inline float slot_weight(const Route& a, float score) {
  return divided_weight(a, score, warp_sum(score));
}

// The sum of logsumexp^2 over a stream's tokens, of which lanes hold the sums of exponentials until
// a logarithm serves 31 tokens or 32.
class LogSumExps {
 public:
  __device__ void add(float exponential_sum) {
    if (lane_id() == held_) mine_ = exponential_sum;
    if (++held_ >= kLanes - 1) flush();
  }
  // Of the first `count` of two tokens.
  __device__ void add(const float (&exponential_sums)[2], int count) {
    const int place = lane_id() - held_;
    if (place == 0) mine_ = exponential_sums[0];
    if (place == 1) mine_ = exponential_sums[1];
    held_ += count;
    if (held_ >= kLanes - 1) flush();
  }
  __device__ void add_ready(float logsumexp) {
    if (lane_id() == held_) mine_ = logsumexp;
    ready_ |= 1u << held_;
    if (++held_ >= kLanes - 1) flush();
  }
  __device__ float sum_of_squares() {
    flush();
    return sum_;
  }
  __device__ int32_t count() const { return count_; }

 private:
  __device__ void flush() {
    sum_ = sum_and_squares(sum_, mine_, ready_, held_);
    count_ += held_;
    held_ = 0;
    ready_ = 0;
  }
  // Out of line, lest the loop over tokens become long.
  static __device__ __noinline__ float sum_and_squares(float sum, float mine, unsigned ready,
                                                       int held) {
    const float value = ready >> lane_id() & 1 ? mine : math::log(mine);
    for (int first = 0; first < held; first += 4) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = __shfl_sync(kAllLanes, value, first + i);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = first + i < held ? math::fma(four[i], four[i], sum) : sum;
    }
    return sum;
  }

  int held_ = 0;
  int32_t count_ = 0;
  unsigned ready_ = 0;
  float mine_ = 1.0f, sum_ = 0.0f;
};

// The chunk's results, by all threads of the block; stream(j, e) is stream j's sum of P of expert
// e.
template <typename F>
__device__ void write_partials(const Route& a, const int32_t* counts, bool copy_counts,
                               const float* stream_logsumexp_sq, const int32_t* stream_tokens,
                               F stream) {
  const int experts = a.experts, threads = static_cast<int>(blockDim.x);
  float* sums = a.partials.sums(blockIdx.x);
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) sum += stream(j, e);
    sums[e] = sum;
  }
  if (copy_counts) {
    int32_t* to = a.partials.counts(blockIdx.x);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < a.count_words(); i += threads)
      to[i] = counts[i];
  }
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    int32_t tokens = 0;
    for (int j = 0; j < kStreams; ++j) {
      sum += stream_logsumexp_sq[j];
      tokens += stream_tokens[j];
    }
    *a.partials.logsumexp_sq(blockIdx.x) = sum;
    *a.partials.tokens(blockIdx.x) = tokens;
  }
}

// Whether the streams' sums of a chunk may lack room in the shared memory of some GPU, for
// route_rows.cu, and so need the workspace. `count_words`: of Route; `group_keys`: groups of which
// some leave, or 0.
bool needs_streams(int64_t experts, int64_t count_words, int64_t group_keys);

// The kernels; each routes all chunks. Threads and shared memory are chosen by the launching
// functions, which return false where the kernel does not fit the call.
// launch_route_cluster leaves nothing to join.
bool launch_route_cluster(Queue& queue, const Route& route, const Join& join);
bool launch_route_lanes(Queue& queue, const Route& route, int64_t chunks);
bool launch_route_vectors(Queue& queue, const Route& route, int64_t chunks);
Status launch_route_rows(Queue& queue, const Route& route, int64_t chunks);

}  // namespace duomoe::cuda
