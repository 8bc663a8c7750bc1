// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels over rows of width D share. Rows are read and written in packs of 16 bytes, or,
// where a row's bytes or an address are no multiple of that (a view may start at any element), of
// one element.
//
// Row and slot numbers outside their range count as unused, so that a plan of other origin cannot
// read or write out of bounds. Nor need the maps of such a plan invert each other: what becomes of
// a row is said by slot_of_row, what becomes of a slot by row_of_slot.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "launch.h"
#include "warp.h"

namespace duomoe::cuda {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kLanes;

// The slots of T tokens by K, and how they map to R rows of D elements.
struct Plan {
  const int32_t* row_of_slot;
  const int32_t* slot_of_row;
  int64_t tokens, top_k, num_rows, width;

  __device__ int64_t slots() const { return tokens * top_k; }
  __device__ bool has_row(int64_t row) const { return row >= 0 && row < num_rows; }
  __device__ bool has_slot(int64_t slot) const { return slot >= 0 && slot < slots(); }
  // Whether a row in range is the one of its slot as the slot says, and so is written with it.
  __device__ bool joined(int64_t row, int64_t slot) const { return slot_of_row[row] == slot; }
};

inline Plan plan_of(const Call& call, bool rows_to_slots) {
  return {.row_of_slot = call.in("row_of_slot").as<const int32_t>(),
          .slot_of_row = rows_to_slots ? call.in("slot_of_row").as<const int32_t>() : nullptr,
          .tokens = call.axis('T'),
          .top_k = call.axis('K'),
          .num_rows = call.axis('R'),
          .width = call.axis('D')};
}

inline const float* weights_of(const Call& call) {
  const TensorView& weights = call.in("weights");
  return weights.present() ? weights.as<const float>() : nullptr;
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  using Element = T;
  static constexpr int kSize = kCount;
  T at[kCount];
};

// Calls f with the widest pack that fits every view's address and a row's bytes.
template <typename T, typename F>
void with_pack(int64_t width, std::initializer_list<const TensorView*> views, F f) {
  constexpr int64_t kBytes = 16;
  auto bits = static_cast<uintptr_t>(width * static_cast<int64_t>(sizeof(T)));
  for (const TensorView* view : views) bits |= reinterpret_cast<uintptr_t>(view->data);
  if (bits % kBytes == 0) {
    f(Pack<T, kBytes / sizeof(T)>{});
  } else {
    f(Pack<T, 1>{});
  }
}

// What is read or written once should not push out what is read again.
template <typename P>
__device__ P load_once(const P* from) {
  if constexpr (sizeof(P) == sizeof(uint4))
    return __builtin_bit_cast(P, __ldcs(reinterpret_cast<const uint4*>(from)));
  return *from;
}
template <typename P>
__device__ void store_once(P* to, P pack) {
  if constexpr (sizeof(P) == sizeof(uint4)) {
    __stcs(reinterpret_cast<uint4*>(to), __builtin_bit_cast(uint4, pack));
  } else {
    *to = pack;
  }
}

// factor * x in float32, rounded once. Packs of integers are copied.
template <typename P>
__device__ P scaled(float factor, P pack) {
  using T = typename P::Element;
  if constexpr (!std::is_integral_v<T>) {
#pragma unroll
    for (int i = 0; i < P::kSize; ++i)
      pack.at[i] = math::from_float<T>(factor * math::to_float(pack.at[i]));
  }
  return pack;
}

// The rows that no slot writes, 0 without a slot and weight * x of its token else, in the first
// `fill_blocks` blocks of a grid. With the maps of one plan only padding is left for them, and
// without padding they read the maps. A warp takes 16 rows at a time, which are padding together
// more often than not. `weights` may be null: 1.
constexpr int kFillRows = 16;
inline int64_t fill_blocks(const Plan& plan) {
  return grid_for(plan.num_rows, kFillRows * kRowWarps);
}

template <typename P>
__device__ void fill_rows(const Plan& plan, int64_t blocks, const P* x, const float* weights,
                          P* rows) {
  const int64_t packs = plan.width / P::kSize;
  const int lane = lane_id();
  for (int64_t first = grid_warp() * kFillRows; first < plan.num_rows;
       first += blocks * warps_per_block() * kFillRows) {
    const int64_t mine = first + lane;
    int64_t slot = -1;
    bool left = lane < kFillRows && mine < plan.num_rows;
    if (left) {
      slot = plan.slot_of_row[mine];
      if (!plan.has_slot(slot)) {
        slot = -1;
      } else {
        left = plan.row_of_slot[slot] != mine;
      }
    }
    for (unsigned todo = __ballot_sync(kAllLanes, left); todo != 0; todo &= todo - 1) {
      const int owner = __ffs(static_cast<int>(todo)) - 1;
      const int64_t from = __shfl_sync(kAllLanes, slot, owner);
      P* row = rows + (first + owner) * packs;
      if (from < 0) {
        for (int64_t i = lane; i < packs; i += kLanes) store_once(row + i, P{});
      } else {
        const P* token = x + from / plan.top_k * packs;
        const float weight = weights ? weights[from] : 1.0f;
        for (int64_t i = lane; i < packs; i += kLanes)
          store_once(row + i, scaled(weight, token[i]));
      }
    }
  }
}

}  // namespace duomoe::cuda
