// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The stable counting sort of the slots by expert, for numbers of experts whose histograms fit
// shared memory, and their rows. Blocks of threads take runs of slots:
//   count_slots    each block's slots by expert;
//   place_slots    every block adds up the counts of the blocks before it and those of all, places
//                  the experts' rows, and ranks its slots: by warp, then over the block's warps.
// Adding up takes every block through all counts. They are 16-bit and one block per multiprocessor
// has written them, which is less than a kernel of its own costs. Where the counts do not fit 16
// bits, a third kernel, scan_counts, adds up between the two. One tile of slots needs place_slots
// alone. No kernel needs memory to be zero before it, and every output is written by one of them.
#pragma once

#include "../math/scalar.h"
#include "launch.h"
#include "slot_order.cuh"

namespace duomoe::cuda {

constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / kLanes;
constexpr int kSteps = 4;  // slots of a thread in one tile
constexpr int64_t kTile = int64_t{kSortThreads} * kSteps;
// A little below the H200's 132 multiprocessors; results do not depend on it.
constexpr int64_t kSummedBlocks = 128;
constexpr int64_t kScanRows = 16;
constexpr int64_t kScannedBlocks = kLanes * kScanRows;
constexpr int64_t kMaxGroups = 32;
constexpr int64_t kMaxSortExperts = 768;  // what 48 KB of shared memory hold

// One block of counts for each block of slots, `pitch` counts long.
struct SlotBlocks {
  const int32_t* expert_of_slot = nullptr;
  int64_t count = 0, per_block = 0;
  int32_t blocks = 0, experts = 0;
  int32_t pitch = 0;     // experts, rounded up to 8 (16 bytes of counts)
  int32_t id_bits = 0;   // a multiple of 4
  bool scanned = false;  // 32-bit counts and scan_counts
  // place_slots adds up `groups` groups of `group_rows` rows of counts side by side; what a group
  // sums to fits 16 bits.
  int32_t groups = 0, group_rows = 0;

  __host__ __device__ bool one_tile() const { return count <= kTile; }
  __host__ __device__ int64_t begin(int64_t block) const {
    return block * per_block < count ? block * per_block : count;
  }
  __device__ int32_t tile() const {
    return static_cast<int32_t>(per_block < kTile ? per_block : kTile);
  }
  __device__ int32_t expert(int64_t slot) const {
    const int32_t e = expert_of_slot[slot];
    return static_cast<uint32_t>(e) < static_cast<uint32_t>(experts) ? e : -1;
  }

  SlotBlocks(const int32_t* ids, int64_t slots, int64_t num_experts)
      : expert_of_slot(ids),
        count(slots),
        experts(static_cast<int32_t>(num_experts)),
        pitch(static_cast<int32_t>(ceil_div(num_experts, 8) * 8)) {
    while ((int64_t{1} << id_bits) < num_experts) id_bits += 4;
    const auto cut = [&](int64_t at_most) {
      const int64_t n = std::max<int64_t>(ceil_div(count, at_most), 1);
      const int64_t unit = n <= kTile ? kSortThreads : kTile;
      per_block = ceil_div(n, unit) * unit;
      blocks = static_cast<int32_t>(ceil_div(count, per_block));
    };
    cut(one_tile() ? 1 : kSummedBlocks);
    if (one_tile()) return;
    groups = static_cast<int32_t>(std::min(kMaxGroups, int64_t{kSortThreads} / (pitch / 8)));
    group_rows = static_cast<int32_t>(ceil_div(blocks, groups));
    scanned = group_rows * per_block >= 1 << 16;
    if (scanned) {
      groups = 0;
      cut(kScannedBlocks);
    }
  }
  // 32-bit words of all counts.
  int64_t words() const { return one_tile() ? 0 : int64_t{blocks} * pitch / (scanned ? 1 : 2); }
  size_t shared_bytes() const {
    return static_cast<size_t>(pitch) * (2 * kSortWarps + 8) + size_t{4} * groups * pitch;
  }
};

// How rows are handed out, and where to.
struct Rows {
  uint32_t num_rows, capacity, alignment;
  int32_t *row_of_slot, *slot_of_row, *expert_counts, *routed_counts, *expert_offsets;
  // If given, all slots in expert order without drops, and the order of their weights; first[e]:
  // the slots of the experts before e. Then no slot gets a row.
  const float* weights;
  int32_t* sorted_slots;
  uint32_t* sorted_keys;
  int64_t* first;

