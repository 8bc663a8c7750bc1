// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// One warp routes one token. One block sums the statistics of one chunk of tokens: stream j of
// math/router.h is added up by one warp, then the block joins the streams and a second kernel the
// chunks, all in the order of the CPU kernel, so that the bits are the same.
#include "route_row.cuh"
#include "select.cuh"

namespace duomoe::cuda {
namespace {

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

  if (a.given) {
    for (int k = lane_id(); k < a.top_k; k += kLanes) {
      const int32_t e = a.given[t * a.top_k + k];
      ids[k] = e >= 0 && e < a.experts ? e : -1;
    }
  } else {
    const SelectionValue value{.row = row, .on_logit = a.on_logit, .bias = a.bias};
    write_keys(a.experts, value, keys);
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
    write_keys(a.experts, SelectionValue{.row = row, .on_logit = a.on_logit, .bias = nullptr},
               keys);
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

}  // namespace
}  // namespace duomoe::cuda
