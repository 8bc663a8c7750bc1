// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// One warp routes one token, its row in shared memory. One block sums the statistics of one chunk
// of tokens: stream j of math/router.h is added up by one warp, then the block joins the streams
// and a second kernel the chunks, all in the order of the CPU kernel, so that the bits are the
// same.
#include "launch.h"
#include "warp.h"

namespace duomoe::cuda {
namespace {

using math::Counts;
using math::Divisor;
using math::EpsMode;
using math::kStreams;
using math::Normalize;
using math::Score;
using math::SelectOn;

// The options that both directions share.
struct RouterOptions {
  Score score;
  EpsMode eps_mode;
  bool normalize;
  float eps, scale;
};

RouterOptions options_of(const Call& call) {
  const auto normalize = call.choice<Normalize>("normalize");
  return {.score = call.choice<Score>("score"),
          .eps_mode = call.choice<EpsMode>("eps_mode"),
          .normalize = normalize == Normalize::kAlways ||
                       (normalize == Normalize::kIfKGreater1 && call.axis('K') > 1),
          .eps = static_cast<float>(call.real("eps")),
          .scale = static_cast<float>(call.real("scale"))};
}

// Where the local tokens stand in the whole batch, which is cut into sequences of equal length.
// Under sharding a call sees a slice that starts at `*first_token`, known to the device alone;
// tokens past `total` are padding of the slice.
struct TokenRange {
  const int32_t* first_token;  // null: 0
  int64_t tokens, total, sequence_length;

  __device__ int64_t first() const { return first_token && *first_token > 0 ? *first_token : 0; }
  __device__ int64_t first_sequence() const { return first() > 0 ? first() / sequence_length : 0; }
  // One past the last local token that is not padding.
  __device__ int64_t last() const {
    const int64_t last = total - first();
    return last < 0 ? 0 : last < tokens ? last : tokens;
  }
};

TokenRange range_of(const Call& call) {
  const TensorView& start = call.in("first_token");
  const int64_t total = start.present() ? call.integer("total_tokens") : call.axis('T');
  return {.first_token = start.present() ? start.as<const int32_t>() : nullptr,
          .tokens = call.axis('T'),
          .total = total,
          .sequence_length = total / call.axis('S')};
}

// The local tokens [begin, end) of one sequence; empty if begin >= end.
struct Run {
  int64_t sequence, begin, end;
};
// Run i of the slice: that of the i-th sequence from the slice's first token on.
__device__ Run run_of(const TokenRange& range, int64_t i) {
  const int64_t sequence = range.first_sequence() + i, first = range.first(), last = range.last();
  const int64_t begin = sequence * range.sequence_length - first;
  const int64_t end = begin + range.sequence_length;
  return {sequence, begin > 0 ? begin : 0, end < last ? end : last};
}

// One token's row, held by a warp: lane l computes experts l, l + 32, ...
struct Row {
  Score score;
  int experts;
  float* z;  // [E] logits
  float* s;  // [E] scores; for softmax they are the probabilities P too
  float peak = 0, inverse = 0, logsumexp = 0;
  float top = 0,
        probability_inverse =
            0;  // P = s * it, or relative to the largest score's log scale `top`; not for softmax

  template <typename T>
  __device__ void compute(const T* logits) {
    float largest = -math::infinity();
    for (int e = lane_id(); e < experts; e += kLanes) {
      z[e] = math::to_float(logits[e]);
      largest = z[e] > largest ? z[e] : largest;
    }
    peak = warp_max(largest);
    for (int e = lane_id(); e < experts; e += kLanes) s[e] = math::exp(z[e] - peak);
    const float sum = lane_sum(experts, [&](int64_t e) { return s[e]; });
    inverse = 1.0f / sum;
    logsumexp = peak + math::log(sum);
    if (score == Score::kSoftmax) {
      for (int e = lane_id(); e < experts; e += kLanes) s[e] *= inverse;
    } else {
      for (int e = lane_id(); e < experts; e += kLanes) s[e] = math::elementwise_score(score, z[e]);
      top = math::log_scale(score, peak, peak);
      probability_inverse =
          1.0f / lane_sum(experts, [&](int64_t e) { return unscaled_probability(e); });
    }
    __syncwarp();
  }

