// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// `route` for few tokens, of one sequence, on E <= 8 experts: the launch of a second kernel would
// take as long as the routing. One cluster of blocks does all, a block per strand of math/router.h,
// whose warps take a chunk each, whose lanes take a token each. The strands are joined in the first
// block's shared memory.
#include "route_lanes.cuh"

namespace duomoe::cuda {
namespace {

using namespace lanes;

constexpr int kStrandChunks = math::kChunks / math::kStrands;
constexpr int kThreads = kStrandChunks * kLanes;
constexpr int kColumnsOfSums = kElements + 1;     // the last is logsumexp^2
constexpr int kCounts = 2 * kElements + 1;        // the last are the tokens
constexpr int kTokensOfLane = kLanes / kStreams;  // of a stream

// The blocks of the cluster meet, without an order of their accesses to memory: the release that
// barrier.cluster has otherwise waits for all stores of the block.
__device__ inline void arrive_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// A barrier in a block's shared memory that opens when `words` words were stored with it.
__device__ inline void expect_words(uint64_t* barrier, int words) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at),
               "r"(words * static_cast<int>(kWordBytes))
               : "memory");
#endif
}
__device__ inline void wait_for_words(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  for (uint32_t open = 0; !open;) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], "
        "0;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(open)
        : "r"(at)
        : "memory");
  }
#endif
}
// *to = x in the shared memory of the cluster's first block, with its `barrier`.
__device__ inline void store_in_first(uint64_t* barrier, uint32_t* to, uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto first = [](const void* own) {
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, 0;"
        : "=r"(at)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))));
    return at;
  };
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(first(to)),
      "r"(x), "r"(first(barrier))
      : "memory");
#endif
}

template <Score kScore, bool kPlain>
__global__ void __launch_bounds__(kThreads, 1)
    route_cluster(const __grid_constant__ Route a, const __grid_constant__ Join to) {
  __shared__ BlockMemory<1, kStrandChunks> memory;
  __shared__ float streams[kStrandChunks][kStreams][kColumnsOfSums];
  __shared__ float sums[kStrandChunks][kColumnsOfSums];
  // Of the first block, for all.
  __shared__ uint64_t joined;
  __shared__ uint32_t strand_sums[math::kStrands][kColumnsOfSums];
  __shared__ uint32_t strand_counts[math::kStrands][kCounts];

  const int strand = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int warp = warp_id(), lane = lane_id(), experts = a.experts;
  // At most kStrands * kStrandChunks * kLanes = 8192 tokens.
  const int length = static_cast<int>(a.chunk_length);
  const int begin = (strand + math::kStrands * warp) * length;
  const int left = static_cast<int>(a.range.tokens) - begin;
  const ChunkView chunk(a, {begin, begin + (left < length ? left : length)});
  TokenLanes<1, kScore, kPlain> token(a, chunk);
  token.fetch(lane);
  token.fetch_bias();
  if (strand == 0 && thread == 0)
    expect_words(&joined, math::kStrands * (kColumnsOfSums + kCounts));
  __syncwarp();
  arrive_in_cluster();
  if (thread < 2 * kElements) memory.counts[thread] = 0;
  if (thread == 2 * kElements) memory.tokens = 0;
  __syncthreads();

  token.route(lane, thread, length, memory);
  __syncwarp();
  // A lane has a column of two streams, and eight have one of logsumexp^2 besides. The share of a
  // row without a live token is 0.
  const int first_row = warp * kLanes, column = lane % kElements;
#pragma unroll
  for (int n = 0; n < kStreams * kElements / kLanes; ++n) {
    const int stream = lane / kElements + n * (kLanes / kElements);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTokensOfLane; ++i) {
      const int row = first_row + stream + i * kStreams;
      sum = math::fma(memory.rows[row * kElements + column], memory.shares[row], sum);
    }
    streams[warp][stream][column] = sum;
  }
  if (lane < kStreams) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTokensOfLane; ++i) {
      const float x = memory.logsumexps[first_row + lane + i * kStreams];
      sum = math::fma(x, x, sum);
    }
    streams[warp][lane][kElements] = sum;
  }
  __syncwarp();
  if (lane < kColumnsOfSums) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) sum += streams[warp][j][lane];
    sums[warp][lane] = sum;
  }
  __syncthreads();
  wait_for_cluster();  // the first block is there, and its barrier
  if (thread < kColumnsOfSums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStrandChunks; ++i) sum += sums[i][thread];  // 0 where there is no chunk
    store_in_first(&joined, &strand_sums[strand][thread], math::bits_of(sum));
  } else if (warp == 1 && lane < kCounts) {
    const int32_t count = lane < 2 * kElements ? memory.counts[lane] : memory.tokens;
    store_in_first(&joined, &strand_counts[strand][lane], static_cast<uint32_t>(count));
  }
  if (strand != 0 || warp > 1) return;
  wait_for_words(&joined);
  if (thread < kColumnsOfSums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < math::kStrands; ++i) sum += math::float_of(strand_sums[i][thread]);
    if (thread < experts) to.score_sums[thread] = sum;
    if (thread == kElements) *to.logsumexp_sq = sum;
  } else if (warp == 1 && lane < kCounts) {
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < math::kStrands; ++i) count += static_cast<int32_t>(strand_counts[i][lane]);
    if (lane < experts) {
      a.expert_counts[lane] = count;
      if (!a.separate_loss_counts) to.sequence_counts[lane] = count;
    } else if (lane < 2 * experts) {
      if (a.separate_loss_counts) to.sequence_counts[lane - experts] = count;
    }
    if (lane == 2 * kElements)
      *to.num_tokens = a.mask ? count : static_cast<int32_t>(a.range.tokens);
  }
}

template <bool kPlain>
auto kernel_of(Score score) {
  return score == Score::kSoftmax   ? route_cluster<Score::kSoftmax, kPlain>
         : score == Score::kSigmoid ? route_cluster<Score::kSigmoid, kPlain>
                                    : route_cluster<Score::kSqrtSoftplus, kPlain>;
}

}  // namespace

bool launch_route_cluster(Queue& queue, const Route& a, const Join& join) {
  const int64_t tokens = a.range.tokens;
  if (!fits(a) || a.experts > kElements || join.sequences != 1 || a.range.first_token ||
      tokens == 0 || a.chunk_length > kLanes || tokens > math::kChunks * a.chunk_length)
    return false;
  return queue.launch_cluster(
      plain(a) ? kernel_of<true>(a.options.score) : kernel_of<false>(a.options.score),
      math::kStrands, kThreads, a, join);
}

}  // namespace duomoe::cuda
