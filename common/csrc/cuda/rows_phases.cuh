// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Copies of many large rows, some to each: memory that turns from writing to reading for every row
// loses more than the bytes that are read. So one block a multiprocessor reads as many rows as its
// shared memory and its registers hold, then writes all copies of them, and so on.
#pragma once

#include "rows.cuh"
#include "shared.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kPhaseThreads = 512;
constexpr int kPhaseLeader = kPhaseThreads - kLanes;  // of the warp with the fewest row numbers
constexpr int kPacksOfThread = 16;                    // in registers
constexpr int64_t kFewestCopies = 3;
constexpr int64_t kFewestRows = 8;
constexpr int64_t kFewestRowBytes = 2048, kFewestBytes = 16 << 20;
constexpr int64_t kPackBytes = sizeof(uint4);

// What each block does: `count` times up to in_shared + in_registers tokens.
struct Phases {
  int64_t blocks, in_shared, in_registers, count;

  int64_t row_bytes, top_k;
  __host__ __device__ int64_t tokens() const { return in_shared + in_registers; }
  // Rows, and the numbers of the rows that all are copied to.
  size_t shared_bytes() const {
    return static_cast<size_t>(in_shared * row_bytes + tokens() * top_k * int64_t{sizeof(int32_t)});
  }
};

// Copies in phases, if the rows suit them and this device has the room; else count is 0.
inline Phases phases_of(Queue& queue, int64_t tokens, int64_t top_k, int64_t row_bytes) {
  Phases phases{.blocks = queue.multiprocessors(), .row_bytes = row_bytes, .top_k = top_k};
  if (!built_for_clusters() || top_k < kFewestCopies || row_bytes % kPackBytes != 0 ||
      row_bytes < kFewestRowBytes || tokens < kFewestBytes / row_bytes)
    return phases;
  constexpr int64_t kReserved = 256;  // the kernel's own shared memory
  const int64_t numbers = top_k * int64_t{sizeof(int32_t)};
  const int64_t held = kPhaseThreads * kPacksOfThread * kPackBytes / row_bytes;
  const int64_t room = static_cast<int64_t>(queue.shared_limit()) - kReserved - held * numbers;
  const int64_t most = room < 0 ? 0 : room / (row_bytes + numbers);
  const int64_t of_block = ceil_div(tokens, phases.blocks);
  if (most < kFewestRows) return phases;
  const int64_t count = ceil_div(of_block, most + held);
  const int64_t of_phase = ceil_div(of_block, count);
  phases.in_shared = of_phase < most ? of_phase : most;
  phases.in_registers = of_phase - phases.in_shared;
  phases.count = count;
  return phases;
}

// Asks for `bytes`, a multiple of 16 and less than 2^20. By one thread.
__device__ inline void load_bulk(void* to, const void* from, uint32_t bytes, uint64_t* arrival) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr uint32_t kPiece = 8192;  // of one copy
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

// rows[r] = x of the token of slot_of_row[r], 0 without one.
template <typename P>
__global__ void __launch_bounds__(kPhaseThreads, 1)
    spread_in_phases(Plan plan, Phases phases, const P* x, P* rows) {
  static_assert(sizeof(P) == kPackBytes);
  extern __shared__ uint4 shared_rows[];
  __shared__ uint64_t arrival;  // of the rows in shared memory, once a phase
  const int thread = static_cast<int>(threadIdx.x), top_k = static_cast<int>(plan.top_k);
  const int packs = static_cast<int>(plan.width / P::kSize);
  P* held = reinterpret_cast<P*>(shared_rows);
  int32_t* row_of = reinterpret_cast<int32_t*>(held + phases.in_shared * packs);
  const auto first_of = [&](int64_t block) { return plan.tokens * block / phases.blocks; };
  const int64_t begin = first_of(blockIdx.x), end = first_of(int64_t{blockIdx.x} + 1);
  const auto tokens_of = [&](int64_t first, int64_t most) {
    const int64_t left = end - first;
    return static_cast<int>(left > most ? most : left < 0 ? 0 : left);
  };
  const auto load = [&](int64_t first) {
    const int tokens = tokens_of(first, phases.in_shared);
    if (tokens > 0)
      load_bulk(held, x + first * packs, static_cast<uint32_t>(tokens * packs * kPackBytes),
                &arrival);
  };
  if (thread == kPhaseLeader) {
    init_barrier(&arrival, 1);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    load(begin);
  }
  __syncthreads();
  fill_rows(plan, phases.blocks, x, nullptr, rows);
  int64_t first = begin;
  for (int64_t phase = 0; phase < phases.count; ++phase, first += phases.tokens()) {
    const int tokens = tokens_of(first, phases.tokens());
    const int in_shared = tokens_of(first, phases.in_shared), slots = tokens * top_k;
    const int more = (tokens - in_shared) * packs;  // packs in registers
    P own[kPacksOfThread];
#pragma unroll
    for (int j = 0; j < kPacksOfThread; ++j) {
      const int i = thread + j * kPhaseThreads;
      if (i < more) own[j] = load_once(x + (first + in_shared) * packs + i);
    }
    for (int s = thread; s < slots; s += kPhaseThreads) {
      const int64_t slot = first * top_k + s;
      const int32_t row = plan.row_of_slot[slot];
      row_of[s] = plan.has_row(row) && plan.joined(row, slot) ? row : -1;
    }
    if (in_shared > 0) wait_for_barrier(&arrival, static_cast<unsigned>(phase) & 1);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPacksOfThread; ++j) {
      const int i = thread + j * kPhaseThreads;
      if (i >= more) continue;
      const int token = i / packs;
      const int32_t* to = row_of + (in_shared + token) * top_k;
      P* column = rows + (i - token * packs);
      for (int k = 0; k < top_k; ++k)
        if (to[k] >= 0) store_once(column + int64_t{to[k]} * packs, own[j]);
    }
    for (int s = warp_id(); s < in_shared * top_k; s += kPhaseThreads / kLanes) {
      const int32_t row = row_of[s];
      if (row < 0) continue;
      const P* from = held + s / top_k * packs;
      P* to = rows + int64_t{row} * packs;
#pragma unroll 4
      for (int i = lane_id(); i < packs; i += kLanes) store_once(to + i, from[i]);
    }
    __syncthreads();
    if (thread == kPhaseLeader && phase + 1 < phases.count) load(first + phases.tokens());
  }
}

// Copies in `phases`, which are some.
template <typename P>
void launch_phases(Queue& queue, const Plan& plan, const Phases& phases, const P* x, P* rows) {
  const auto kernel = spread_in_phases<P>;
  queue.allow_shared(kernel, phases.shared_bytes());
  queue.launch(kernel, phases.blocks, kPhaseThreads, phases.shared_bytes(), plan, phases, x, rows);
}

}  // namespace
}  // namespace duomoe::cuda