  __device__ float unscaled_probability(int64_t e) const {
    if (top >= math::kRescueBelow) return s[e];
    return math::exp(math::log_scale(score, z[e], peak) - top) * math::score_factor(score, z[e]);
  }

  // P: the softmax of z, or s / sum of s.
  __device__ float probability(int64_t e) const {
    return score == Score::kSoftmax ? s[e] : unscaled_probability(e) * probability_inverse;
  }
};

// The weights of a token's slots before `scale`; an id outside [0, E) is an unused slot with weight
// 0.
struct SlotWeights {
  const Row& row;
  bool normalize;
  math::WeightBasis basis;
  Divisor divisor;

  __device__ SlotWeights(const RouterOptions& options, const Row& r, const int32_t* ids, int top_k)
      : row(r), normalize(options.normalize) {
    float top_logit = -math::infinity();
    for (int k = lane_id(); k < top_k; k += kLanes) {
      if (used(ids[k]) && row.z[ids[k]] > top_logit) top_logit = row.z[ids[k]];
    }
    basis = math::weight_basis(row.score, normalize, options.eps, warp_max(top_logit), row.peak);
    const float sum = lane_sum(top_k, [&](int64_t k) { return before_division(ids[k]); });
    divisor = math::weight_divisor(normalize, options.eps_mode, basis.damped(sum), options.eps);
  }

  __device__ bool used(int32_t id) const { return id >= 0 && id < row.experts; }

  __device__ float before_division(int32_t id) const {
    return used(id) ? basis.score(row.score, row.z[id], row.s[id], row.inverse) : 0.0f;
  }

  __device__ float operator()(int32_t id) const {
    const float weight = before_division(id);
    return normalize && used(id) ? weight * basis.damp / divisor.value * basis.damp : weight;
  }
};

// --- selection ---------------------------------------------------------------------------------

// In a list of candidates 0 is one that is out; others are order_key + 1 (the largest key is that
// of +inf).
constexpr uint32_t kOut = 0;

// One number whose order is (key descending, id ascending) from large to small.
__device__ uint64_t composite(uint32_t key, int64_t id) {
  return (static_cast<uint64_t>(key) << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ int32_t id_of(uint64_t composite) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(composite));
}

// The best of [begin, end) among those that come after `previous`.
__device__ uint64_t next_best(const uint32_t* keys, int begin, int end, uint64_t previous) {
  uint64_t best = 0;
  for (int i = begin + lane_id(); i < end; i += kLanes) {
    const uint64_t candidate = composite(keys[i], i);
    if (candidate < previous && candidate > best) best = candidate;
  }
  return warp_max(best);
}
constexpr uint64_t kFromTheStart = ~uint64_t{0};

// take(k, id) for the K best, on all lanes.
template <typename F>
__device__ void select(const uint32_t* keys, int experts, int top_k, F take) {
  uint64_t last = kFromTheStart;
  for (int k = 0; k < top_k; ++k) {
    last = next_best(keys, 0, experts, last);
    take(k, id_of(last));
  }
}

struct Groups {
  int count, kept, score_k;
  __host__ __device__ bool all_stay() const { return count == 1 || kept == count; }
};

// Takes the experts of all groups but the best out. A group's value is the sum of its best
// `score_k` values, largest first. `group_keys` has room for one key per group.
template <typename F>
__device__ void keep_best_groups(const Groups& groups, int experts, F value, uint32_t* keys,
                                 uint32_t* group_keys) {
  const int size = experts / groups.count;
  for (int g = 0; g < groups.count; ++g) {
    uint64_t last = next_best(keys, g * size, (g + 1) * size, kFromTheStart);
    float sum = value(id_of(last));
    for (int i = 1; i < groups.score_k; ++i) {
      last = next_best(keys, g * size, (g + 1) * size, last);
      sum += value(id_of(last));
    }
    if (lane_id() == 0) group_keys[g] = math::order_key(sum) + 1;
  }
  __syncwarp();
  uint64_t worst_kept = kFromTheStart;
  for (int i = 0; i < groups.kept; ++i)
    worst_kept = next_best(group_keys, 0, groups.count, worst_kept);
  for (int e = lane_id(); e < experts; e += kLanes) {
    if (composite(group_keys[e / size], e / size) < worst_kept) keys[e] = kOut;
  }
  __syncwarp();
}

// --- forward -----------------------------------------------------------------------------------

constexpr int kMaxWarps = 8;
constexpr int64_t kWordBytes = sizeof(float);

struct Route {
  RouterOptions options;
  TokenRange range;
  int experts, top_k;
  bool on_logit;
  Groups groups;
  const void* logits;
  const float* bias;  // may be null, as the next two
  const int32_t* given;
  const uint8_t* mask;
  int32_t* indices;
  float* weights;
  int32_t* expert_counts;
  int32_t* sequence_counts;
  int32_t* num_tokens;
  bool separate_loss_counts = false;  // the loss counts another selection than the routing's
  int64_t chunk_length = 0, chunks_per_run = 0;
  // [chunks][E + 1] and [chunks][kStreams][E + 1]: sums of P per expert, then of logsumexp^2. The
  // streams are in shared memory if there is room (null).
  float* partials = nullptr;
  float* streams = nullptr;

