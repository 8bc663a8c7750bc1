// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Where rows go, from a map of tokens by experts, from ids of any size, from chunk sizes, and back
// from the maps that a caller hands in. Numbers outside their range count as unused.
#include "launch.h"
#include "slot_order.cuh"

namespace duomoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;

__device__ int64_t grid_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ int64_t grid_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// -- plan_mask ------------------------------------------------------------------------------------

constexpr int64_t kMinTokensPerBlock = 32;
constexpr int64_t kMaxTokenBlocks = 2048;

// A map of T tokens by E experts, cut into blocks of tokens.
struct Mask {
  const uint8_t* marks;
  int64_t tokens, experts, per_block, blocks;

  __device__ int64_t end(int64_t block) const {
    const int64_t end = (block + 1) * per_block;
    return end < tokens ? end : tokens;
  }
};

// rank[b][e]: tokens of expert e in block b. One thread per block of tokens and expert.
__global__ void count_marks(Mask mask, int32_t* rank) {
  for (int64_t i = grid_thread(); i < mask.blocks * mask.experts; i += grid_threads()) {
    const int64_t b = i / mask.experts, e = i % mask.experts;
    int32_t count = 0;
    for (int64_t t = b * mask.per_block; t < mask.end(b); ++t)
      count += mask.marks[t * mask.experts + e] != 0;
    rank[i] = count;
  }
}

// rank[b][key] becomes the sum over the blocks before b. One thread per key.
__global__ void sum_over_blocks(int64_t blocks, int64_t keys, int32_t* rank, int32_t* totals) {
  const int64_t key = grid_thread();
  if (key >= keys) return;
  int32_t total = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t count = rank[b * keys + key];
    rank[b * keys + key] = total;
    total += count;
  }
  totals[key] = total;
}

// `limit` cuts the rows without padding, num_rows those with it; cutting a running sum is what
// dropping does to it. One warp.
__global__ void place_experts(int64_t experts, int64_t limit, int64_t alignment, int64_t num_rows,
                              const int32_t* routed_counts, int32_t* expert_counts,
                              int32_t* expert_offsets, int32_t* pad_offsets) {
  int64_t routed_before = 0, padded_before = 0, kept_before = 0;
  for (int64_t begin = 0; begin < experts; begin += kLanes) {
    const int64_t e = begin + lane_id();
    const int64_t routed = e < experts ? routed_counts[e] : 0;
    const int64_t routed_end = routed_before + sum_of_lanes_up_to_mine(routed);
    const int64_t first = routed_end - routed < limit ? routed_end - routed : limit;
    const int64_t wanted = (routed_end < limit ? routed_end : limit) - first;
    const int64_t padded = (wanted + alignment - 1) / alignment * alignment;
    const int64_t padded_end = padded_before + sum_of_lanes_up_to_mine(padded);
    const int64_t row_begin = padded_end - padded < num_rows ? padded_end - padded : num_rows;
    const int64_t room = num_rows - row_begin, kept = wanted < room ? wanted : room;
    const int64_t kept_end = kept_before + sum_of_lanes_up_to_mine(kept);
    if (e < experts) {
      expert_counts[e] = static_cast<int32_t>(kept);
      expert_offsets[e + 1] = static_cast<int32_t>(padded_end < num_rows ? padded_end : num_rows);
      pad_offsets[e] = static_cast<int32_t>(row_begin - (kept_end - kept));
    }
    routed_before = __shfl_sync(kAllLanes, routed_end, kLanes - 1);
    padded_before = __shfl_sync(kAllLanes, padded_end, kLanes - 1);
    kept_before = __shfl_sync(kAllLanes, kept_end, kLanes - 1);
  }
  if (lane_id() == 0) expert_offsets[0] = 0;
}

// One thread per block of tokens and expert.
__global__ void number_rows(Mask mask, const int32_t* rank, const int32_t* expert_counts,
                            const int32_t* expert_offsets, int32_t* row_of_slot,
                            int32_t* slot_of_row) {
  for (int64_t i = grid_thread(); i < mask.blocks * mask.experts; i += grid_threads()) {
    const int64_t b = i / mask.experts, e = i % mask.experts;
    int32_t place = rank[i];
    for (int64_t t = b * mask.per_block; t < mask.end(b); ++t) {
      const int64_t slot = t * mask.experts + e;
      int32_t row = -1;
      if (mask.marks[slot] && place++ < expert_counts[e]) {
        row = expert_offsets[e] + place - 1;
        slot_of_row[row] = static_cast<int32_t>(slot);
      }
      row_of_slot[slot] = row;
    }
  }
}

