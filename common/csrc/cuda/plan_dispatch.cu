// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// A stable counting sort of the slots by expert: that of slot_sort.cuh, or for more experts than
// shared memory holds the one here. There one warp walks through one block of slots, 32 at a time:
// first it counts each expert's slots; then, when a prefix over the blocks has turned the counts
// into places, it gives every slot its rank among the expert's slots.
#include "../options.h"
#include "launch.h"
#include "slot_order.cuh"
#include "slot_sort.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMinSlotsPerBlock = 512;
constexpr int64_t kMaxBlocks = 1024;

// -- more experts than shared memory holds --------------------------------------------------------

struct Slots {
  const int32_t* expert_of_slot;
  int64_t count, experts, per_block, blocks;

  Slots(const int32_t* ids, int64_t slots, int64_t num_experts)
      : expert_of_slot(ids),
        count(slots),
        experts(num_experts),
        per_block(std::max(kMinSlotsPerBlock, ceil_div(slots, kMaxBlocks))),
        blocks(ceil_div(slots, per_block)) {}
};

// for_items_in_order over the slots of a block, by expert; slots with ids outside [0, E) are
// unused.
template <typename F>
__device__ void for_slots_in_order(const Slots& slots, int64_t block, int32_t* place, F f) {
  const int64_t begin = block * slots.per_block;
  const int64_t end = begin + slots.per_block < slots.count ? begin + slots.per_block : slots.count;
  const auto expert = [&](int64_t slot) {
    const int32_t e = slots.expert_of_slot[slot];
    return e < slots.experts ? e : -1;
  };
  for_items_in_order(begin, end, place, expert, f);
}

// places[b][e], zero before: the slots of expert e in block b.
__global__ void walk_and_count(Slots slots, int32_t* places) {
  for (int64_t b = grid_warp(); b < slots.blocks; b += grid_warps()) {
    for_slots_in_order(slots, b, places + b * slots.experts, [](int64_t, int32_t, int32_t) {});
  }
}

// places[b][e] becomes the rank of the block's first slot of the expert. One thread per expert.
__global__ void walk_blocks(Slots slots, int32_t* places, int32_t* routed_counts) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= slots.experts) return;
  int32_t total = 0;
  for (int64_t b = 0; b < slots.blocks; ++b) {
    const int32_t count = places[b * slots.experts + e];
    places[b * slots.experts + e] = total;
    total += count;
  }
  routed_counts[e] = total;
}

// Blocks of rows start at multiples of `alignment`; what passes the last row is dropped, and
// cutting every offset at num_rows is what dropping does to the sum. first[e]: the slots of the
// experts before e. One warp.
__global__ void place_many_experts(int64_t experts, int64_t capacity, int64_t alignment,
                                   int64_t num_rows, const int32_t* routed_counts,
                                   int32_t* expert_counts, int32_t* expert_offsets,
                                   int64_t* first) {
  int64_t rows_before = 0, slots_before = 0;
  for (int64_t begin = 0; begin < experts; begin += kLanes) {
    const int64_t e = begin + lane_id();
    const int64_t routed = e < experts ? routed_counts[e] : 0;
    const int64_t wanted = capacity >= 0 && capacity < routed ? capacity : routed;
    const int64_t padded = (wanted + alignment - 1) / alignment * alignment;
    const int64_t rows = sum_of_lanes_up_to_mine(padded), slots = sum_of_lanes_up_to_mine(routed);
    const int64_t row_begin = rows_before + rows - padded, row_end = rows_before + rows;
    const int64_t room = row_begin < num_rows ? num_rows - row_begin : 0;
    if (e < experts) {
      expert_counts[e] = static_cast<int32_t>(wanted < room ? wanted : room);
      expert_offsets[e + 1] = static_cast<int32_t>(row_end < num_rows ? row_end : num_rows);
      if (first) first[e] = slots_before + slots - routed;
    }
    rows_before = __shfl_sync(kAllLanes, row_end, kLanes - 1);
    slots_before += __shfl_sync(kAllLanes, slots, kLanes - 1);
  }
  if (lane_id() == 0) expert_offsets[0] = 0;
}