  __device__ uint32_t padded(uint32_t rows) const {
    const uint32_t end = (rows + alignment - 1) / alignment * alignment;
    return end < num_rows ? end : num_rows;
  }
};

static __global__ void __launch_bounds__(kSortThreads)
    count_slots(SlotBlocks slots, uint32_t* counts) {
  extern __shared__ uint32_t histogram[];
#pragma unroll 1
  for (int e = threadIdx.x; e < slots.pitch; e += kSortThreads) histogram[e] = 0;
  __syncthreads();
  const int64_t end = slots.begin(blockIdx.x + 1);
#pragma unroll 1
  for (int64_t first = slots.begin(blockIdx.x) + threadIdx.x; first < end; first += kTile) {
    int32_t expert[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t slot = first + i * kSortThreads;
      expert[i] = slot < end ? slots.expert(slot) : -1;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (expert[i] >= 0) atomicAdd(&histogram[expert[i]], 1u);
    }
  }
  __syncthreads();
  if (slots.scanned) {
    uint32_t* row = counts + int64_t{blockIdx.x} * slots.pitch;
#pragma unroll 1
    for (int e = threadIdx.x; e < slots.pitch; e += kSortThreads) row[e] = histogram[e];
  } else {
    uint32_t* row = counts + int64_t{blockIdx.x} * (slots.pitch / 2);
#pragma unroll 1
    for (int p = threadIdx.x; p < slots.pitch / 2; p += kSortThreads)
      row[p] = histogram[2 * p] | histogram[2 * p + 1] << 16;
  }
}

// counts[b][e] becomes the sum over the blocks before b. Lanes take experts, warps runs of rows.
static __global__ void __launch_bounds__(kLanes* kLanes)
    scan_counts(SlotBlocks slots, uint32_t* counts, int32_t* routed_counts) {
  __shared__ uint32_t sums[kLanes][kLanes];
  const int e = blockIdx.x * kLanes + lane_id();
  const int rows = (slots.blocks + kLanes - 1) / kLanes, begin = warp_id() * rows;
  uint32_t row[kScanRows], sum = 0;
#pragma unroll
  for (int i = 0; i < kScanRows; ++i) {
    const bool mine = e < slots.experts && i < rows && begin + i < slots.blocks;
    row[i] = mine ? __ldcg(counts + int64_t{begin + i} * slots.pitch + e) : 0;
    sum += row[i];
  }
  sums[warp_id()][lane_id()] = sum;
  __syncthreads();
  uint32_t before = 0;
  for (int w = 0; w < warp_id(); ++w) before += sums[w][lane_id()];
#pragma unroll
  for (int i = 0; i < kScanRows; ++i) {
    if (e < slots.experts && i < rows && begin + i < slots.blocks)
      counts[int64_t{begin + i} * slots.pitch + e] = before;
    before += row[i];
  }
  if (warp_id() == kLanes - 1 && e < slots.experts) routed_counts[e] = static_cast<int32_t>(before);
}

__device__ inline void add_pairs(uint4& sum, const uint4& x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

// before[e] and total[e]: the slots of expert e in the blocks before this one and in all. Two
// counts to a word; no sum of a group carries into the upper one. `parts` holds 2 * groups * pitch
// counts.
__device__ inline void sum_counts(const SlotBlocks& slots, const uint32_t* counts, uint4* parts,
                                  uint32_t* before, uint32_t* total) {
  constexpr int kLoads = 8;
  const int width = slots.pitch / 8;
  const int group = threadIdx.x / width, column = threadIdx.x % width;
  const uint4* rows = reinterpret_cast<const uint4*>(counts);
  if (group < slots.groups) {
    const int begin = group * slots.group_rows;
    const int end = min(begin + slots.group_rows, slots.blocks);
    uint4 earlier{}, all{};
#pragma unroll 1
    for (int first = begin; first < end; first += kLoads) {
      uint4 row[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        row[i] = first + i < end ? __ldcg(rows + (first + i) * width + column) : uint4{};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        add_pairs(all, row[i]);
        if (first + i < static_cast<int>(blockIdx.x)) add_pairs(earlier, row[i]);
      }
    }
    parts[group * width + column] = earlier;
    parts[(slots.groups + group) * width + column] = all;
  }
  __syncthreads();
  const int pairs = slots.pitch / 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * pairs; i += kSortThreads) {
    const bool all = i >= pairs;
    const int p = all ? i - pairs : i;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(parts) + all * slots.groups * pairs;
    uint32_t low = 0, high = 0;
#pragma unroll 8
    for (int g = 0; g < slots.groups; ++g) {
      const uint32_t pair = words[g * pairs + p];
      low += pair & 0xffff;
      high += pair >> 16;
    }
    uint32_t* sums = all ? total : before;
    sums[2 * p] = low;
    sums[2 * p + 1] = high;
  }
}

// Blocks of rows start at multiples of the alignment; what passes the last row is dropped, and
// cutting every sum at num_rows is what dropping does to it, in any order. In: before and total of
// sum_counts. Out: place[e], in the memory of `before`, the row of the expert's first slot in this
// block, or its place in the sorted order; limit[e], in that of `total`, the end of the expert's
// kept rows. Returns the end of all.
__device__ inline uint32_t place_experts(const SlotBlocks& slots, const Rows& out, uint32_t* place,
                                         uint32_t* limit) {
  __shared__ uint32_t warp_rows[kSortWarps], warp_slots[kSortWarps];
  const auto add_rows = [&](uint32_t a, uint32_t b) { return min(a + b, out.num_rows); };
  const int each = (slots.experts + kSortThreads - 1) / kSortThreads;
  const int first = threadIdx.x * each, last = min(first + each, slots.experts);
  const auto wanted = [&](int e) { return min(limit[e], out.capacity); };
  uint32_t rows = 0, routed = 0;
#pragma unroll 1
  for (int e = first; e < last; ++e) {
    rows = add_rows(rows, out.padded(wanted(e)));
    routed += limit[e];
  }
  uint32_t row = rows, slot = routed;  // up to this lane, then before it
  for (int width = 1; width < kLanes; width *= 2) {
    const uint32_t r = __shfl_up_sync(kAllLanes, row, width);
    const uint32_t s = __shfl_up_sync(kAllLanes, slot, width);
    if (lane_id() >= width) {
      row = add_rows(row, r);
      slot += s;
    }
  }
  if (lane_id() == kLanes - 1) {
    warp_rows[warp_id()] = row;
    warp_slots[warp_id()] = slot;
  }
  row = __shfl_up_sync(kAllLanes, row, 1);
  slot = __shfl_up_sync(kAllLanes, slot, 1);
  if (lane_id() == 0) row = slot = 0;
  __syncthreads();
  uint32_t end = 0;
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    if (w < warp_id()) {
      row = add_rows(row, warp_rows[w]);
      slot += warp_slots[w];
    }
    end = add_rows(end, warp_rows[w]);
  }
#pragma unroll 1
  for (int e = first; e < last; ++e) {
    const uint32_t all = limit[e], want = wanted(e), room = out.num_rows - row;
    const uint32_t kept = min(want, room), next = add_rows(row, out.padded(want));
    place[e] += out.sorted_slots ? slot : row;
    limit[e] = row + kept;
    if (blockIdx.x == 0) {
      out.expert_counts[e] = static_cast<int32_t>(kept);
      out.expert_offsets[e + 1] = static_cast<int32_t>(next);
      if (!slots.scanned) out.routed_counts[e] = static_cast<int32_t>(all);
      if (out.first) out.first[e] = slot;
    }
    row = next;
    slot += all;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) out.expert_offsets[0] = 0;
  return end;
}

