// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Dot products over rows, and what is made of the same rows in one pass: the gradients of combine,
// of permute's weights, and scaling rows with its gradients.
#include "../math/dot.h"
#include "rows.cuh"

namespace duomoe::cuda {
namespace {

using math::kColumnsOfLane;

constexpr int kEightsAtOnce = 4;  // loads of 8 columns that a lane has in flight for each operand

// Blocks a multiprocessor: as many as there are registers for.
template <typename P>
constexpr int kDotBlocks = sizeof(typename P::Element) == 2 ? 4 : 3;

// A lane's part of a dot product: the sums of its 8 neighbouring columns.
struct Columns {
  float sum[kColumnsOfLane] = {};

  // Adds pack i of both rows for the kEights times 8 columns from pack `first` on, 256 columns
  // apart, and calls each(i, pack i of a). All are loaded before the first is added. kGuarded:
  // where i < packs.
  template <int kEights, bool kGuarded, typename P, typename LoadA, typename Each>
  __device__ void add(int64_t first, int64_t packs, const P* a, const P* b, LoadA load_a,
                      Each each) {
    constexpr int kParts = kColumnsOfLane / P::kSize, kStride = kLanes * kParts;
    P from_a[kEights][kParts], from_b[kEights][kParts];
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int q = 0; q < kParts; ++q) {
        const int64_t i = first + j * kStride + q;
        if (kGuarded && i >= packs) continue;
        from_a[j][q] = load_a(a + i);
        from_b[j][q] = load_once(b + i);
      }
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int q = 0; q < kParts; ++q) {
        const int64_t i = first + j * kStride + q;
        if (kGuarded && i >= packs) continue;
#pragma unroll
        for (int c = 0; c < P::kSize; ++c) {
          float& column = sum[q * P::kSize + c];
          column = math::fma(math::to_float(from_a[j][q].at[c]), math::to_float(from_b[j][q].at[c]),
                             column);
        }
        each(i, from_a[j][q]);
      }
    }
  }
};

// dot(a, b) in the order of math/dot.h, by one warp, and each(i, pack i of a) on the way.
template <typename P, typename LoadA, typename Each>
__device__ float dot_row(int64_t packs, const P* a, const P* b, LoadA load_a, Each each) {
  constexpr int kParts = kColumnsOfLane / P::kSize, kStride = kLanes * kParts;
  constexpr int kEights = kParts < kEightsAtOnce ? kEightsAtOnce / kParts : 1;
  Columns columns;
  int64_t first = lane_id() * kParts;
  for (; first + (kEights - 1) * kStride + kParts <= packs; first += kEights * kStride)
    columns.add<kEights, false>(first, packs, a, b, load_a, each);
  for (; first < packs; first += kStride) columns.add<1, true>(first, packs, a, b, load_a, each);
  return warp_sum(math::join_columns(columns.sum));
}

// dots[t, k] = dot(x[t], rows[row_of_slot[t, k]]), 0 for a slot without a row. With `scaled_rows`
// also scaled_rows[r] = weight * x of the token of slot_of_row[r], 0 without one. One warp per
// slot: the slots of a token are neighbours, so its x is read once from memory. `weights` may be
// null: 1.
template <typename P, bool kScale>
__global__ void __launch_bounds__(kRowThreads, kDotBlocks<P>)
    dot_slots(Plan plan, int64_t fillers, const P* x, const P* rows, const float* weights,
              float* dots, P* scaled_rows) {
  if constexpr (kScale) {
    if (static_cast<int64_t>(blockIdx.x) < fillers)
      return fill_rows(plan, fillers, x, weights, scaled_rows);
  }
  const int64_t packs = plan.width / P::kSize;
  const int64_t before = fillers * kRowWarps;
  const auto load_x = [](const P* from) { return *from; };
  for (int64_t slot = grid_warp() - before; slot < plan.slots(); slot += grid_warps() - before) {
    const int64_t row = plan.row_of_slot[slot];
    const float weight = kScale && weights ? weights[slot] : 1.0f;
    float dot = 0.0f;
    if (plan.has_row(row)) {
      const P *token = x + slot / plan.top_k * packs, *other = rows + row * packs;
      [[maybe_unused]] const bool scale = kScale && plan.joined(row, slot);
      P* to = scaled_rows + row * packs;
      dot = dot_row(packs, token, other, load_x, [&](int64_t i, P pack) {
        if constexpr (kScale) {
          if (scale) store_once(to + i, scaled(weight, pack));
        }
      });
    }
    if (lane_id() == 0) dots[slot] = dot;
  }
}