// Each expert keeps its first slots.
__global__ void keep_first(Slots slots, int32_t* places, const int32_t* expert_counts,
                           const int32_t* expert_offsets, int32_t* row_of_slot,
                           int32_t* slot_of_row) {
  for (int64_t b = grid_warp(); b < slots.blocks; b += grid_warps()) {
    for_slots_in_order(slots, b, places + b * slots.experts,
                       [=](int64_t slot, int32_t e, int32_t rank) {
                         if (rank >= expert_counts[e]) return;
                         const int32_t row = expert_offsets[e] + rank;
                         row_of_slot[slot] = row;
                         slot_of_row[row] = static_cast<int32_t>(slot);
                       });
  }
}

// The slots in expert order without drops, and the order of their weights.
__global__ void sort_slots(Slots slots, int32_t* places, const int64_t* first, const float* weights,
                           int32_t* sorted_slots, uint32_t* sorted_keys) {
  for (int64_t b = grid_warp(); b < slots.blocks; b += grid_warps()) {
    for_slots_in_order(slots, b, places + b * slots.experts,
                       [=](int64_t slot, int32_t e, int32_t rank) {
                         sorted_slots[first[e] + rank] = static_cast<int32_t>(slot);
                         sorted_keys[first[e] + rank] = math::order_key(weights[slot]);
                       });
  }
}

void sort_by_many_experts(Queue& queue, const Slots& slots, const Rows& rows, int32_t* places) {
  constexpr int64_t kBytes = sizeof(int32_t);
  const int64_t grid = ceil_div(slots.blocks, kThreads / kLanes);
  queue.fill(rows.row_of_slot, 0xff, slots.count * kBytes);
  queue.fill(rows.slot_of_row, 0xff, int64_t{rows.num_rows} * kBytes);
  queue.fill(places, 0, slots.blocks * slots.experts * kBytes);
  queue.launch(walk_and_count, grid, kThreads, 0, slots, places);
  queue.launch(walk_blocks, ceil_div(slots.experts, kThreads), kThreads, 0, slots, places,
               rows.routed_counts);
  queue.launch(place_many_experts, 1, kLanes, 0, slots.experts, int64_t{rows.capacity},
               int64_t{rows.alignment}, int64_t{rows.num_rows}, rows.routed_counts,
               rows.expert_counts, rows.expert_offsets, rows.first);
  if (rows.sorted_slots) {
    queue.launch(sort_slots, grid, kThreads, 0, slots, places, rows.first, rows.weights,
                 rows.sorted_slots, rows.sorted_keys);
  } else {
    queue.launch(keep_first, grid, kThreads, 0, slots, places, rows.expert_counts,
                 rows.expert_offsets, rows.row_of_slot, rows.slot_of_row);
  }
}

// -- drop_order = "weight" ------------------------------------------------------------------------

constexpr int kSelectThreads = 1024;

struct Prefix {
  int before, total;
};
// How many threads of the block before this one say yes, and how many in all. `totals` has room for
// every warp.
__device__ Prefix block_prefix(bool yes, int* totals) {
  const unsigned ballot = __ballot_sync(kAllLanes, yes);
  if (lane_id() == 0) totals[warp_id()] = __popc(ballot);
  __syncthreads();
  Prefix prefix{.before = __popc(ballot & ((1u << lane_id()) - 1)), .total = 0};
  for (int w = 0; w < warps_per_block(); ++w) {
    if (w < warp_id()) prefix.before += totals[w];
    prefix.total += totals[w];
  }
  __syncthreads();
  return prefix;
}

// How many of n keys are at least `bound`. Positions are 64-bit: n may be close to 2^31.
__device__ int count_from(const uint32_t* keys, int64_t n, uint32_t bound, int* totals) {
  int count = 0;
  for (int64_t i = threadIdx.x; i < n; i += kSelectThreads) count += keys[i] >= bound;
  count = warp_sum(count);
  if (lane_id() == 0) totals[warp_id()] = count;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < warps_per_block(); ++w) total += totals[w];
  __syncthreads();
  return total;
}

