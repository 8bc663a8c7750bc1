// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving rows between token order and expert order: permute, combine and their gradients; and
// scaling rows. Row and slot numbers outside their range count as unused, so that a plan of other
// origin cannot read out of bounds.
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

const float* weights_of(const Call& call) {
  const TensorView& weights = call.in("weights");
  return weights.present() ? weights.as<const float>() : nullptr;
}

// --- from tokens to rows -------------------------------------------------------------------------

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

Status run_copy_rows(const Call& call, const TensorView& x, const TensorView& rows) {
  const Plan plan = plan_of(call, true);
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

// rows = weight * x of the row's token, 0 without one. One warp per row. `weights` may be null: 1.
template <typename T>
__global__ void spread(Plan plan, const T* x, const float* weights, T* rows) {
  for (int64_t r = grid_warp(); r < plan.num_rows; r += grid_warps()) {
    const int64_t slot = plan.slot_of_row[r];
    T* to = rows + r * plan.width;
    if (plan.has_slot(slot)) {
      const float weight = weights ? weights[slot] : 1.0f;
      const T* from = x + slot / plan.top_k * plan.width;
      for (int64_t i = lane_id(); i < plan.width; i += kLanes)
        to[i] = from_float<T>(weight * to_float(from[i]));
    } else {
      for (int64_t i = lane_id(); i < plan.width; i += kLanes) to[i] = from_float<T>(0.0f);
    }
  }
}

void run_spread(Queue& queue, const Call& call, const TensorView& x, const TensorView& rows) {
  const Plan plan = plan_of(call, true);
  with_type(x.dtype, [&]<typename T>(T) {
    queue.launch(spread<T>, grid_for(plan.num_rows, kWarps), kThreads, 0, plan, x.as<const T>(),
                 weights_of(call), rows.as<T>());
  });
}

// dots[t, k] = dot(x[t], rows[row_of_slot[t, k]]), in the lane order of math/router.h; 0 for a slot
// without a row. One warp per slot.
template <typename T>
__global__ void dot_slots(Plan plan, const T* x, const T* rows, float* dots) {
  for (int64_t slot = grid_warp(); slot < plan.tokens * plan.top_k; slot += grid_warps()) {
    const int64_t row = plan.row_of_slot[slot];
    float dot = 0.0f;
    if (plan.has_row(row)) {
      const T* a = x + slot / plan.top_k * plan.width;
      const T* b = rows + row * plan.width;
      dot = lane_sum(plan.width, [=](int64_t i) { return to_float(a[i]) * to_float(b[i]); });
    }
    if (lane_id() == 0) dots[slot] = dot;
  }
}

void run_dot_slots(Queue& queue, const Call& call, const TensorView& x, const TensorView& rows,
                   const TensorView& dots) {
  const Plan plan = plan_of(call, false);
  with_type(rows.dtype, [&]<typename T>(T) {
    queue.launch(dot_slots<T>, grid_for(plan.tokens * plan.top_k, kWarps), kThreads, 0, plan,
                 x.as<const T>(), rows.as<const T>(), dots.as<float>());
  });
}

DUOMOE_KERNEL(kCuda, permute) {
  const TensorView &x = call.in("x"), &rows = call.out("rows");
  if (!weights_of(call)) return run_copy_rows(call, x, rows);
  Queue queue(call);
  run_spread(queue, call, x, rows);
  return queue.status();
}

DUOMOE_KERNEL(kCuda, permute_bwd_weights) {
  Queue queue(call);
  run_dot_slots(queue, call, call.in("x"), call.in("grad_rows"), call.out("grad_weights"));
  return queue.status();
}

DUOMOE_KERNEL(kCuda, combine_bwd) {
  Queue queue(call);
  run_spread(queue, call, call.in("grad_y"), call.out("grad_rows"));
  run_dot_slots(queue, call, call.in("grad_y"), call.in("rows"), call.out("grad_weights"));
  return queue.status();
}

// --- from rows to tokens -------------------------------------------------------------------------

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

Status run_gather_sum(const Call& call, const TensorView& rows, const TensorView& y) {
  const Plan plan = plan_of(call, false);
  Queue queue(call);
  with_type(rows.dtype, [&]<typename T>(T) {
    queue.launch(gather_sum<T>, grid_for(plan.tokens * ceil_div(plan.width, kColumns), kWarps),
                 kThreads, 0, plan, rows.as<const T>(), weights_of(call), y.as<T>());
  });
  return queue.status();
}

DUOMOE_KERNEL(kCuda, permute_bwd) {
  return run_gather_sum(call, call.in("grad_rows"), call.out("grad_x"));
}

DUOMOE_KERNEL(kCuda, combine) { return run_gather_sum(call, call.in("rows"), call.out("y")); }

// --- scaling -------------------------------------------------------------------------------------

// y[t] = scale[t] * x[t]. One warp per row.
template <typename T>
__global__ void scale_tokens(int64_t tokens, int64_t width, const T* x, const float* scale, T* y) {
  for (int64_t t = grid_warp(); t < tokens; t += grid_warps()) {
    for (int64_t i = t * width + lane_id(); i < (t + 1) * width; i += kLanes)
      y[i] = from_float<T>(scale[t] * to_float(x[i]));
  }
}

// dots[t] = dot(a[t], b[t]), in the lane order of math/router.h. One warp per row.
template <typename T>
__global__ void dot_tokens(int64_t tokens, int64_t width, const T* a, const T* b, float* dots) {
  for (int64_t t = grid_warp(); t < tokens; t += grid_warps()) {
    const float dot = lane_sum(
        width, [=](int64_t i) { return to_float(a[t * width + i]) * to_float(b[t * width + i]); });
    if (lane_id() == 0) dots[t] = dot;
  }
}

void run_scale_tokens(Queue& queue, const Call& call, const TensorView& x, const TensorView& y) {
  const int64_t tokens = call.axis('T');
  with_type(x.dtype, [&]<typename T>(T) {
    queue.launch(scale_tokens<T>, grid_for(tokens, kWarps), kThreads, 0, tokens, call.axis('D'),
                 x.as<const T>(), call.in("scale").as<const float>(), y.as<T>());
  });
}

DUOMOE_KERNEL(kCuda, scale_rows) {
  Queue queue(call);
  run_scale_tokens(queue, call, call.in("x"), call.out("y"));
  return queue.status();
}

DUOMOE_KERNEL(kCuda, scale_rows_bwd) {
  const int64_t tokens = call.axis('T');
  const TensorView &x = call.in("x"), &grad_y = call.in("grad_y");
  Queue queue(call);
  run_scale_tokens(queue, call, grad_y, call.out("grad_x"));
  with_type(x.dtype, [&]<typename T>(T) {
    queue.launch(dot_tokens<T>, grid_for(tokens, kWarps), kThreads, 0, tokens, call.axis('D'),
                 x.as<const T>(), grad_y.as<const T>(), call.out("grad_scale").as<float>());
  });
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