// A tile's slots belong to the warps in runs, each run 32 slots at a time.
struct Tile {
  int64_t first;  // the thread's first slot
  int64_t end;
  int32_t run;
  int32_t expert[kSteps];  // -1 if unused, or no slot
  int32_t rank[kSteps];    // among the run's slots of the expert

  __device__ bool has(int step) const { return step * kLanes < run && first + step * kLanes < end; }
};

// Reads a tile and ranks its slots. `histogram`: the warp's own, by expert.
__device__ inline void rank_run(const SlotBlocks& slots, int64_t tile_begin, int64_t end,
                                uint16_t* histogram, Tile& tile) {
  tile.run = slots.tile() / kSortWarps;
  tile.first = tile_begin + warp_id() * tile.run + lane_id();
  tile.end = end;
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    tile.expert[i] = tile.has(i) ? slots.expert(tile.first + i * kLanes) : -1;
  uint4* words = reinterpret_cast<uint4*>(histogram);
  __syncwarp();  // others may still read what they had of the tile before
#pragma unroll 1
  for (int i = lane_id(); i < slots.pitch / 8; i += kLanes) words[i] = uint4{};
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    tile.rank[i] = 0;
    if (i * kLanes >= tile.run) continue;  // the same for all lanes
    const int32_t e = tile.expert[i];
    const unsigned peers = lanes_with_key(e, slots.id_bits);
    const int before = __popc(peers & ((1u << lane_id()) - 1));
    const int32_t earlier = e >= 0 ? histogram[e] : 0;
    tile.rank[i] = earlier + before;
    __syncwarp();
    if (e >= 0 && before == 0) histogram[e] = static_cast<uint16_t>(earlier + __popc(peers));
    __syncwarp();
  }
}