// Each expert keeps its `capacity` slots of largest weight, ties in row order; of these, in row
// order, as many as there are rows for. One block per expert.
__global__ void __launch_bounds__(kSelectThreads)
    keep_largest(int64_t capacity, const int64_t* first, const int32_t* sorted_slots,
                 const uint32_t* sorted_keys, const int32_t* routed_counts,
                 const int32_t* expert_counts, const int32_t* expert_offsets, int32_t* row_of_slot,
                 int32_t* slot_of_row) {
  __shared__ int totals[kSelectThreads / kLanes];
  const int64_t e = blockIdx.x;
  const int n = routed_counts[e], rows = expert_counts[e];
  if (rows == 0) return;
  const uint32_t* keys = sorted_keys + first[e];
  // The capacity-th largest key, bit by bit; slots above it stay, and of those equal to it the
  // first `ties`.
  uint32_t threshold = 0;
  int ties = n;
  if (capacity < n) {
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
      if (count_from(keys, n, threshold | bit, totals) >= capacity) threshold |= bit;
    }
    ties = static_cast<int>(capacity) -
           (threshold == 0xffffffffu ? 0 : count_from(keys, n, threshold + 1, totals));
  }
  int stayed = 0;
  for (int64_t begin = 0; begin < n; begin += kSelectThreads) {
    const int64_t i = begin + threadIdx.x;
    const bool tie = i < n && keys[i] == threshold;
    const Prefix tied = block_prefix(tie, totals);
    const bool stays = i < n && (keys[i] > threshold || (tie && tied.before < ties));
    const Prefix before = block_prefix(stays, totals);
    if (stays && stayed + before.before < rows) {
      const int32_t slot = sorted_slots[first[e] + i];
      const int32_t row = expert_offsets[e] + stayed + before.before;
      row_of_slot[slot] = row;
      slot_of_row[row] = slot;
    }
    stayed += before.total;
    ties -= tied.total < ties ? tied.total : ties;
  }
}

// What a call needs of scratch memory, and how it cuts the slots: from axes and attributes alone.
struct Layout {
  int64_t experts, count;
  bool by_weight, many;
  int64_t places, weighted_slots, weighted_experts;  // elements of the pieces of scratch

  explicit Layout(const Call& call)
      : experts(call.axis('E')),
        count(call.axis('T') * call.axis('K')),
        by_weight(call.choice<DropOrder>("drop_order") == DropOrder::kWeight &&
                  call.integer("capacity") >= 0),
        many(experts > kMaxSortExperts),
        places(many ? Slots(nullptr, count, experts).blocks * experts
                    : SlotBlocks(nullptr, count, experts).words()),
        weighted_slots(by_weight ? count : 0),
        weighted_experts(by_weight ? experts : 0) {}

  int64_t bytes() const {
    return piece_bytes<int32_t>(places) + piece_bytes<int64_t>(weighted_experts) +
           piece_bytes<int32_t>(weighted_slots) + piece_bytes<uint32_t>(weighted_slots);
  }
};

DUOMOE_WORKSPACE(kCuda, plan_dispatch) { return Layout(call).bytes(); }

DUOMOE_KERNEL(kCuda, plan_dispatch) {
  const Layout layout(call);
  const int64_t experts = layout.experts, count = layout.count, capacity = call.integer("capacity");
  const int32_t* ids = call.in("indices").as<const int32_t>();

  Queue queue(call);
  uint32_t* places = queue.scratch<uint32_t>(layout.places);
  Rows rows{.num_rows = static_cast<uint32_t>(call.axis('R')),
            .capacity = static_cast<uint32_t>(
                capacity >= 0 && capacity < count ? capacity : count),  // no expert has more
            .alignment = static_cast<uint32_t>(call.integer("alignment")),
            .row_of_slot = call.out("row_of_slot").as<int32_t>(),
            .slot_of_row = call.out("slot_of_row").as<int32_t>(),
            .expert_counts = call.out("expert_counts").as<int32_t>(),
            .routed_counts = call.out("routed_counts").as<int32_t>(),
            .expert_offsets = call.out("expert_offsets").as<int32_t>(),
            .weights = layout.by_weight ? call.in("weights").as<const float>() : nullptr,
            .sorted_slots = nullptr,
            .sorted_keys = nullptr,
            .first = nullptr};
  rows.first = queue.scratch<int64_t>(layout.weighted_experts);
  rows.sorted_slots = queue.scratch<int32_t>(layout.weighted_slots);
  rows.sorted_keys = queue.scratch<uint32_t>(layout.weighted_slots);
  if (layout.many) {
    sort_by_many_experts(queue, Slots(ids, count, experts), rows,
                         reinterpret_cast<int32_t*>(places));
  } else {
    sort_by_expert(queue, SlotBlocks(ids, count, experts), rows, places);
  }
  if (layout.by_weight && count > 0) {
    queue.launch(keep_largest, experts, kSelectThreads, 0, capacity, rows.first, rows.sorted_slots,
                 rows.sorted_keys, rows.routed_counts, rows.expert_counts, rows.expert_offsets,
                 rows.row_of_slot, rows.slot_of_row);
  }
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
