// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for E <= 64 and K <= 8, with a block per chunk, which goes through it in tiles.
#include "route_lanes.cuh"

namespace duomoe::cuda {
namespace {

using namespace lanes;

// Sums of a thread: there are at least P warps for 8 streams of 8 P columns.
constexpr int kMaxSums = 2;
// Tokens of a stream that are added at once; a tile has a multiple of 32 tokens.
constexpr int kAtOnce = kLanes / kStreams;

// The chunk of any block, out of the way of the calls with one sequence.
__device__ __noinline__ Chunk any_chunk(const Route& a) { return chunk_of(a, blockIdx.x); }

__device__ Chunk own_chunk(const Route& a) {
  if (a.range.first_token || a.chunks_per_run < gridDim.x) return any_chunk(a);
  const int64_t begin = blockIdx.x * a.chunk_length, end = begin + a.chunk_length;
  return {begin, end < a.range.tokens ? end : a.range.tokens};
}

// One block per chunk.
template <int P, Score kScore, bool kPlain>
__global__ void __launch_bounds__(kMaxWarps* kLanes) route_lanes(const __grid_constant__ Route a) {
  using Lanes = TokenLanes<P, kScore, kPlain>;
  constexpr int kPadded = Lanes::kPadded, kStride = kPadded + 1;
  __shared__ BlockMemory<P, kMaxWarps> memory;
  __shared__ float streams[kStreams * kStride];  // the last column is logsumexp^2

  const Chunk ends = own_chunk(a);
  if (ends.begin >= ends.end) {
    clear_expert_counts(a);
    return;
  }
  const ChunkView chunk(a, ends);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int tile = threads / P, in_tile = thread / P;
  Lanes token(a, chunk);
  token.fetch(in_tile);
  token.fetch_bias();
  clear_expert_counts(a);
  const int count_words = kPlain ? a.experts : a.count_words();
#pragma unroll 1
  for (int i = thread; i < count_words; i += threads) memory.counts[i] = 0;
  if (thread == 0) memory.tokens = a.mask ? 0 : chunk.tokens;
  __syncthreads();

  float sums[kMaxSums] = {}, logsumexp_sq = 0.0f;
  const int column = thread % kPadded, first_stream = thread / kPadded;
  const int stream_step = threads / kPadded;
#pragma unroll 1
  for (int begin = 0; begin < chunk.tokens; begin += tile) {
    if (begin > 0) __syncthreads();  // all have read the rows
    token.route(begin + in_tile, in_tile, begin + tile + in_tile, memory);
    __syncthreads();
    // The share of a row without a live token is 0.
#pragma unroll
    for (int n = 0; n < kMaxSums; ++n) {
      const int stream = first_stream + n * stream_step;
      if (stream >= kStreams) break;
#pragma unroll 1
      for (int i = stream; i < tile; i += kLanes) {
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          const int row = i + m * kStreams;
          sums[n] = math::fma(memory.rows[row * kPadded + column], memory.shares[row], sums[n]);
        }
      }
    }
    if (thread >= threads - kStreams) {
#pragma unroll 1
      for (int i = thread - (threads - kStreams); i < tile; i += kLanes) {
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          const float x = memory.logsumexps[i + m * kStreams];
          logsumexp_sq = math::fma(x, x, logsumexp_sq);
        }
      }
    }
  }

#pragma unroll
  for (int n = 0; n < kMaxSums; ++n) {
    const int stream = first_stream + n * stream_step;
    if (stream < kStreams) streams[stream * kStride + column] = sums[n];
  }
  if (thread >= threads - kStreams)
    streams[(thread - (threads - kStreams)) * kStride + kPadded] = logsumexp_sq;
  __syncthreads();
  float* partial_sums = a.partials.sums(blockIdx.x);
  int32_t* partial_counts = a.partials.counts(blockIdx.x);
#pragma unroll 1
  for (int i = thread; i <= a.experts; i += threads) {
    const float* mine = streams + (i < a.experts ? i : kPadded);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) sum += mine[j * kStride];
    partial_sums[i] = sum;
    if (i == a.experts) *a.partials.tokens(blockIdx.x) = memory.tokens;
  }
#pragma unroll 1
  for (int i = thread; i < count_words; i += threads) partial_counts[i] = memory.counts[i];
}

template <int P, bool kPlain>
auto kernel_of(Score score) {
  return score == Score::kSoftmax   ? route_lanes<P, Score::kSoftmax, kPlain>
         : score == Score::kSigmoid ? route_lanes<P, Score::kSigmoid, kPlain>
                                    : route_lanes<P, Score::kSqrtSoftplus, kPlain>;
}

}  // namespace

bool launch_route_lanes(Queue& queue, const Route& a, int64_t chunks) {
  if (!fits(a)) return false;
  with_lanes(a.experts, [&]<int P>(std::integral_constant<int, P>) {
    // A multiple of P, for tiles of 32 tokens.
    const int warps =
        static_cast<int>(std::min<int64_t>(ceil_div(a.chunk_length, kLanes) * P, kMaxWarps));
    queue.launch(
        plain(a) ? kernel_of<P, true>(a.options.score) : kernel_of<P, false>(a.options.score),
        chunks, warps * kLanes, 0, a);
  });
  return true;
}

}  // namespace duomoe::cuda
