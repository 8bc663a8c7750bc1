// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for any E and K: one warp per token, whose row is in shared memory. Bound by the issue of
// instructions and by their latency: a row is swept twice, once for exponentials and scores, once
// for the streams' sums, and copied to shared memory while the token before it is ranked. The warps
// of a block take the tokens of its chunk in turn; a stream's tokens are added in order.
#include "route_rows.cuh"

namespace duomoe::cuda {
namespace {

using namespace rows;

// Where a block keeps what, in words of shared memory. What has no room is in the workspace.
struct Layout {
  int warps, padded;  // padded: E as whole vectors
  bool shared;        // streams, bias and counts
  bool rare = false;  // find_rarely

  __host__ __device__ int64_t streams() const {
    return shared ? static_cast<int64_t>(kStreams) * padded : 0;
  }
  __host__ __device__ int64_t rows() const { return static_cast<int64_t>(warps) * padded; }
  __host__ __device__ int64_t bias() const { return shared ? padded : 0; }
  __host__ __device__ int64_t counts(int64_t count_words) const { return shared ? count_words : 0; }
  __host__ int64_t words(int64_t count_words, int64_t group_keys) const {
    return streams() + rows() + bias() + counts(count_words) + warps * group_keys;
  }
};

// One block per chunk.
template <Score kScore, Input kInput>
__global__ void __launch_bounds__(kMostWarps* kLanes, 2)
    route_rows(const __grid_constant__ Route a, const Layout layout) {
  constexpr bool kSoftmax = kScore == Score::kSoftmax, kAny = kInput == Input::kAny;
  extern __shared__ __align__(16) float shared_memory[];
  __shared__ Found all_found[kMostWarps];
  __shared__ Stream all_streams[kStreams];
  __shared__ float stream_logsumexp_sq[kStreams];
  __shared__ int32_t stream_tokens[kStreams];

  clear_expert_counts(a);
  const Chunk chunk = chunk_of(a, blockIdx.x);
  if (chunk.begin >= chunk.end) return;
  const int experts = a.experts, warp = warp_id(), padded = layout.padded;
  const int threads = static_cast<int>(blockDim.x), warps = layout.warps;
  const bool shared = !kAny || layout.shared;
  float* streams =
      shared ? shared_memory : a.streams + static_cast<int64_t>(blockIdx.x) * kStreams * padded;
  float* rows = shared_memory + layout.streams();
  float* bias = rows + layout.rows();
  uint32_t* after_bias = reinterpret_cast<uint32_t*>(bias + layout.bias());
  int32_t* counts = shared ? reinterpret_cast<int32_t*>(after_bias) : a.partials.counts(blockIdx.x);
  uint32_t* group_keys = after_bias + layout.counts(a.count_words()) + warp * a.groups.count;
  Warp<kScore, kInput> own{a, rows + warp * padded, streams, kAny ? a.bias : bias, all_found[warp]};
  const auto tokens = static_cast<unsigned>(chunk.end - chunk.begin);
  const unsigned row_bytes = static_cast<unsigned>(experts) * kBytes<kInput>;
  const char* logits = a.logits + chunk.begin * row_bytes;  // kAny: not used
  const auto start_copy = [&](unsigned i) {
    if (i < tokens) own.start_copy(logits + static_cast<uint64_t>(i) * row_bytes);
  };
  start_copy(warp);

  bool regular = a.groups.all_stay() && a.top_k <= kMaxTop;
  for (int e = static_cast<int>(threadIdx.x); e < padded; e += threads) {
    const float b = a.bias && e < experts ? a.bias[e] : 0.0f;
    regular = regular && math::absolute(b) < 1e30f;
    if (shared) bias[e] = b;
  }
  for (int i = static_cast<int>(threadIdx.x); i < a.count_words(); i += threads) counts[i] = 0;
  for (int64_t i = kAdjacent * static_cast<int64_t>(threadIdx.x); i < int64_t{kStreams} * padded;
       i += kAdjacent * threads)
    *reinterpret_cast<float4*>(streams + i) = float4{};
  if (static_cast<int>(threadIdx.x) < kStreams) all_streams[threadIdx.x].init();
  regular = __syncthreads_and(regular) != 0;
  const int64_t first_slot = chunk.begin * a.top_k;

#pragma unroll 1
  for (unsigned i = warp; i < tokens; i += warps) {
    const int64_t t = chunk.begin + i;
    Stream& stream = all_streams[i % kStreams];
    own.sums = streams + static_cast<int64_t>(i % kStreams) * padded;
    const auto wait_for_turn = [&] {
      if (warps > kStreams) stream.wait_for_turn(i / kStreams);
    };
    const auto finish_row = [&] {
      __syncwarp();  // all have read the row, too
      if (warps > kStreams) stream.pass_turn(i / kStreams);
      start_copy(i + warps);
    };
    own.wait_for_copy();
    if (a.mask && !a.mask[t]) {
      leave_slots_unused(a, t);
      wait_for_turn();
      finish_row();
      continue;
    }
    float exponential_sum = 0.0f, score_sum = 0.0f;
    bool moderate = false;
    Columns exponentials = {}, scores = {}, maxima;
    if (regular) {
#pragma unroll
      for (int c = 0; c < kAdjacent; ++c) maxima[c] = -math::infinity();
      moderate = own.compute_scores(t, exponentials, scores, maxima);
      exponential_sum = join_columns(exponentials);
      // A NaN makes more of them than a moderate row can have, or a NaN.
      moderate = __all_sync(kAllLanes, moderate && exponential_sum < 1e37f) != 0;
      exponential_sum = warp_sum(exponential_sum);
      if (!kSoftmax) score_sum = warp_sum(join_columns(scores));
    }
    __syncwarp();
    if (moderate) {
      const float inverse = math::reciprocal(exponential_sum);
      const float share = kSoftmax ? inverse : math::reciprocal(score_sum);
      const auto row_done = [&] {
        wait_for_turn();
        own.add_row(share);
        stream.add(exponential_sum);
        finish_row();
      };
      own.choose(layout.rare, t, inverse, maxima, row_done, counts + experts);
      own.write_slots(first_slot + static_cast<uint64_t>(i) * static_cast<unsigned>(a.top_k),
                      [&](int32_t e) { atomicAdd(counts + e, 1); });
      __syncwarp();  // all have read `found`
    } else {
      Row row{.score = kScore, .experts = experts, .z = a.row(t), .s = own.row};
      route_token(a, t, row, group_keys, counts, counts + experts);
      wait_for_turn();
      for (int e = kAdjacent * lane_id(); e < experts; e += kColumns) {
        for (int c = e; c < e + kAdjacent && c < experts; ++c)
          own.sums[c] = math::fma(row.unscaled_probability(c), row.share, own.sums[c]);
      }
      stream.add_logsumexp(row.logsumexp);
      finish_row();
    }
  }
  __syncthreads();
  for (int j = warp; j < kStreams; j += warps) {
    all_streams[j].flush();
    if (lane_id() == 0) {
      stream_logsumexp_sq[j] = all_streams[j].logsumexp_sq;
      stream_tokens[j] = all_streams[j].tokens;
    }
  }
  __syncthreads();
  write_partials(a, counts, shared, stream_logsumexp_sq, stream_tokens,
                 [&](int j, int e) { return streams[static_cast<int64_t>(j) * padded + e]; });
}

// What a block has besides its dynamic memory.
constexpr size_t kStaticBytes = (sizeof(Found) * kMostWarps) + (sizeof(Stream) * kStreams) + 128;

// What a multiprocessor takes for itself of each block's shared memory.
constexpr size_t kReservedBytes = size_t{1} << 10;

// No warps: one row has no room.
Layout layout_of(int64_t experts, int64_t count_words, int64_t group_keys, size_t limit) {
  const auto room = static_cast<int64_t>(limit);
  if (kWordBytes * experts > room) return {.warps = 0, .padded = 0, .shared = false};
  Layout layout{.warps = kMostWarps,
                .padded = static_cast<int>(ceil_div(experts, kAdjacent)) * kAdjacent,
                .shared = true};
  const auto fits = [&](int64_t blocks = 1) {
    return blocks * (kWordBytes * layout.words(count_words, group_keys) +
                     static_cast<int64_t>(kStaticBytes + kReservedBytes)) <=
           room + static_cast<int64_t>(kReservedBytes);
  };
  // Two blocks of fewer warps have more warps than one.
  if (!fits(2)) {
    layout.warps = kMaxWarps;
    if (!fits(2)) layout.warps = kMostWarps;
  }
  if (!fits()) layout.warps = kMaxWarps;
  while (!fits() && layout.warps > 2) layout.warps /= 2;
  if (!fits()) {
    layout.shared = false;
    layout.warps = kMaxWarps;
    while (!fits() && layout.warps > 1) layout.warps /= 2;
  }
  if (!fits()) layout.warps = 0;
  return layout;
}

// What a block may ask for on any GPU that the kernels run on.
constexpr size_t kLeastSharedLimit = size_t{99} << 10;

template <Score kScore>
auto kernel_for(const Route& a, const Layout& layout) {
  if (layout.shared && a.whole_vectors && a.dtype == DType::kFloat32)
    return route_rows<kScore, Input::kFloat32>;
  if (layout.shared && a.whole_vectors && a.dtype == DType::kBFloat16)
    return route_rows<kScore, Input::kBFloat16>;
  return route_rows<kScore, Input::kAny>;
}

}  // namespace

bool needs_streams(int64_t experts, int64_t count_words, int64_t group_keys) {
  return !layout_of(experts, count_words, group_keys, kLeastSharedLimit).shared;
}

Status launch_route_rows(Queue& queue, const Route& a, int64_t chunks) {
  const size_t limit = queue.shared_limit();
  const int64_t group_keys = a.groups.all_stay() ? 0 : a.groups.count;
  Layout layout = layout_of(a.experts, a.count_words(), group_keys, limit);
  if (queue.status().ok() && (layout.warps == 0 || (!layout.shared && !a.streams)))
    return row_too_long(a.experts, kWordBytes * a.experts, limit);
  const auto kernel = a.options.score == Score::kSoftmax ? kernel_for<Score::kSoftmax>(a, layout)
                      : a.options.score == Score::kSigmoid
                          ? kernel_for<Score::kSigmoid>(a, layout)
                          : kernel_for<Score::kSqrtSoftplus>(a, layout);
  layout.rare = is_rare(a);
  queue.allow_shared(kernel, limit - kStaticBytes);
  queue.launch(kernel, chunks, layout.warps * kLanes,
               kWordBytes * layout.words(a.count_words(), group_keys), a, layout);
  return queue.status();
}

}  // namespace duomoe::cuda
