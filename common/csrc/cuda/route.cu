// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "route.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = 256;

// Columns that one block of join_chunks reads: a sector of memory of each chunk, in many small
// blocks, since one multiprocessor reads few bytes a cycle.
constexpr int kColumnsOfBlock = 8;

// A strand's chunks that are read at once; a call has about kChunks.
constexpr int kBatch = math::kChunks / math::kStrands;

// What a block of join_chunks adds up.
enum class Sum { kStatistics, kCounts, kLossCounts };
__host__ __device__ inline unsigned kinds_of_sums(const Route& a) {
  return a.separate_loss_counts ? 3 : 2;
}

// One block joins kColumnsOfBlock columns of one sequence: strand i of math/router.h is added up by
// the threads of row i. The statistics are those of P, in E columns, and logsumexp^2; the counts
// those of slots, in E columns, and the tokens.
__global__ void __launch_bounds__(kColumnsOfBlock* math::kStrands)
    join_chunks(const __grid_constant__ Route a, const Join to) {
  __shared__ uint32_t strands[math::kStrands][kColumnsOfBlock];
  const int experts = a.experts, column = static_cast<int>(threadIdx.x) % kColumnsOfBlock;
  const int strand = static_cast<int>(threadIdx.x) / kColumnsOfBlock;
  const unsigned kinds = kinds_of_sums(a), block = blockIdx.x / kinds;
  const Sum kind = static_cast<Sum>(blockIdx.x % kinds);
  int64_t s = 0;
  int e = static_cast<int>(block) * kColumnsOfBlock + column;
  if (to.sequences > 1) {
    const unsigned groups = static_cast<unsigned>(experts + kColumnsOfBlock) / kColumnsOfBlock;
    s = block / groups;
    e = static_cast<int>(block % groups) * kColumnsOfBlock + column;
  }
  int64_t at = s;
  int chunks = to.runs > 0 ? static_cast<int>(a.chunks_per_run) : 0;
  if (a.range.first_token && to.runs > 0) {
    at = s - a.range.first_sequence();
    chunks = 0;
    if (at >= 0 && at < to.runs) {
      const Run run = run_of(a.range, at);
      if (run.begin < run.end)
        chunks = static_cast<int>((run.end - run.begin + a.chunk_length - 1) / a.chunk_length);
    }
  }

  // Sums of floats or of integers.
  const bool floats = kind == Sum::kStatistics;
  const auto add = [floats](uint32_t x, uint32_t y) {
    return floats ? math::bits_of(math::float_of(x) + math::float_of(y)) : x + y;
  };
  uint32_t sum = 0;
  if (e < experts || (e == experts && kind != Sum::kLossCounts)) {
    const Partials& from = a.partials;
    const int64_t step = math::kStrands * from.stride;
    const uint32_t* words = from.words + (at * a.chunks_per_run + strand) * from.stride + e;
    if (kind != Sum::kStatistics) words += e < experts ? from.counts_at() : 1;
    if (kind == Sum::kLossCounts) words += experts;
#pragma unroll 1
    for (int left = (chunks - strand + math::kStrands - 1) / math::kStrands; left > 0;
         left -= kBatch) {
      uint32_t part[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        part[j] = j < left ? *words : 0;
        words += step;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) sum = add(sum, part[j]);
    }
  }
  strands[strand][column] = sum;
  __syncthreads();
  if (strand != 0 || e > experts) return;
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < math::kStrands; ++i) all = add(all, strands[i][column]);
  const auto count = static_cast<int32_t>(all);
  switch (kind) {
    case Sum::kStatistics:
      (e < experts ? to.score_sums[s * experts + e] : to.logsumexp_sq[s]) = math::float_of(all);
      break;
    case Sum::kCounts:
      if (e == experts) {
        to.num_tokens[s] = count;
        break;
      }
      if (!a.separate_loss_counts) to.sequence_counts[s * experts + e] = count;
      if (!a.clear_expert_counts) {
        a.expert_counts[e] = count;
      } else if (count) {
        atomicAdd(a.expert_counts + e, count);
      }
      break;
    case Sum::kLossCounts:
      if (e < experts) to.sequence_counts[s * experts + e] = count;
      break;
  }
}

