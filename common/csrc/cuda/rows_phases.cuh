// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Copies of many large rows, some to each: memory that turns from writing to reading for every row
// loses more than the bytes that are read. So one block a multiprocessor reads as many rows as its
// shared memory holds, then writes all copies of them, and so on; and the blocks begin to read
// together, since one that reads while the others write has the same turns.
#pragma once

#include "rows.cuh"

namespace duomoe::cuda {
namespace {

constexpr bool kReadTogether = true;  // a matter of speed alone
constexpr int kPhaseThreads = 512;
constexpr int kPhaseLeader = kPhaseThreads - kLanes;  // of the warp with the fewest row numbers
constexpr int64_t kFewestCopies = 3;
constexpr int64_t kFewestRows = 8, kFewestPhases = 4;
constexpr int64_t kFewestRowBytes = 2048, kFewestBytes = 64 << 20;
constexpr int64_t kPackBytes = sizeof(uint4);

// What each block does: `count` times up to `tokens` tokens.
struct Phases {
  int64_t blocks, tokens, count;

  int64_t row_bytes, top_k;
  // Rows, and the numbers of the rows that they are copied to.
  size_t shared_bytes() const {
    return static_cast<size_t>(tokens * (row_bytes + top_k * int64_t{sizeof(int32_t)}));
  }
};

// Whether the rows are such that a device may be found that copies them in phases.
inline bool phases_suit(int64_t tokens, int64_t top_k, int64_t row_bytes) {
  return built_for_clusters() && top_k >= kFewestCopies && row_bytes % kPackBytes == 0 &&
         row_bytes >= kFewestRowBytes && tokens >= kFewestBytes / row_bytes;
}

// Without phases (count 0) where this device has too little shared memory or too many
// multiprocessors.
inline Phases phases_of(Queue& queue, int64_t tokens, int64_t top_k, int64_t row_bytes) {
  constexpr int64_t kReserved = 256;  // the kernel's own shared memory
  Phases phases{.blocks = queue.multiprocessors(),
                .tokens = 0,
                .count = 0,
                .row_bytes = row_bytes,
                .top_k = top_k};
  const int64_t room = static_cast<int64_t>(queue.shared_limit()) - kReserved;
  const int64_t most = room / (row_bytes + top_k * int64_t{sizeof(int32_t)});
  const int64_t of_block = ceil_div(tokens, phases.blocks);
  if (most < kFewestRows || ceil_div(of_block, most) < kFewestPhases) return phases;
  phases.tokens = ceil_div(of_block, ceil_div(of_block, most));
  phases.count = ceil_div(of_block, phases.tokens);
  return phases;
}

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A barrier that opens, once a phase, when the bytes that were asked for have come.
__device__ inline void init_arrival(uint64_t* arrival) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Asks for `bytes`, a multiple of 16 and less than 2^20. By one thread.
__device__ inline void load_bulk(void* to, const void* from, uint32_t bytes, uint64_t* arrival) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr uint32_t kPiece = 8192;
  const uint32_t at = shared_address(to), opens = shared_address(arrival);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(opens), "r"(bytes)
               : "memory");
  for (uint32_t done = 0; done < bytes; done += kPiece) {
    const uint32_t piece = bytes - done < kPiece ? bytes - done : kPiece;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(at + done),
        "l"(__cvta_generic_to_global(static_cast<const char*>(from) + done)), "r"(piece), "r"(opens)
        : "memory");
  }
#endif
}

__device__ inline void wait_for_bulk(uint64_t* arrival, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  for (uint32_t open = 0; !open;) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(open)
        : "r"(shared_address(arrival)), "r"(parity)
        : "memory");
  }
#endif
}

// Counts this block, whose stores are done by then, and waits until `wanted` are counted; not for
// long, as nothing says that all blocks run at a time. Whether it is worth to wait again.
__device__ inline bool meet(uint32_t* counted, uint32_t wanted, bool wait) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int64_t kMostClocks = 40000;  // some 20 us
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counted) : "memory");
  const int64_t start = clock64();
  while (wait) {
    uint32_t seen;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counted) : "memory");
    if (seen >= wanted) break;
    wait = clock64() - start < kMostClocks;
  }
#endif
  return wait;
}

// rows[r] = x of the token of slot_of_row[r], 0 without one. `counted`: 0 before.
template <typename P, bool kTogether>
__global__ void __launch_bounds__(kPhaseThreads, 1)
    spread_in_phases(Plan plan, Phases phases, uint32_t* counted, const P* x, P* rows) {
  static_assert(sizeof(P) == kPackBytes);
  extern __shared__ uint4 shared_rows[];
  __shared__ uint64_t arrival;
  const int thread = static_cast<int>(threadIdx.x), top_k = static_cast<int>(plan.top_k);
  const int packs = static_cast<int>(plan.width / P::kSize);
  P* held = reinterpret_cast<P*>(shared_rows);
  int32_t* row_of = reinterpret_cast<int32_t*>(held + phases.tokens * packs);
  const auto first_of = [&](int64_t block) { return plan.tokens * block / phases.blocks; };
  const int64_t begin = first_of(blockIdx.x), end = first_of(int64_t{blockIdx.x} + 1);
  const auto tokens_of = [&](int64_t first) {
    const int64_t left = end - first;
    return static_cast<int>(left > phases.tokens ? phases.tokens : left < 0 ? 0 : left);
  };
  const auto load = [&](int64_t first) {
    const int tokens = tokens_of(first);
    if (tokens > 0)
      load_bulk(held, x + first * packs, static_cast<uint32_t>(tokens * packs * kPackBytes),
                &arrival);
  };
  if (thread == kPhaseLeader) {
    init_arrival(&arrival);
    load(begin);
  }
  __syncthreads();
  fill_rows(plan, phases.blocks, x, nullptr, rows);
  bool wait = true;
  int64_t first = begin;
  for (int64_t phase = 0; phase < phases.count; ++phase, first += phases.tokens) {
    const int tokens = tokens_of(first), slots = tokens * top_k;
    for (int s = thread; s < slots; s += kPhaseThreads) {
      const int64_t slot = first * top_k + s;
      const int32_t row = plan.row_of_slot[slot];
      row_of[s] = plan.has_row(row) && plan.joined(row, slot) ? row : -1;
    }
    if (tokens > 0) wait_for_bulk(&arrival, static_cast<uint32_t>(phase) & 1);
    __syncthreads();
    for (int s = warp_id(); s < slots; s += kPhaseThreads / kLanes) {
      const int32_t row = row_of[s];
      if (row < 0) continue;
      const P* from = held + s / top_k * packs;
      P* to = rows + int64_t{row} * packs;
#pragma unroll 4
      for (int i = lane_id(); i < packs; i += kLanes) store_once(to + i, from[i]);
    }
    __syncthreads();
    if (thread == kPhaseLeader && phase + 1 < phases.count) {
      if constexpr (kTogether)
        wait = meet(counted, static_cast<uint32_t>((phase + 1) * phases.blocks), wait);
      load(first + phases.tokens);
    }
  }
}

// Copies in `phases`, which are some.
template <typename P>
void launch_phases(Queue& queue, const Plan& plan, const Phases& phases, uint32_t* counted,
                   const P* x, P* rows) {
  const auto kernel = spread_in_phases<P, kReadTogether>;
  queue.allow_shared(kernel, phases.shared_bytes());
  if constexpr (kReadTogether) queue.fill(counted, 0, sizeof(uint32_t));
  queue.launch(kernel, phases.blocks, kPhaseThreads, phases.shared_bytes(), plan, phases, counted,
               x, rows);
}

}  // namespace
}  // namespace duomoe::cuda