// histogram[w][e] becomes the sum over the warps before w; returns the sums over all for experts
// 2i and 2i + 1 in thread i.
__device__ inline uint32_t sum_over_warps(const SlotBlocks& slots, uint16_t* histogram) {
  const int pairs = slots.pitch / 2;
  uint32_t sum = 0;
  if (threadIdx.x < pairs) {
    uint32_t* words = reinterpret_cast<uint32_t*>(histogram) + threadIdx.x;
    uint32_t counts[kSortWarps];
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) counts[w] = words[w * pairs];
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) {
      words[w * pairs] = sum;
      sum += counts[w];
    }
  }
  return sum;
}

// `counts`: the rows of count_slots, or of scan_counts; not read for one tile. More blocks than
// slots.blocks may be there to write the rows without a slot.
static __global__ void __launch_bounds__(kSortThreads, 2)
    place_slots(SlotBlocks slots, Rows out, const uint32_t* counts) {
  extern __shared__ uint4 memory[];
  uint4* parts = memory;
  uint16_t* histogram = reinterpret_cast<uint16_t*>(parts + slots.groups * (slots.pitch / 4));
  uint32_t* place = reinterpret_cast<uint32_t*>(histogram + kSortWarps * slots.pitch);
  uint32_t* limit = place + slots.pitch;
  uint16_t* mine = histogram + warp_id() * slots.pitch;
  // With one tile every block counts it, the first one writes.
  const int64_t block = slots.one_tile() ? 0 : blockIdx.x;
  const bool writes = !slots.one_tile() || blockIdx.x == 0;
  const int64_t begin = slots.begin(block), end = slots.begin(block + 1);
  const int pair = 2 * threadIdx.x;
  uint32_t all_rows = 0, in_tile = 0;
  int64_t tile_begin = begin;
  do {
    Tile tile;
    rank_run(slots, tile_begin, end, mine, tile);
    __syncthreads();
    if (tile_begin != begin && pair < slots.pitch) {
      place[pair] += in_tile & 0xffff;
      place[pair + 1] += in_tile >> 16;
    }
    in_tile = sum_over_warps(slots, histogram);
    if (tile_begin == begin) {
      if (slots.one_tile()) {
        if (pair < slots.pitch) {
          place[pair] = place[pair + 1] = 0;
          limit[pair] = in_tile & 0xffff;
          limit[pair + 1] = in_tile >> 16;
        }
      } else if (slots.scanned) {
        const bool counted = block < slots.blocks;
#pragma unroll 1
        for (int e = threadIdx.x; e < slots.experts; e += kSortThreads) {
          place[e] = counted ? __ldcg(counts + block * slots.pitch + e) : 0;
          limit[e] = static_cast<uint32_t>(__ldcg(out.routed_counts + e));
        }
      } else {
        sum_counts(slots, counts, parts, place, limit);
      }
      __syncthreads();
      all_rows = place_experts(slots, out, place, limit);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!writes || !tile.has(i)) continue;
      const int64_t slot = tile.first + i * kLanes;
      const int32_t e = tile.expert[i];
      int32_t row = -1;
      if (e >= 0) {
        const uint32_t to = place[e] + mine[e] + tile.rank[i];
        if (out.sorted_slots) {
          out.sorted_slots[to] = static_cast<int32_t>(slot);
          out.sorted_keys[to] = math::order_key(out.weights[slot]);
        } else if (to < limit[e]) {
          row = static_cast<int32_t>(to);
          out.slot_of_row[to] = static_cast<int32_t>(slot);
        }
      }
      out.row_of_slot[slot] = row;
    }
    tile_begin += kTile;
  } while (tile_begin < end);

  // Rows between the experts' last ones and the next multiple of the alignment, and after all.
