// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Where rows go, from a map of tokens by experts, from ids of any size, from chunk sizes, and back
// from the maps that a caller hands in. Numbers outside their range count as unused.
#include <algorithm>
#include <atomic>
#include <vector>

#include "parallel.h"

namespace duomoe::cpu {
namespace {

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

DUOMOE_KERNEL(kCpu, plan_mask) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), num_rows = call.axis('R');
  const int64_t limit = call.integer("limit"), alignment = call.integer("alignment");
  const uint8_t* map = call.in("routing_map").as<const uint8_t>();
  int32_t* row_of_slot = call.out("row_of_slot").as<int32_t>();
  int32_t* slot_of_row = call.out("slot_of_row").as<int32_t>();
  int32_t* row_id_map = call.out("row_id_map").as<int32_t>();
  int32_t* expert_counts = call.out("expert_counts").as<int32_t>();
  int32_t* routed_counts = call.out("routed_counts").as<int32_t>();
  int32_t* expert_offsets = call.out("expert_offsets").as<int32_t>();
  int32_t* pad_offsets = call.out("pad_offsets").as<int32_t>();

  // rank[b][e]: tokens of expert e in block b; then the rank of the block's first one.
  const int64_t per_block = rows_per_task(experts);
  const int64_t blocks = (tokens + per_block - 1) / per_block;
  std::vector<int32_t> rank(blocks * experts, 0);
  parallel_blocks(call, tokens, per_block, [&](int64_t begin, int64_t end) {
    int32_t* count = rank.data() + begin / per_block * experts;
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t e = 0; e < experts; ++e) count[e] += map[t * experts + e] != 0;
    }
  });
  std::fill(routed_counts, routed_counts + experts, 0);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t e = 0; e < experts; ++e) {
      const int32_t count = rank[b * experts + e];
      rank[b * experts + e] = routed_counts[e];
      routed_counts[e] += count;
    }
  }

  // `limit` cuts the rows without padding, num_rows those with it.
  int64_t left = limit >= 0 ? limit : tokens * experts, offset = 0, unpadded = 0;
  expert_offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t wanted = std::min<int64_t>(routed_counts[e], left);
    const int64_t kept = std::min(wanted, num_rows - offset);
    expert_counts[e] = static_cast<int32_t>(kept);
    pad_offsets[e] = static_cast<int32_t>(offset - unpadded);
    left -= wanted;
    unpadded += kept;
    offset = std::min(num_rows, offset + round_up(kept, alignment));
    expert_offsets[e + 1] = static_cast<int32_t>(offset);
  }

  std::fill(slot_of_row, slot_of_row + num_rows, -1);
  parallel_blocks(call, tokens, per_block, [&](int64_t begin, int64_t end) {
    int32_t* next = rank.data() + begin / per_block * experts;
    for (int64_t t = begin; t < end; ++t) {
      int32_t* line = row_id_map + t * (2 * experts + 1);
      std::fill(line, line + 2 * experts, -1);
      int32_t n = 0;
      for (int64_t e = experts - 1; e >= 0; --e) {
        const int64_t slot = t * experts + e;
        row_of_slot[slot] = -1;
        if (!map[slot]) continue;
        const int32_t place = next[e]++;
        if (place >= expert_counts[e]) continue;
        const int32_t row = expert_offsets[e] + place;
        row_of_slot[slot] = row;
        slot_of_row[row] = static_cast<int32_t>(slot);
        line[n] = row - pad_offsets[e];
        line[experts + n] = static_cast<int32_t>(e);
        ++n;
      }
      line[2 * experts] = n;
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, read_row_map) {
  const int64_t experts = call.axis('E'), num_rows = call.integer("num_rows");
  const int32_t* row_id_map = call.in("row_id_map").as<const int32_t>();
  const TensorView& pads = call.in("pad_offsets");
  const int32_t* pad_offsets = pads.present() ? pads.as<const int32_t>() : nullptr;
  int32_t* row_of_slot = call.out("row_of_slot").as<int32_t>();
  parallel_blocks(call, call.axis('T'), rows_per_task(experts), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* line = row_id_map + t * (2 * experts + 1);
      int32_t* rows = row_of_slot + t * experts;
      std::fill(rows, rows + experts, -1);
      const int64_t n = std::min<int64_t>(line[2 * experts], experts);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t e = line[experts + i];
        if (e < 0 || e >= experts || line[i] < 0) continue;
        const int64_t row = int64_t{line[i]} + (pad_offsets ? pad_offsets[e] : 0);
        rows[e] = row >= 0 && row < num_rows ? static_cast<int32_t>(row) : -1;
      }
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, invert_rows) {
  const int64_t slots = call.axis('T') * call.axis('K'), num_rows = call.axis('R');
  const int32_t* row_of_slot = call.in("row_of_slot").as<const int32_t>();
  int32_t* slot_of_row = call.out("slot_of_row").as<int32_t>();
  std::fill(slot_of_row, slot_of_row + num_rows, -1);
  parallel_blocks(call, slots, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      if (row_of_slot[slot] < 0 || row_of_slot[slot] >= num_rows) continue;
      const std::atomic_ref<int32_t> target(slot_of_row[row_of_slot[slot]]);
      int32_t old = target.load(std::memory_order_relaxed);
      while (old < slot && !target.compare_exchange_weak(old, static_cast<int32_t>(slot))) {
      }
    }
  });
  return {};
}

