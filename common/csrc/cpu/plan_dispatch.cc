// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// A stable counting sort of the slots by expert: histograms of fixed blocks of slots, a prefix over
// experts and blocks, then every block gives its slots their rows in order.
#include <algorithm>
#include <numeric>
#include <vector>

#include "../math/scalar.h"
#include "../options.h"
#include "parallel.h"

namespace duomoe::cpu {
namespace {

constexpr int64_t kSlotsPerBlock = 1 << 13;

// For experts whose rows are those of the largest weights: a slot's place in its expert is among
// all of the expert's slots, and then among the kept ones.
void assign_by_weight(const Call& call, const std::vector<int32_t>& sorted,
                      const std::vector<int64_t>& first, int32_t* row_of_slot,
                      int32_t* slot_of_row) {
  const float* weights = call.in("weights").as<const float>();
  const int32_t* counts = call.out("expert_counts").as<const int32_t>();
  const int32_t* offsets = call.out("expert_offsets").as<const int32_t>();
  const int64_t capacity = call.integer("capacity");
  parallel_blocks(call, std::ssize(first) - 1, 1, [&](int64_t e, int64_t) {
    std::vector<int32_t> slots(sorted.begin() + first[e], sorted.begin() + first[e + 1]);
    if (capacity < std::ssize(slots)) {
      // The largest weights, ties in row order; then row order again.
      std::stable_sort(slots.begin(), slots.end(), [&](int32_t a, int32_t b) {
        return math::order_key(weights[a]) > math::order_key(weights[b]);
      });
      std::sort(slots.begin(), slots.begin() + capacity);
    }
    for (int64_t i = 0; i < std::ssize(slots); ++i) {
      const int32_t row = i < counts[e] ? static_cast<int32_t>(offsets[e] + i) : -1;
      row_of_slot[slots[i]] = row;
      if (row >= 0) slot_of_row[row] = slots[i];
    }
  });
}

DUOMOE_KERNEL(kCpu, plan_dispatch) {
  const int64_t experts = call.axis('E'), num_rows = call.axis('R');
  const int64_t slots = call.axis('T') * call.axis('K');
  const int64_t capacity = call.integer("capacity"), alignment = call.integer("alignment");
  const bool by_weight =
      call.choice<DropOrder>("drop_order") == DropOrder::kWeight && capacity >= 0;
  const int32_t* expert_of_slot = call.in("indices").as<const int32_t>();
  int32_t* row_of_slot = call.out("row_of_slot").as<int32_t>();
  int32_t* slot_of_row = call.out("slot_of_row").as<int32_t>();
  int32_t* expert_counts = call.out("expert_counts").as<int32_t>();
  int32_t* routed_counts = call.out("routed_counts").as<int32_t>();
  int32_t* expert_offsets = call.out("expert_offsets").as<int32_t>();

  auto used = [&](int64_t slot) {
    return expert_of_slot[slot] >= 0 && expert_of_slot[slot] < experts;
  };

  // histogram[b][e]: slots of expert e in block b; then the place of the block's first one within
  // the expert.
  const int64_t blocks = (slots + kSlotsPerBlock - 1) / kSlotsPerBlock;
  std::vector<int32_t> histogram(blocks * experts, 0);
  parallel_blocks(call, slots, kSlotsPerBlock, [&](int64_t begin, int64_t end) {
    int32_t* count = histogram.data() + begin / kSlotsPerBlock * experts;
    for (int64_t slot = begin; slot < end; ++slot) {
      if (used(slot)) ++count[expert_of_slot[slot]];
    }
  });
  std::fill(routed_counts, routed_counts + experts, 0);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t e = 0; e < experts; ++e) {
      const int32_t count = histogram[b * experts + e];
      histogram[b * experts + e] = routed_counts[e];
      routed_counts[e] += count;
    }
  }

  // Blocks start at multiples of `alignment`; what passes the last row is dropped. The rows between
  // them have no slot.
  int64_t offset = 0;
  expert_offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t kept = routed_counts[e];
    if (capacity >= 0) kept = std::min(kept, capacity);
    kept = std::max<int64_t>(0, std::min(kept, num_rows - offset));
    expert_counts[e] = static_cast<int32_t>(kept);
    const int64_t end = offset + kept;
    offset = std::min(num_rows, offset + (kept + alignment - 1) / alignment * alignment);
    std::fill(slot_of_row + end, slot_of_row + offset, -1);
    expert_offsets[e + 1] = static_cast<int32_t>(offset);
  }
  std::fill(slot_of_row + offset, slot_of_row + num_rows, -1);

  std::vector<int64_t> first(by_weight ? experts + 1 : 0, 0);
  for (int64_t e = 0; by_weight && e < experts; ++e) first[e + 1] = first[e] + routed_counts[e];
  std::vector<int32_t> sorted(by_weight ? first[experts] : 0);
  parallel_blocks(call, slots, kSlotsPerBlock, [&](int64_t begin, int64_t end) {
    int32_t* place = histogram.data() + begin / kSlotsPerBlock * experts;
    for (int64_t slot = begin; slot < end; ++slot) {
      row_of_slot[slot] = -1;
      if (!used(slot)) continue;
      const int32_t e = expert_of_slot[slot], i = place[e]++;
      if (by_weight) {
        sorted[first[e] + i] = static_cast<int32_t>(slot);
      } else if (i < expert_counts[e]) {
        row_of_slot[slot] = expert_offsets[e] + i;
        slot_of_row[expert_offsets[e] + i] = static_cast<int32_t>(slot);
      }
    }
  });
  if (by_weight) assign_by_weight(call, sorted, first, row_of_slot, slot_of_row);
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