  __host__ __device__ int64_t columns() const { return static_cast<int64_t>(experts) + 1; }
  __host__ __device__ int64_t words_per_warp() const {
    return 3 * static_cast<int64_t>(experts) + (groups.all_stay() ? 0 : groups.count);
  }
};

// Routes local token t of sequence s and adds its P to `sums`. Returns logsumexp^2.
template <typename T>
__device__ float route_token(const Route& a, int64_t t, int64_t s, Row& row, uint32_t* keys,
                             uint32_t* group_keys, float* sums) {
  row.compute(static_cast<const T*>(a.logits) + t * a.experts);
  int32_t* ids = a.indices + t * a.top_k;  // slot k is written and read by lane k % 32
  float* weights = a.weights + t * a.top_k;
  const auto write_keys = [&](const float* bias) {
    const auto value = [&row, on_logit = a.on_logit, bias](int e) {
      return math::selection_value(row.z[e], on_logit ? row.z[e] : row.s[e], bias ? bias[e] : 0.0f);
    };
    for (int e = lane_id(); e < a.experts; e += kLanes) keys[e] = math::order_key(value(e)) + 1;
    __syncwarp();
    return value;
  };

  if (a.given) {
    for (int k = lane_id(); k < a.top_k; k += kLanes) {
      const int32_t e = a.given[t * a.top_k + k];
      ids[k] = e >= 0 && e < a.experts ? e : -1;
    }
  } else {
    const auto value = write_keys(a.bias);
    if (!a.groups.all_stay()) keep_best_groups(a.groups, a.experts, value, keys, group_keys);
    select(keys, a.experts, a.top_k, [&](int k, int32_t id) {
      if (k % kLanes == lane_id()) ids[k] = id;
    });
  }

  const SlotWeights weight(a.options, row, ids, a.top_k);
  for (int k = lane_id(); k < a.top_k; k += kLanes) {
    weights[k] = weight(ids[k]) * a.options.scale;
    if (ids[k] < 0) continue;
    atomicAdd(a.expert_counts + ids[k], 1);
    if (!a.separate_loss_counts) atomicAdd(a.sequence_counts + s * a.experts + ids[k], 1);
  }
  if (a.separate_loss_counts) {
    __syncwarp();  // all have read the keys of the first selection
    write_keys(nullptr);
    select(keys, a.experts, a.top_k, [&](int k, int32_t id) {
      if (k % kLanes == lane_id()) atomicAdd(a.sequence_counts + s * a.experts + id, 1);
    });
  }
  for (int e = lane_id(); e < a.experts; e += kLanes) sums[e] += row.probability(e);
  return row.logsumexp * row.logsumexp;
}

// One block per chunk of a run; warp w sums the streams w, w + warps, ...
template <typename T>
__global__ void __launch_bounds__(kMaxWarps* kLanes) route_chunks(const Route a) {
  extern __shared__ float shared_memory[];
  const int64_t chunk = blockIdx.x, columns = a.columns();
  const Run run = run_of(a.range, chunk / a.chunks_per_run);
  const int64_t begin = run.begin + chunk % a.chunks_per_run * a.chunk_length;
  const int64_t end = begin + a.chunk_length < run.end ? begin + a.chunk_length : run.end;
  if (begin >= end) return;

  float* mine = shared_memory + warp_id() * a.words_per_warp();
  Row row{.score = a.options.score, .experts = a.experts, .z = mine, .s = mine + a.experts};
  uint32_t* keys = reinterpret_cast<uint32_t*>(mine + 2 * a.experts);
  uint32_t* group_keys = keys + a.experts;
  float* streams = a.streams ? a.streams + chunk * kStreams * columns
                             : shared_memory + warps_per_block() * a.words_per_warp();

  int32_t tokens = 0;
  for (int j = warp_id(); j < kStreams; j += warps_per_block()) {
    float* sums = streams + j * columns;
    for (int e = lane_id(); e < a.experts; e += kLanes) sums[e] = 0.0f;
    float logsumexp_sq = 0.0f;
    for (int64_t t = begin + j; t < end; t += kStreams) {
      if (a.mask && !a.mask[t]) {
        for (int k = lane_id(); k < a.top_k; k += kLanes) {
          a.indices[t * a.top_k + k] = -1;
          a.weights[t * a.top_k + k] = 0.0f;
        }
        continue;
      }
      logsumexp_sq += route_token<T>(a, t, run.sequence, row, keys, group_keys, sums);
      ++tokens;
      __syncwarp();  // all have read the row
    }
    if (lane_id() == 0) sums[a.experts] = logsumexp_sq;
  }
  if (lane_id() == 0 && tokens) atomicAdd(a.num_tokens + run.sequence, tokens);

  __syncthreads();
  for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    float sum = 0.0f;
    for (int j = 0; j < kStreams; ++j) sum += streams[j * columns + c];
    a.partials[chunk * columns + c] = sum;
  }
}

// One thread per sequence and column: the sum over the sequence's chunks, in order.
__global__ void join_chunks(const Route a, int64_t sequences, int64_t runs, float* score_sums,
                            float* logsumexp_sq) {
  const int64_t columns = a.columns();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < sequences * columns; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t s = i / columns, column = i % columns, at = s - a.range.first_sequence();
    float sum = 0.0f;
    if (at >= 0 && at < runs) {
      const Run run = run_of(a.range, at);
      const float* partial = a.partials + at * a.chunks_per_run * columns + column;
      for (int64_t begin = run.begin; begin < run.end; begin += a.chunk_length, partial += columns)
        sum += *partial;
    }
    if (column < a.experts) {
      score_sums[s * a.experts + column] = sum;
    } else {
      logsumexp_sq[s] = sum;
    }
  }
}