// A token's rows without padding, last expert first, their experts, and their number. One warp per
// token.
__global__ void list_rows(int64_t tokens, int64_t experts, const int32_t* row_of_slot,
                          const int32_t* pad_offsets, int32_t* row_id_map) {
  for (int64_t t = grid_warp(); t < tokens; t += grid_warps()) {
    int32_t* line = row_id_map + t * (2 * experts + 1);
    int n = 0;
    for (int64_t done = 0; done < experts; done += kLanes) {
      const int64_t e = experts - 1 - done - lane_id();
      const int32_t row = e >= 0 ? row_of_slot[t * experts + e] : -1;
      const unsigned used = __ballot_sync(kAllLanes, row >= 0);
      if (row >= 0) {
        const int i = n + __popc(used & ((1u << lane_id()) - 1));
        line[i] = row - pad_offsets[e];
        line[experts + i] = static_cast<int32_t>(e);
      }
      n += __popc(used);
    }
    for (int64_t i = n + lane_id(); i < experts; i += kLanes) line[i] = line[experts + i] = -1;
    if (lane_id() == 0) line[2 * experts] = n;
  }
}

Mask mask_of(const Call& call) {
  Mask mask{.marks = call.in("routing_map").as<const uint8_t>(),
            .tokens = call.axis('T'),
            .experts = call.axis('E'),
            .per_block = 0,
            .blocks = 0};
  mask.per_block = std::max(kMinTokensPerBlock, ceil_div(mask.tokens, kMaxTokenBlocks));
  mask.blocks = ceil_div(mask.tokens, mask.per_block);
  return mask;
}

DUOMOE_WORKSPACE(kCuda, plan_mask) {
  return piece_bytes<int32_t>(mask_of(call).blocks * call.axis('E'));
}

DUOMOE_KERNEL(kCuda, plan_mask) {
  const int64_t experts = call.axis('E'), limit = call.integer("limit");
  const Mask mask = mask_of(call);
  const int64_t grid = grid_for(mask.blocks * experts, kThreads);
  int32_t* row_of_slot = call.out("row_of_slot").as<int32_t>();
  int32_t* expert_counts = call.out("expert_counts").as<int32_t>();
  int32_t* routed_counts = call.out("routed_counts").as<int32_t>();
  int32_t* expert_offsets = call.out("expert_offsets").as<int32_t>();
  int32_t* pad_offsets = call.out("pad_offsets").as<int32_t>();

  Queue queue(call);
  queue.fill(call.out("slot_of_row"), 0xff);
  int32_t* rank = queue.scratch<int32_t>(mask.blocks * experts);
  queue.launch(count_marks, grid, kThreads, 0, mask, rank);
  queue.launch(sum_over_blocks, ceil_div(experts, kThreads), kThreads, 0, mask.blocks, experts,
               rank, routed_counts);
  queue.launch(place_experts, 1, kLanes, 0, experts, limit < 0 ? mask.tokens * experts : limit,
               call.integer("alignment"), call.axis('R'), routed_counts, expert_counts,
               expert_offsets, pad_offsets);
  queue.launch(number_rows, grid, kThreads, 0, mask, rank, expert_counts, expert_offsets,
               row_of_slot, call.out("slot_of_row").as<int32_t>());
  queue.launch(list_rows, grid_for(mask.tokens, kWarps), kThreads, 0, mask.tokens, experts,
               row_of_slot, pad_offsets, call.out("row_id_map").as<int32_t>());
  return queue.status();
}

// -- maps of a caller -----------------------------------------------------------------------------

// One warp per token; an expert listed twice keeps its last row.
__global__ void read_lines(int64_t tokens, int64_t experts, int64_t num_rows,
                           const int32_t* row_id_map, const int32_t* pad_offsets,
                           int32_t* row_of_slot) {
  for (int64_t t = grid_warp(); t < tokens; t += grid_warps()) {
    const int32_t* line = row_id_map + t * (2 * experts + 1);
    int32_t* rows = row_of_slot + t * experts;
    for (int64_t e = lane_id(); e < experts; e += kLanes) rows[e] = -1;
    __syncwarp();
    const int64_t listed = line[2 * experts], n = listed < experts ? listed : experts;
    for (int64_t first = 0; first < n; first += kLanes) {
      const int64_t i = first + lane_id();
      const int64_t e = i < n && line[i] >= 0 ? line[experts + i] : -1;
      const bool used = e >= 0 && e < experts;
      const unsigned peers = __match_any_sync(kAllLanes, used ? static_cast<int32_t>(e) : -1);
      if (used && (peers >> lane_id()) == 1u) {
        const int64_t row = int64_t{line[i]} + (pad_offsets ? pad_offsets[e] : 0);
        rows[e] = row >= 0 && row < num_rows ? static_cast<int32_t>(row) : -1;
      }
      __syncwarp();
    }
  }
}