void launch_join(Queue& queue, const Route& a, const Join& join) {
  queue.launch(join_chunks,
               join.sequences * ceil_div(a.experts + 1, kColumnsOfBlock) * kinds_of_sums(a),
               kColumnsOfBlock * math::kStrands, 0, a, join);
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

// The memory of a call, in words, from shapes and options alone.
struct Plan {
  int64_t experts, chunk_length, runs, chunks_per_run, stride;
  bool separate_loss_counts, streams;

  explicit Plan(const Call& call) {
    const int64_t tokens = call.axis('T'), sequences = call.axis('S');
    const int64_t groups = call.integer("num_groups");
    const bool all_stay = groups == 1 || call.integer("group_top_k") == groups;
    const bool plain =
        !call.in("given_indices").present() && !call.in("bias").present() && all_stay;
    experts = call.axis('E');
    separate_loss_counts = call.choice<Counts>("counts") == Counts::kUnbiased && !plain;
    const bool slice = call.in("first_token").present();
    const int64_t total = slice ? call.integer("total_tokens") : tokens;
    const int64_t length = total / sequences;
    chunk_length = math::chunk_length(tokens);
    runs = tokens == 0 || length == 0 ? 0
           : slice                    ? std::min(sequences, ceil_div(tokens, length) + 1)
                                      : sequences;
    chunks_per_run = runs == 0 ? 0 : ceil_div(std::min(length, tokens), chunk_length);
    stride = Partials::stride_of(experts, (1 + separate_loss_counts) * experts);
    streams = needs_streams(experts, (1 + separate_loss_counts) * experts, all_stay ? 0 : groups);
  }

  int64_t chunks() const { return runs * chunks_per_run; }
  int64_t partial_words() const { return chunks() * stride; }
  int64_t stream_words() const {
    return streams ? chunks() * math::kStreams * ceil_div(experts, kAdjacent) * kAdjacent : 0;
  }
};

DUOMOE_WORKSPACE(kCuda, route) {
  const Plan plan(call);
  return piece_bytes<uint32_t>(plan.partial_words()) + piece_bytes<float>(plan.stream_words());
}

DUOMOE_KERNEL(kCuda, route) {
  const Plan plan(call);
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), sequences = call.axis('S');
  const TensorView &logits = call.in("logits"), &bias = call.in("bias"),
                   &given = call.in("given_indices"), &mask = call.in("token_mask");
  const int64_t groups = call.integer("num_groups"), chunks = plan.chunks();
  Queue queue(call);
  const RouterOptions options = options_of(call);
  Route a{.options = options,
          .divisor = SumDivisor(options),
          .range = range_of(call),
          .experts = static_cast<int>(experts),
          .top_k = static_cast<int>(call.axis('K')),
          .on_logit = call.choice<SelectOn>("select_on") == SelectOn::kLogit,
          .groups = {.count = static_cast<int>(groups),
                     .kept = static_cast<int>(call.integer("group_top_k")),
                     .score_k = static_cast<int>(
                         std::min(call.integer("group_score_k"), experts / groups))},
          .dtype = logits.dtype,
          .whole_vectors = whole_vectors(logits.data, logits.dtype, experts),
          .logits = logits.as<const char>(),
          .bias = bias.present() ? bias.as<const float>() : nullptr,
          .given = given.present() ? given.as<const int32_t>() : nullptr,
          .mask = mask.present() ? mask.as<const uint8_t>() : nullptr,
          .indices = call.out("indices").as<int32_t>(),
          .weights = call.out("weights").as<float>(),
          .expert_counts = call.out("expert_counts").as<int32_t>(),
          .separate_loss_counts = plan.separate_loss_counts,
          .clear_expert_counts = sequences > 1,
          .chunk_length = plan.chunk_length,
          .chunks_per_run = std::max<int64_t>(1, plan.chunks_per_run),
          .one_run = sequences == 1 && !call.in("first_token").present(),
          .partials = {.words = queue.scratch<uint32_t>(plan.partial_words()),
                       .experts = static_cast<int>(experts),
                       .stride = plan.stride},
          .streams = queue.scratch<float>(plan.stream_words())};

  if (call.in("first_token").present()) {
    queue.launch(fill_padding, grid_for(tokens * a.top_k, kThreads), kThreads, 0, a.range,
                 static_cast<int64_t>(a.top_k), a.indices, a.weights);
  }
  const Join join{.runs = plan.runs,
                  .sequences = sequences,
                  .score_sums = call.out("score_sums").as<float>(),
                  .logsumexp_sq = call.out("logsumexp_sq").as<float>(),
                  .num_tokens = call.out("num_tokens").as<int32_t>(),
                  .sequence_counts = call.out("sequence_counts").as<int32_t>()};
  if (launch_route_cluster(queue, a, join)) return queue.status();
  if (chunks == 0) {
    queue.fill(call.out("expert_counts"), 0);
  } else if (!launch_route_lanes(queue, a, chunks) && !launch_route_vectors(queue, a, chunks)) {
    if (Status status = launch_route_rows(queue, a, chunks); !status.ok()) return status;
  }
  launch_join(queue, a, join);
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