// The slots of the slice's padding tokens.
__global__ void fill_padding(TokenRange range, int64_t top_k, int32_t* indices, float* weights) {
  const int64_t begin = range.last() * top_k, end = range.tokens * top_k;
  for (int64_t i = begin + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < end;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    indices[i] = -1;
    weights[i] = 0.0f;
  }
}

Status row_too_long(int64_t experts, int64_t bytes, size_t limit) {
  return {std::to_string(experts) + " experts need " + std::to_string(bytes) +
          " bytes of shared memory for one token, and a block of this GPU has at most " +
          std::to_string(limit)};
}

constexpr int kThreads = 256;

DUOMOE_KERNEL(kCuda, route) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), sequences = call.axis('S');
  const TensorView &bias = call.in("bias"), &given = call.in("given_indices"),
                   &mask = call.in("token_mask");
  const int64_t groups = call.integer("num_groups");
  Route a{.options = options_of(call),
          .range = range_of(call),
          .experts = static_cast<int>(experts),
          .top_k = static_cast<int>(call.axis('K')),
          .on_logit = call.choice<SelectOn>("select_on") == SelectOn::kLogit,
          .groups = {.count = static_cast<int>(groups),
                     .kept = static_cast<int>(call.integer("group_top_k")),
                     .score_k = static_cast<int>(
                         std::min(call.integer("group_score_k"), experts / groups))},
          .logits = call.in("logits").data,
          .bias = bias.present() ? bias.as<const float>() : nullptr,
          .given = given.present() ? given.as<const int32_t>() : nullptr,
          .mask = mask.present() ? mask.as<const uint8_t>() : nullptr,
          .indices = call.out("indices").as<int32_t>(),
          .weights = call.out("weights").as<float>(),
          .expert_counts = call.out("expert_counts").as<int32_t>(),
          .sequence_counts = call.out("sequence_counts").as<int32_t>(),
          .num_tokens = call.out("num_tokens").as<int32_t>()};
  const bool plain = !a.given && !a.bias && a.groups.all_stay();
  a.separate_loss_counts = call.choice<Counts>("counts") == Counts::kUnbiased && !plain;

  Queue queue(call);
  for (const char* name :
       {"expert_counts", "sequence_counts", "score_sums", "logsumexp_sq", "num_tokens"}) {
    queue.fill(call.out(name), 0);
  }
  if (call.in("first_token").present()) {
    queue.launch(fill_padding, grid_for(tokens * a.top_k, kThreads), kThreads, 0, a.range,
                 static_cast<int64_t>(a.top_k), a.indices, a.weights);
  }
  if (tokens == 0 || a.range.total == 0) return queue.status();

  // As many warps as have room beside the streams; without room for the streams, as many as have
  // room.
  const size_t limit = queue.shared_limit();
  const auto bytes = [&](int warps, bool with_streams) {
    return kWordBytes * (warps * a.words_per_warp() + (with_streams ? kStreams * a.columns() : 0));
  };
  const auto fits = [&](int warps, bool with_streams) {
    return bytes(warps, with_streams) <= static_cast<int64_t>(limit);
  };
  const bool shared_streams = fits(1, true);
  int warps = kMaxWarps;
  while (warps > 1 && !fits(warps, shared_streams)) warps /= 2;
  if (queue.status().ok() && !fits(warps, shared_streams))
    return row_too_long(experts, bytes(1, false), limit);

  const int64_t length = a.range.sequence_length;
  const int64_t runs =
      a.range.first_token ? std::min(sequences, ceil_div(tokens, length) + 1) : sequences;
  a.chunk_length = math::chunk_length(length);
  a.chunks_per_run = ceil_div(std::min(length, tokens), a.chunk_length);
  const int64_t chunks = runs * a.chunks_per_run;
  a.partials = queue.scratch<float>(chunks * a.columns());
  if (!shared_streams) a.streams = queue.scratch<float>(chunks * kStreams * a.columns());
  with_type(call.in("logits").dtype, [&]<typename T>(T) {
    queue.allow_shared(route_chunks<T>, limit);
    queue.launch(route_chunks<T>, chunks, warps * kLanes, bytes(warps, shared_streams), a);
  });
  queue.launch(join_chunks, grid_for(sequences * a.columns(), kThreads), kThreads, 0, a, sequences,
               runs, call.out("score_sums").as<float>(), call.out("logsumexp_sq").as<float>());
  return queue.status();
}