DUOMOE_KERNEL(kCuda, read_row_map) {
  const TensorView& pads = call.in("pad_offsets");
  Queue queue(call);
  queue.launch(read_lines, grid_for(call.axis('T'), kWarps), kThreads, 0, call.axis('T'),
               call.axis('E'), call.integer("num_rows"), call.in("row_id_map").as<const int32_t>(),
               pads.present() ? pads.as<const int32_t>() : nullptr,
               call.out("row_of_slot").as<int32_t>());
  return queue.status();
}

__global__ void scatter_slots(int64_t slots, int64_t num_rows, const int32_t* row_of_slot,
                              int32_t* slot_of_row) {
  for (int64_t slot = grid_thread(); slot < slots; slot += grid_threads()) {
    const int32_t row = row_of_slot[slot];
    if (row >= 0 && row < num_rows) atomicMax(slot_of_row + row, static_cast<int32_t>(slot));
  }
}

DUOMOE_KERNEL(kCuda, invert_rows) {
  const int64_t slots = call.axis('T') * call.axis('K');
  Queue queue(call);
  queue.fill(call.out("slot_of_row"), 0xff);
  queue.launch(scatter_slots, grid_for(slots, kThreads), kThreads, 0, slots, call.axis('R'),
               call.in("row_of_slot").as<const int32_t>(), call.out("slot_of_row").as<int32_t>());
  return queue.status();
}

// -- sort_slots -----------------------------------------------------------------------------------

constexpr int kBits = 11;
constexpr int32_t kDigits = 1 << kBits;
constexpr int64_t kMinItemsPerBlock = 512;
constexpr int64_t kMaxItemBlocks = 256;

// One pass of a radix sort: slots in the order of the passes before, -1 after the last, or in
// their own order where `order` is null.
struct Pass {
  const int32_t* ids;
  const int32_t* order;
  int64_t count, per_block, blocks;
  int shift;

  __device__ int32_t slot(int64_t i) const { return order ? order[i] : static_cast<int32_t>(i); }
  // f(i, digit, rank) for the slots of a block of items.
  template <typename F>
  __device__ void each(int64_t block, int32_t* place, F f) const {
    const int64_t end = (block + 1) * per_block;
    const auto digit = [&](int64_t i) {
      const int32_t from = slot(i), id = from < 0 ? -1 : ids[from];
      return id < 0 ? -1 : (id >> shift) & (kDigits - 1);
    };
    for_items_in_order(block * per_block, end < count ? end : count, place, digit, f);
  }
};

__global__ void count_digits(Pass pass, int32_t* places) {
  for (int64_t b = grid_warp(); b < pass.blocks; b += grid_warps()) {
    pass.each(b, places + b * kDigits, [](int64_t, int32_t, int32_t) {});
  }
}

// totals[d] becomes the items of the digits before d. One warp.
__global__ void sum_over_digits(int32_t* totals) {
  int64_t before = 0;
  for (int32_t begin = 0; begin < kDigits; begin += kLanes) {
    const int64_t count = totals[begin + lane_id()];
    const int64_t end = before + sum_of_lanes_up_to_mine(count);
    totals[begin + lane_id()] = static_cast<int32_t>(end - count);
    before = __shfl_sync(kAllLanes, end, kLanes - 1);
  }
}

__global__ void move_items(Pass pass, int32_t* places, const int32_t* first, int32_t* sorted) {
  for (int64_t b = grid_warp(); b < pass.blocks; b += grid_warps()) {
    pass.each(b, places + b * kDigits, [&](int64_t i, int32_t digit, int32_t rank) {
      sorted[first[digit] + rank] = pass.slot(i);
    });
  }
}

__global__ void number_slots(int64_t slots, int64_t num_rows, const int32_t* sorted,
                             int32_t* row_of_slot, int32_t* slot_of_row) {
  for (int64_t r = grid_thread(); r < num_rows; r += grid_threads()) {
    const int32_t slot = r < slots ? sorted[r] : -1;
    slot_of_row[r] = slot;
    if (slot >= 0) row_of_slot[slot] = static_cast<int32_t>(r);
  }
}

Pass first_pass(const Call& call) {
  const int64_t slots = call.axis('T') * call.axis('K');
  Pass pass{.ids = call.in("indices").as<const int32_t>(),
            .order = nullptr,
            .count = slots,
            .per_block = std::max(kMinItemsPerBlock, ceil_div(slots, kMaxItemBlocks)),
            .blocks = 0,
            .shift = 0};
  pass.blocks = ceil_div(slots, pass.per_block);
  return pass;
}

