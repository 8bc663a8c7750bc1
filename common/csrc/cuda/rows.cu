// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving rows between token order and expert order: permute, combine and their gradients. Row and
// slot numbers outside their range count as unused, so that a plan of other origin cannot read out
// of bounds.
#include "launch.h"
#include "warp.h"

namespace duomoe::cuda {
namespace {

using math::from_float;
using math::to_float;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;

// The slots of T tokens by K, and how they map to R rows of D elements.
struct Plan {
  const int32_t* row_of_slot;
  const int32_t* slot_of_row;
  int64_t tokens, top_k, num_rows, width;

  __device__ bool has_row(int64_t row) const { return row >= 0 && row < num_rows; }
  __device__ bool has_slot(int64_t slot) const { return slot >= 0 && slot < tokens * top_k; }
};

Plan plan_of(const Call& call, bool rows_to_slots) {
  return {.row_of_slot = call.in("row_of_slot").as<const int32_t>(),
          .slot_of_row = rows_to_slots ? call.in("slot_of_row").as<const int32_t>() : nullptr,
          .tokens = call.axis('T'),
          .top_k = call.axis('K'),
          .num_rows = call.axis('R'),
          .width = call.axis('D')};
}

// One warp copies one row of `units` units.
template <typename Unit>
__global__ void copy_rows(Plan plan, int64_t units, const Unit* x, Unit* rows) {
  for (int64_t r = grid_warp(); r < plan.num_rows; r += grid_warps()) {
    const int64_t slot = plan.slot_of_row[r];
    const Unit* from = plan.has_slot(slot) ? x + slot / plan.top_k * units : nullptr;
    for (int64_t i = lane_id(); i < units; i += kLanes)
      rows[r * units + i] = from ? from[i] : Unit{};
  }
}

DUOMOE_KERNEL(kCuda, permute) {
  const Plan plan = plan_of(call, true);
  const TensorView &x = call.in("x"), &rows = call.out("rows");
  const int64_t bytes = plan.width * static_cast<int64_t>(item_size(x.dtype));
  Queue queue(call);
  const auto copy = [&]<typename Unit>(Unit) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Unit));
    queue.launch(copy_rows<Unit>, grid_for(plan.num_rows, kWarps), kThreads, 0, plan, bytes / kSize,
                 x.as<const Unit>(), rows.as<Unit>());
  };
  // A view into a larger buffer may start at any element.
  const auto addresses = reinterpret_cast<uintptr_t>(x.data) |
                         reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(bytes);
  if (addresses % sizeof(uint4) == 0) {
    copy(uint4{});
  } else {
    copy(uint16_t{});
  }
  return queue.status();
}

// sum over k, in slot order and float32, of weights[t, k] * rows[row_of_slot[t, k]], rounded once.
// One warp sums kColumns columns of a token. `weights` may be null: 1.
constexpr int kPerLane = 8;
constexpr int64_t kColumns = kPerLane * kLanes;

template <typename T>
__global__ void gather_sum(Plan plan, const T* rows, const float* weights, T* y) {
  const int64_t parts = (plan.width + kColumns - 1) / kColumns;
  for (int64_t item = grid_warp(); item < plan.tokens * parts; item += grid_warps()) {
    const int64_t t = item / parts, first = item % parts * kColumns + lane_id();
    float sum[kPerLane] = {};
    for (int64_t slot = t * plan.top_k; slot < (t + 1) * plan.top_k; ++slot) {
      const int64_t row = plan.row_of_slot[slot];
      if (!plan.has_row(row)) continue;
      const float weight = weights ? weights[slot] : 1.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int64_t column = first + i * kLanes;
        if (column < plan.width)
          sum[i] = math::fma(weight, to_float(rows[row * plan.width + column]), sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t column = first + i * kLanes;
      if (column < plan.width) y[t * plan.width + column] = from_float<T>(sum[i]);
    }
  }
}

Status run_gather_sum(const Call& call, const TensorView& rows, const float* weights,
                      const TensorView& y) {
  const Plan plan = plan_of(call, false);
  Queue queue(call);
  with_type(rows.dtype, [&]<typename T>(T) {
    queue.launch(gather_sum<T>, grid_for(plan.tokens * ceil_div(plan.width, kColumns), kWarps),
                 kThreads, 0, plan, rows.as<const T>(), weights, y.as<T>());
  });
  return queue.status();
}

const float* weights_of(const Call& call) {
  const TensorView& weights = call.in("weights");
  return weights.present() ? weights.as<const float>() : nullptr;
}

DUOMOE_KERNEL(kCuda, permute_bwd) {
  return run_gather_sum(call, call.in("grad_rows"), nullptr, call.out("grad_x"));
}

DUOMOE_KERNEL(kCuda, combine) {
  return run_gather_sum(call, call.in("rows"), weights_of(call), call.out("y"));
}

// grad_rows = weight * grad_y of the row's token. One warp per row.
template <typename T>
__global__ void scale_rows(Plan plan, const T* grad_y, const float* weights, T* grad_rows) {
  for (int64_t r = grid_warp(); r < plan.num_rows; r += grid_warps()) {
    const int64_t slot = plan.slot_of_row[r];
    T* to = grad_rows + r * plan.width;
    if (plan.has_slot(slot)) {
      const float weight = weights ? weights[slot] : 1.0f;
      const T* from = grad_y + slot / plan.top_k * plan.width;
      for (int64_t i = lane_id(); i < plan.width; i += kLanes)
        to[i] = from_float<T>(weight * to_float(from[i]));
    } else {
      for (int64_t i = lane_id(); i < plan.width; i += kLanes) to[i] = from_float<T>(0.0f);
    }
  }
}

// grad_weights = dot(grad_y, rows), in the lane order of math/router.h. One warp per slot.
template <typename T>
__global__ void dot_rows(Plan plan, const T* grad_y, const T* rows, float* grad_weights) {
  for (int64_t slot = grid_warp(); slot < plan.tokens * plan.top_k; slot += grid_warps()) {
    const int64_t row = plan.row_of_slot[slot];
    float dot = 0.0f;
    if (plan.has_row(row)) {
      const T* a = grad_y + slot / plan.top_k * plan.width;
      const T* b = rows + row * plan.width;
      dot = lane_sum(plan.width, [=](int64_t i) { return to_float(a[i]) * to_float(b[i]); });
    }
    if (lane_id() == 0) grad_weights[slot] = dot;
  }
}

DUOMOE_KERNEL(kCuda, combine_bwd) {
  const Plan plan = plan_of(call, true);
  const TensorView &grad_y = call.in("grad_y"), &rows = call.in("rows");
  Queue queue(call);
  with_type(rows.dtype, [&]<typename T>(T) {
    queue.launch(scale_rows<T>, grid_for(plan.num_rows, kWarps), kThreads, 0, plan,
                 grad_y.as<const T>(), weights_of(call), call.out("grad_rows").as<T>());
    queue.launch(dot_rows<T>, grid_for(plan.tokens * plan.top_k, kWarps), kThreads, 0, plan,
                 grad_y.as<const T>(), rows.as<const T>(), call.out("grad_weights").as<float>());
  });
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