#pragma unroll 1
  for (int64_t e = grid_warp(); e < slots.experts; e += grid_warps()) {
    const int64_t gap_end = out.padded(limit[e]);
#pragma unroll 1
    for (int64_t row = int64_t{limit[e]} + lane_id(); row < gap_end; row += kLanes)
      out.slot_of_row[row] = -1;
  }
  const int64_t step = int64_t{gridDim.x} * kSortThreads;
#pragma unroll 1
  for (int64_t row = all_rows + int64_t{blockIdx.x} * kSortThreads + threadIdx.x;
       row < out.num_rows; row += step) {
    out.slot_of_row[row] = -1;
  }
}

// Two or three kernels; `counts` has slots.words() words.
inline void sort_by_expert(Queue& queue, const SlotBlocks& slots, const Rows& rows,
                           uint32_t* counts) {
  constexpr int64_t kRowsPerBlock = 1 << 13;
  const int64_t grid = std::max<int64_t>(
      {slots.blocks, std::min(ceil_div(rows.num_rows, kRowsPerBlock), kSummedBlocks), 1});
  if (slots.one_tile()) {
    return queue.launch(place_slots, grid, kSortThreads, slots.shared_bytes(), slots, rows, counts);
  }
  queue.launch(count_slots, slots.blocks, kSortThreads, slots.pitch * sizeof(uint32_t), slots,
               counts);
  if (slots.scanned) {
    queue.launch(scan_counts, ceil_div(slots.experts, kLanes), kLanes * kLanes, 0, slots, counts,
                 rows.routed_counts);
  }
  queue.launch(place_slots, grid, kSortThreads, slots.shared_bytes(), slots, rows, counts);
}

}  // namespace duomoe::cuda