// By digits of 11 bits, the lowest first; as many as the largest id has.
DUOMOE_KERNEL(kCpu, sort_slots) {
  constexpr int kBits = 11;
  constexpr int32_t kDigits = 1 << kBits;
  const int64_t slots = call.axis('T') * call.axis('K'), num_rows = call.axis('R');
  const int32_t* ids = call.in("indices").as<const int32_t>();
  int32_t* row_of_slot = call.out("row_of_slot").as<int32_t>();
  int32_t* slot_of_row = call.out("slot_of_row").as<int32_t>();
  std::vector<int32_t> order, sorted;
  int32_t largest = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (ids[slot] < 0) continue;
    order.push_back(static_cast<int32_t>(slot));
    largest = std::max(largest, ids[slot]);
  }
  sorted.resize(order.size());
  for (int shift = 0; shift < 31 && (shift == 0 || largest >> shift); shift += kBits) {
    int64_t first[kDigits + 1] = {};
    for (const int32_t slot : order) ++first[((ids[slot] >> shift) & (kDigits - 1)) + 1];
    for (int32_t d = 0; d < kDigits; ++d) first[d + 1] += first[d];
    for (const int32_t slot : order) sorted[first[(ids[slot] >> shift) & (kDigits - 1)]++] = slot;
    order.swap(sorted);
  }
  std::fill(row_of_slot, row_of_slot + slots, -1);
  std::fill(slot_of_row, slot_of_row + num_rows, -1);
  const int64_t used = std::min<int64_t>(num_rows, static_cast<int64_t>(order.size()));
  for (int64_t r = 0; r < used; ++r) {
    slot_of_row[r] = order[r];
    row_of_slot[order[r]] = static_cast<int32_t>(r);
  }
  return {};
}

DUOMOE_KERNEL(kCpu, place_chunks) {
  const int64_t chunks = call.axis('C'), tokens = call.axis('T');
  const int32_t* sizes = call.in("split_sizes").as<const int32_t>();
  const int32_t* order = call.in("sorted_indices").as<const int32_t>();
  int32_t* row_of_token = call.out("row_of_token").as<int32_t>();
  int32_t* token_of_row = call.out("token_of_row").as<int32_t>();
  std::fill(row_of_token, row_of_token + tokens, -1);
  std::fill(token_of_row, token_of_row + tokens, -1);
  std::vector<int64_t> first(chunks + 1, 0);
  for (int64_t c = 0; c < chunks; ++c) first[c + 1] = first[c] + std::max(0, sizes[c]);
  std::vector<bool> placed(chunks, false);
  int64_t row = 0;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t c = order[i];
    if (c < 0 || c >= chunks) continue;
    const int64_t size = first[c + 1] - first[c];
    const int64_t n = std::min(size, tokens - std::max(row, first[c]));
    for (int64_t j = 0; j < n && !placed[c]; ++j) {
      row_of_token[first[c] + j] = static_cast<int32_t>(row + j);
      token_of_row[row + j] = static_cast<int32_t>(first[c] + j);
    }
    placed[c] = true;
    row += size;
  }
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