DUOMOE_KERNEL(kCuda, permute_bwd_weights) {
  const Plan plan = plan_of(call, false);
  const TensorView &x = call.in("x"), &rows = call.in("grad_rows");
  Queue queue(call);
  with_type(x.dtype, [&]<typename T>(T) {
    with_pack<T>(plan.width, {&x, &rows}, [&]<typename P>(P) {
      queue.launch(dot_slots<P, false>, grid_for(plan.tokens * plan.top_k, kRowWarps), kRowThreads,
                   0, plan, 0, x.as<const P>(), rows.as<const P>(), nullptr,
                   call.out("grad_weights").as<float>(), nullptr);
    });
  });
  return queue.status();
}

DUOMOE_KERNEL(kCuda, combine_bwd) {
  const Plan plan = plan_of(call, true);
  const TensorView &grad_y = call.in("grad_y"), &rows = call.in("rows");
  const TensorView& grad_rows = call.out("grad_rows");
  Queue queue(call);
  with_type(rows.dtype, [&]<typename T>(T) {
    with_pack<T>(plan.width, {&grad_y, &rows, &grad_rows}, [&]<typename P>(P) {
      const int64_t fillers = fill_blocks(plan);
      queue.launch(dot_slots<P, true>, fillers + grid_for(plan.tokens * plan.top_k, kRowWarps),
                   kRowThreads, 0, plan, fillers, grad_y.as<const P>(), rows.as<const P>(),
                   weights_of(call), call.out("grad_weights").as<float>(), grad_rows.as<P>());
    });
  });
  return queue.status();
}

// --- scaling -------------------------------------------------------------------------------------

// y[t] = scale[t] * x[t]. One warp per row.
template <typename P>
__global__ void __launch_bounds__(kRowThreads)
    scale_tokens(int64_t tokens, int64_t packs, const P* x, const float* scale, P* y) {
  constexpr int kHeld = 4;
  for (int64_t t = grid_warp(); t < tokens; t += grid_warps()) {
    const float factor = scale[t];
    for (int64_t first = lane_id(); first < packs; first += kHeld * kLanes) {
      P held[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int64_t i = first + j * kLanes;
        held[j] = i < packs ? load_once(x + t * packs + i) : P{};
      }
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int64_t i = first + j * kLanes;
        if (i < packs) store_once(y + t * packs + i, scaled(factor, held[j]));
      }
    }
  }
}

// grad_x[t] = scale[t] * grad_y[t], grad_scale[t] = dot(x[t], grad_y[t]). One warp per row.
template <typename P>
__global__ void __launch_bounds__(kRowThreads, kDotBlocks<P>)
    scale_tokens_bwd(int64_t tokens, int64_t packs, const P* grad_y, const P* x, const float* scale,
                     P* grad_x, float* grad_scale) {
  const auto load_grad = [](const P* from) { return load_once(from); };
  for (int64_t t = grid_warp(); t < tokens; t += grid_warps()) {
    const float factor = scale[t];
    P* to = grad_x + t * packs;
    const float dot = dot_row(packs, grad_y + t * packs, x + t * packs, load_grad,
                              [=](int64_t i, P pack) { store_once(to + i, scaled(factor, pack)); });
    if (lane_id() == 0) grad_scale[t] = dot;
  }
}

DUOMOE_KERNEL(kCuda, scale_rows) {
  const int64_t tokens = call.axis('T'), width = call.axis('D');
  const TensorView &x = call.in("x"), &y = call.out("y");
  Queue queue(call);
  with_type(x.dtype, [&]<typename T>(T) {
    with_pack<T>(width, {&x, &y}, [&]<typename P>(P) {
      queue.launch(scale_tokens<P>, grid_for(tokens, kRowWarps), kRowThreads, 0, tokens,
                   width / P::kSize, x.as<const P>(), call.in("scale").as<const float>(),
                   y.as<P>());
    });
  });
  return queue.status();
}

DUOMOE_KERNEL(kCuda, scale_rows_bwd) {
  const int64_t tokens = call.axis('T'), width = call.axis('D');
  const TensorView &x = call.in("x"), &grad_y = call.in("grad_y"), &grad_x = call.out("grad_x");
  Queue queue(call);
  with_type(x.dtype, [&]<typename T>(T) {
    with_pack<T>(width, {&x, &grad_y, &grad_x}, [&]<typename P>(P) {
      queue.launch(scale_tokens_bwd<P>, grid_for(tokens, kRowWarps), kRowThreads, 0, tokens,
                   width / P::kSize, grad_y.as<const P>(), x.as<const P>(),
                   call.in("scale").as<const float>(), grad_x.as<P>(),
                   call.out("grad_scale").as<float>());
    });
  });
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