// --- backward ----------------------------------------------------------------------------------

struct RouteBwd {
  RouterOptions options;
  TokenRange range;
  int experts, top_k;
  const void* logits;
  const int32_t* indices;
  const uint8_t* mask;  // may be null
  const float* grad_weights;
  const float* grad_score_sums;
  const float* grad_logsumexp_sq;
  void* grad_logits;

  __host__ __device__ int64_t words_per_warp() const {
    return 3 * static_cast<int64_t>(experts) + top_k;
  }
};

// One warp per token.
template <typename T>
__global__ void __launch_bounds__(kMaxWarps* kLanes) route_bwd_tokens(const RouteBwd a) {
  extern __shared__ float shared_memory[];
  const int64_t t = grid_warp();
  if (t >= a.range.tokens) return;
  T* result = static_cast<T*>(a.grad_logits) + t * a.experts;
  const int64_t position = a.range.first() + t;
  if (position < 0 || position >= a.range.total || (a.mask && !a.mask[t])) {
    for (int e = lane_id(); e < a.experts; e += kLanes) result[e] = math::from_float<T>(0.0f);
    return;
  }
  float* mine = shared_memory + warp_id() * a.words_per_warp();
  Row row{.score = a.options.score, .experts = a.experts, .z = mine, .s = mine + a.experts};
  float* grad = mine + 2 * a.experts;     // [E]
  float* of_slot = mine + 3 * a.experts;  // [K] what each slot adds to its expert
  row.compute(static_cast<const T*>(a.logits) + t * a.experts);

  const int32_t* ids = a.indices + t * a.top_k;
  const SlotWeights weight(a.options, row, ids, a.top_k);
  const auto cotangent = [&](int64_t k) {
    return weight.used(ids[k]) ? a.grad_weights[t * a.top_k + k] * a.options.scale : 0.0f;
  };
  const float common = lane_sum(a.top_k, [&](int64_t k) { return weight(ids[k]) * cotangent(k); });
  for (int k = lane_id(); k < a.top_k; k += kLanes) {
    if (!weight.used(ids[k])) continue;
    const float own = weight(ids[k]) * (cotangent(k) - weight.divisor.own * common);
    of_slot[k] = own * math::log_score_slope(row.score, row.z[ids[k]]);
  }

  // The part that every expert gets: P_e (gP_e - sum P gP) slope_e + softmax_e * softmax_factor -
  // s_e * rest.
  const int64_t s = position / a.range.sequence_length;
  const float grad_square = a.grad_logsumexp_sq[s];
  const float softmax_factor = grad_square != 0.0f ? 2.0f * row.logsumexp * grad_square : 0.0f;
  const float rest = row.score == Score::kSoftmax ? weight.divisor.rest * common : 0.0f;
  const float* grad_probabilities = a.grad_score_sums + s * a.experts;
  for (int e = lane_id(); e < a.experts; e += kLanes) grad[e] = row.probability(e);
  const float mean =
      lane_sum(a.experts, [&](int64_t e) { return grad[e] * grad_probabilities[e]; });
  for (int e = lane_id(); e < a.experts; e += kLanes) {
    float sum =
        grad[e] * (grad_probabilities[e] - mean) * math::log_score_slope(row.score, row.z[e]);
    if (softmax_factor != 0.0f)
      sum = math::fma(math::exp(row.z[e] - row.peak) * row.inverse, softmax_factor, sum);
    if (rest != 0.0f) sum = math::fma(-row.s[e], rest, sum);
    grad[e] = sum;
  }
  __syncwarp();
  for (int k = 0; k < a.top_k; ++k) {  // in slot order, since an id may come twice
    const int32_t e = ids[k];
    if (weight.used(e) && e % kLanes == lane_id()) grad[e] += of_slot[k];
  }
  for (int e = lane_id(); e < a.experts; e += kLanes) result[e] = math::from_float<T>(grad[e]);
}