DUOMOE_WORKSPACE(kCuda, sort_slots) {
  const Pass pass = first_pass(call);
  return piece_bytes<int32_t>(pass.blocks * kDigits) +
         piece_bytes<int32_t>(pass.blocks ? kDigits : 0) + 2 * piece_bytes<int32_t>(pass.count);
}

DUOMOE_KERNEL(kCuda, sort_slots) {
  Pass pass = first_pass(call);
  const int64_t slots = pass.count, num_rows = call.axis('R');
  const int64_t grid = ceil_div(pass.blocks, kWarps);
  constexpr int64_t kBytes = sizeof(int32_t);

  Queue queue(call);
  queue.fill(call.out("row_of_slot"), 0xff);
  int32_t* places = queue.scratch<int32_t>(pass.blocks * kDigits);
  int32_t* first = queue.scratch<int32_t>(pass.blocks ? kDigits : 0);
  int32_t* sorted[2] = {queue.scratch<int32_t>(slots), queue.scratch<int32_t>(slots)};
  int turn = 0;
  for (; pass.shift < 31; pass.shift += kBits, turn = 1 - turn) {
    queue.fill(places, 0, pass.blocks * kDigits * kBytes);
    queue.fill(sorted[turn], 0xff, slots * kBytes);
    queue.launch(count_digits, grid, kThreads, 0, pass, places);
    queue.launch(sum_over_blocks, pass.blocks ? kDigits / kThreads : 0, kThreads, 0, pass.blocks,
                 int64_t{kDigits}, places, first);
    queue.launch(sum_over_digits, pass.blocks ? 1 : 0, kLanes, 0, first);
    queue.launch(move_items, grid, kThreads, 0, pass, places, first, sorted[turn]);
    pass.order = sorted[turn];
  }
  queue.launch(number_slots, grid_for(num_rows, kThreads), kThreads, 0, slots, num_rows, pass.order,
               call.out("row_of_slot").as<int32_t>(), call.out("slot_of_row").as<int32_t>());
  return queue.status();
}

// -- place_chunks ---------------------------------------------------------------------------------

__device__ int64_t chunk_size(const int32_t* sizes, int64_t chunk) {
  return sizes[chunk] > 0 ? sizes[chunk] : 0;
}

// One block per place in the order: the sums of what lies before are taken anew by each, which for
// the few thousand chunks there are is less than a second pass. `kThreads` threads.
__global__ void copy_chunks(int64_t chunks, int64_t tokens, const int32_t* sizes,
                            const int32_t* order, int32_t* row_of_token, int32_t* token_of_row) {
  __shared__ int64_t parts[2][kWarps];
  __shared__ int again;
  for (int64_t i = blockIdx.x; i < chunks; i += gridDim.x) {
    const int64_t c = order[i];
    if (c < 0 || c >= chunks) continue;  // the same for all threads
    if (threadIdx.x == 0) again = 0;
    __syncthreads();
    int64_t token = 0, row = 0;
    for (int64_t j = threadIdx.x; j < c; j += kThreads) token += chunk_size(sizes, j);
    for (int64_t j = threadIdx.x; j < i; j += kThreads) {
      const int64_t other = order[j];
      if (other >= 0 && other < chunks) row += chunk_size(sizes, other);
      if (other == c) again = 1;
    }
    token = warp_sum(token);
    row = warp_sum(row);
    if (lane_id() == 0) {
      parts[0][warp_id()] = token;
      parts[1][warp_id()] = row;
    }
    __syncthreads();
    token = row = 0;
    for (int w = 0; w < kWarps; ++w) {
      token += parts[0][w];
      row += parts[1][w];
    }
    const bool placed = again != 0;
    __syncthreads();
    if (placed) continue;
    const int64_t room = tokens - (token > row ? token : row), size = chunk_size(sizes, c);
    const int64_t n = size < room ? size : room;
    for (int64_t j = threadIdx.x; j < n; j += kThreads) {
      row_of_token[token + j] = static_cast<int32_t>(row + j);
      token_of_row[row + j] = static_cast<int32_t>(token + j);
    }
  }
}

DUOMOE_KERNEL(kCuda, place_chunks) {
  Queue queue(call);
  queue.fill(call.out("row_of_token"), 0xff);
  queue.fill(call.out("token_of_row"), 0xff);
  queue.launch(copy_chunks, grid_for(call.axis('C'), 1), kThreads, 0, call.axis('C'),
               call.axis('T'), call.in("split_sizes").as<const int32_t>(),
               call.in("sorted_indices").as<const int32_t>(),
               call.out("row_of_token").as<int32_t>(), call.out("token_of_row").as<int32_t>());
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
