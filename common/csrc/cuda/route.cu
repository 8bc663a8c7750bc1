// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "route.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = 256;

// One block joins kJoinColumns columns of one sequence: strand i of math/router.h is added up by
// the threads of row i.
constexpr int kJoinColumns = kLanes;
constexpr int kUnrolled = 8;

struct Join {
  int64_t runs;
  float* score_sums;
  float* logsumexp_sq;
  int32_t* num_tokens;
  int32_t* sequence_counts;
};

__global__ void __launch_bounds__(kJoinColumns* math::kStrands)
    join_chunks(const __grid_constant__ Route a, const Join to) {
  __shared__ float sums[math::kStrands][kJoinColumns];
  __shared__ int32_t counts[math::kStrands][kJoinColumns];
  __shared__ int32_t loss_counts[math::kStrands][kJoinColumns];
  const int experts = a.experts, column = static_cast<int>(threadIdx.x) % kJoinColumns;
  const int strand = static_cast<int>(threadIdx.x) / kJoinColumns;
  const int groups = (experts + kJoinColumns) / kJoinColumns;  // of E + 1 columns
  const int64_t s = blockIdx.x / groups;
  const int e = static_cast<int>(blockIdx.x % groups) * kJoinColumns + column;
  const int64_t at = s - a.range.first_sequence();
  int64_t chunks = 0;
  if (at >= 0 && at < to.runs) {
    const Run run = run_of(a.range, at);
    if (run.begin < run.end) chunks = (run.end - run.begin + a.chunk_length - 1) / a.chunk_length;
  }
  const int64_t first = at * a.chunks_per_run;

  float sum = 0.0f;
  int32_t count = 0, loss_count = 0;
  if (e <= experts) {
    // The last column is logsumexp^2, whose counts are those of the tokens.
    const auto value = [&](int64_t chunk) { return a.partials.sums(chunk)[e]; };
    const int32_t* first_counts = e < experts ? a.partials.counts(0, experts) + e
                                              : a.partials.tokens(0, experts);
    for (int64_t i = strand; i < chunks; i += kUnrolled * math::kStrands) {
      float part[kUnrolled];
      int32_t part_count[kUnrolled], part_loss_count[kUnrolled];
#pragma unroll
      for (int j = 0; j < kUnrolled; ++j) {
        const int64_t chunk = first + i + j * math::kStrands;
        const bool there = i + j * math::kStrands < chunks;
        const int32_t* own_counts = first_counts + chunk * a.partials.stride;
        part[j] = there ? value(chunk) : 0.0f;
        part_count[j] = there ? *own_counts : 0;
        part_loss_count[j] =
            there && a.separate_loss_counts && e < experts ? own_counts[experts] : 0;
      }
#pragma unroll
      for (int j = 0; j < kUnrolled; ++j) {
        sum += part[j];
        count += part_count[j];
        loss_count += part_loss_count[j];
      }
    }
  }
  sums[strand][column] = sum;
  counts[strand][column] = count;
  loss_counts[strand][column] = loss_count;
  __syncthreads();
  if (strand != 0 || e > experts) return;
  sum = 0.0f;
  count = loss_count = 0;
#pragma unroll
  for (int i = 0; i < math::kStrands; ++i) {
    sum += sums[i][column];
    count += counts[i][column];
    loss_count += loss_counts[i][column];
  }
  if (e == experts) {
    to.logsumexp_sq[s] = sum;
    to.num_tokens[s] = count;
    return;
  }
  to.score_sums[s * experts + e] = sum;
  to.sequence_counts[s * experts + e] = a.separate_loss_counts ? loss_count : count;
  if (a.clear_expert_counts) {
    if (count) atomicAdd(a.expert_counts + e, count);
  } else {
    a.expert_counts[e] = count;
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

// The memory of a call, in words, from shapes and options alone.
struct Plan {
  int64_t experts, chunk_length, runs, chunks_per_run, stride;
  bool separate_loss_counts;

  explicit Plan(const Call& call) {
    const int64_t tokens = call.axis('T'), sequences = call.axis('S');
    const int64_t groups = call.integer("num_groups");
    const bool plain = !call.in("given_indices").present() && !call.in("bias").present() &&
                       (groups == 1 || call.integer("group_top_k") == groups);
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
    stride = (2 + separate_loss_counts) * experts + 2;
  }

  int64_t chunks() const { return runs * chunks_per_run; }
  int64_t partial_words() const { return chunks() * stride; }
  int64_t stream_words() const {
    return needs_streams(experts)
               ? chunks() * math::kStreams * ceil_div(experts, kAdjacent) * kAdjacent
               : 0;
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
  Route a{.options = options_of(call),
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
          .partials = {.words = queue.scratch<uint32_t>(plan.partial_words()), .stride = plan.stride},
          .streams = queue.scratch<float>(plan.stream_words())};

  if (call.in("first_token").present()) {
    queue.launch(fill_padding, grid_for(tokens * a.top_k, kThreads), kThreads, 0, a.range,
                 static_cast<int64_t>(a.top_k), a.indices, a.weights);
  }
  if (chunks == 0) {
    queue.fill(call.out("expert_counts"), 0);
  } else if (!launch_route_lanes(queue, a, chunks) && !launch_route_vectors(queue, a, chunks)) {
    if (Status status = launch_route_rows(queue, a, chunks); !status.ok()) return status;
  }
  const Join join{.runs = plan.runs,
                  .score_sums = call.out("score_sums").as<float>(),
                  .logsumexp_sq = call.out("logsumexp_sq").as<float>(),
                  .num_tokens = call.out("num_tokens").as<int32_t>(),
                  .sequence_counts = call.out("sequence_counts").as<int32_t>()};
  queue.launch(join_chunks, sequences * ceil_div(experts + 1, kJoinColumns),
                     kJoinColumns * math::kStrands, 0, a, join);
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