DUOMOE_KERNEL(kCuda, route_bwd) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E');
  const TensorView& mask = call.in("token_mask");
  const RouteBwd a{.options = options_of(call),
                   .range = range_of(call),
                   .experts = static_cast<int>(experts),
                   .top_k = static_cast<int>(call.axis('K')),
                   .logits = call.in("logits").data,
                   .indices = call.in("indices").as<const int32_t>(),
                   .mask = mask.present() ? mask.as<const uint8_t>() : nullptr,
                   .grad_weights = call.in("grad_weights").as<const float>(),
                   .grad_score_sums = call.in("grad_score_sums").as<const float>(),
                   .grad_logsumexp_sq = call.in("grad_logsumexp_sq").as<const float>(),
                   .grad_logits = call.out("grad_logits").data};
  if (tokens == 0) return {};
  Queue queue(call);
  const size_t limit = queue.shared_limit();
  const auto bytes = [&](int warps) { return kWordBytes * warps * a.words_per_warp(); };
  int warps = kMaxWarps;
  while (warps > 1 && bytes(warps) > static_cast<int64_t>(limit)) warps /= 2;
  if (queue.status().ok() && bytes(warps) > static_cast<int64_t>(limit))
    return row_too_long(experts, bytes(1), limit);
  with_type(call.in("logits").dtype, [&]<typename T>(T) {
    queue.allow_shared(route_bwd_tokens<T>, limit);
    queue.launch(route_bwd_tokens<T>, ceil_div(tokens, warps), warps * kLanes, bytes(warps), a);
  });
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
