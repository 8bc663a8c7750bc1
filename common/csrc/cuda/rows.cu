// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving rows between token order and expert order: permute, its gradient with respect to the
// tokens, and combine.
#include "rows.cuh"

namespace duomoe::cuda {
namespace {

// A token is moved by a team of threads, 2^log_threads of them: enough for one pack each, at most a
// block.
struct Teams {
  int log_threads;
  int64_t blocks;

  __device__ int threads() const { return 1 << log_threads; }
  __device__ int member() const { return static_cast<int>(threadIdx.x) & (threads() - 1); }
  // Of the blocks from `first_block` on.
  __device__ int64_t number(int64_t first_block) const {
    return ((static_cast<int64_t>(blockIdx.x) - first_block) * kRowThreads +
            static_cast<int64_t>(threadIdx.x)) >>
           log_threads;
  }
  __device__ int64_t count() const { return blocks * kRowThreads >> log_threads; }
};

Teams teams_for(int64_t tokens, int64_t packs) {
  int log_threads = 0;
  while ((1 << log_threads) < kRowThreads && (1 << log_threads) < packs) ++log_threads;
  return {log_threads, grid_for(tokens, kRowThreads >> log_threads)};
}

// --- from tokens to rows -------------------------------------------------------------------------

// Slots whose row numbers are read at once.
constexpr int kSlotsAtOnce = 8;

// The rows of kSlots slots from `slot` on, -1 for one without a row and, if `joined`, for one that
// its row is not made from.
template <int kSlots>
struct SlotRows {
  int32_t row[kSlots];
  bool all = true;  // have a row

  __device__ SlotRows(const Plan& plan, int64_t slot, bool joined) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) row[s] = plan.row_of_slot[slot + s];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (!plan.has_row(row[s]) || (joined && !plan.joined(row[s], slot + s))) row[s] = -1;
      all = all && row[s] >= 0;
    }
  }
};

// rows[r] = weight * x of the token of slot_of_row[r], 0 without one. A team reads kHeld packs a
// thread of its token once, then writes them to one row after another, so that what goes to a row
// goes there together.
template <typename P>
__global__ void __launch_bounds__(kRowThreads)
    spread(Plan plan, Teams teams, int64_t fillers, const P* x, const float* weights, P* rows) {
  if (static_cast<int64_t>(blockIdx.x) < fillers) return fill_rows(plan, fillers, x, weights, rows);
  constexpr int kHeld = 4;
  const int64_t packs = plan.width / P::kSize;
  for (int64_t t = teams.number(fillers); t < plan.tokens; t += teams.count()) {
    if (plan.top_k == kSlotsAtOnce) {
      const SlotRows<kSlotsAtOnce> slots(plan, t * kSlotsAtOnce, true);
      if (slots.all) {
        P* to[kSlotsAtOnce];
        float weight[kSlotsAtOnce];
#pragma unroll
        for (int s = 0; s < kSlotsAtOnce; ++s) {
          to[s] = rows + slots.row[s] * packs;
          weight[s] = weights ? weights[t * kSlotsAtOnce + s] : 1.0f;
        }
        for (int64_t i = teams.member(); i < packs; i += teams.threads()) {
          const P pack = load_once(x + t * packs + i);
#pragma unroll
          for (int s = 0; s < kSlotsAtOnce; ++s) store_once(to[s] + i, scaled(weight[s], pack));
        }
        continue;
      }
    }
    for (int64_t first = teams.member(); first < packs; first += kHeld * teams.threads()) {
      P held[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int64_t i = first + j * teams.threads();
        held[j] = i < packs ? load_once(x + t * packs + i) : P{};
      }
      for (int64_t k = 0; k < plan.top_k; k += kSlotsAtOnce) {
        const int64_t slot = t * plan.top_k + k;
        int32_t row[kSlotsAtOnce];
#pragma unroll
        for (int s = 0; s < kSlotsAtOnce; ++s)
          row[s] = k + s < plan.top_k ? plan.row_of_slot[slot + s] : -1;
#pragma unroll
        for (int s = 0; s < kSlotsAtOnce; ++s)
          row[s] = plan.has_row(row[s]) && plan.joined(row[s], slot + s) ? row[s] : -1;
#pragma unroll
        for (int s = 0; s < kSlotsAtOnce; ++s) {
          if (row[s] < 0) continue;
          const float weight = weights ? weights[slot + s] : 1.0f;
          P* to = rows + row[s] * packs;
#pragma unroll
          for (int j = 0; j < kHeld; ++j) {
            const int64_t i = first + j * teams.threads();
            if (i < packs) store_once(to + i, scaled(weight, held[j]));
          }
        }
      }
    }
  }
}

DUOMOE_KERNEL(kCuda, permute) {
  const Plan plan = plan_of(call, true);
  const TensorView &x = call.in("x"), &rows = call.out("rows");
  Queue queue(call);
  const auto run = [&]<typename T>(T, int64_t width) {
    Plan typed = plan;
    typed.width = width;
    with_pack<T>(width, {&x, &rows}, [&]<typename P>(P) {
      const Teams teams = teams_for(plan.tokens, width / P::kSize);
      const int64_t fillers = fill_blocks(plan);
      queue.launch(spread<P>, fillers + teams.blocks, kRowThreads, 0, typed, teams, fillers,
                   x.as<const P>(), weights_of(call), rows.as<P>());
    });
  };
  if (weights_of(call)) {
    with_type(x.dtype, [&]<typename T>(T) { run(T{}, plan.width); });
  } else {  // bits, whatever the dtype
    constexpr auto kUnit = static_cast<int64_t>(sizeof(uint16_t));
    run(uint16_t{}, plan.width * static_cast<int64_t>(item_size(x.dtype)) / kUnit);
  }
  return queue.status();
}

// --- from rows to tokens -------------------------------------------------------------------------

// The slots of a token whose rows are read at once, and their weights.
template <int kSlots>
struct WeightedRows {
  int32_t row[kSlots];  // -1: none
  float weight[kSlots];
  bool all = true;  // have a row

  // Of the token of slots [slot, end); the others have none.
  __device__ WeightedRows(const Plan& plan, const float* weights, int64_t slot, int64_t end) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const bool exists = slot + s < end;
      row[s] = exists ? plan.row_of_slot[slot + s] : -1;
      weight[s] = exists && weights ? weights[slot + s] : 1.0f;
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (!plan.has_row(row[s])) row[s] = -1;
      all = all && row[s] >= 0;
    }
  }
};

// sum[j] += weight * row, in slot order, for pack first + j * stride of each row. All packs are
// loaded before the first is added. kAll: every slot has a row.
template <bool kAll, typename P, int kHeld, int kSlots>
__device__ void add_slots(const WeightedRows<kSlots>& slots, const P* rows, int64_t packs,
                          int64_t first, int stride, float (&sum)[kHeld][P::kSize]) {
  P part[kSlots][kHeld];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int64_t i = first + j * stride;
      const bool there = (kAll || slots.row[s] >= 0) && (kHeld == 1 || i < packs);
      part[s][j] = there ? load_once(rows + slots.row[s] * packs + i) : P{};
    }
  }
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (!kAll && slots.row[s] < 0) continue;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
#pragma unroll
      for (int c = 0; c < P::kSize; ++c)
        sum[j][c] = math::fma(slots.weight[s], math::to_float(part[s][j].at[c]), sum[j][c]);
    }
  }
}

// y[t] = sum over k, in slot order and float32, of weights[t, k] * rows[row_of_slot[t, k]], rounded
// once. A thread sums kHeld packs of a token, and loads those of kSlots slots before it adds the
// first. kOnce: K <= kSlots, so that a token's row numbers and weights are read once; else once for
// every pack. `weights` may be null: 1.
template <typename P, int kHeld, int kSlots, bool kOnce>
__global__ void __launch_bounds__(kRowThreads, kOnce ? 3 : 2)
    gather_sum(Plan plan, Teams teams, const P* rows, const float* weights, P* y) {
  const int64_t packs = plan.width / P::kSize;
  const int stride = teams.threads();
  for (int64_t t = teams.number(0); t < plan.tokens; t += teams.count()) {
    const int64_t slot = t * plan.top_k, end = slot + plan.top_k;
    P* to = y + t * packs;
    const auto each_pack = [&](auto add) {
      for (int64_t first = teams.member(); first < packs; first += kHeld * stride) {
        float sum[kHeld][P::kSize] = {};
        add(first, sum);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          const int64_t i = first + j * stride;
          P result;
#pragma unroll
          for (int c = 0; c < P::kSize; ++c)
            result.at[c] = math::from_float<typename P::Element>(sum[j][c]);
          if (kHeld == 1 || i < packs) store_once(to + i, result);
        }
      }
    };
    if constexpr (kOnce) {
      const WeightedRows<kSlots> slots(plan, weights, slot, end);
      if (slots.all) {
        each_pack([&](int64_t first, auto& sum) {
          add_slots<true, P>(slots, rows, packs, first, stride, sum);
        });
      } else {
        each_pack([&](int64_t first, auto& sum) {
          add_slots<false, P>(slots, rows, packs, first, stride, sum);
        });
      }
    } else {
      each_pack([&](int64_t first, auto& sum) {
        for (int64_t some = slot; some < end; some += kSlots) {
          const WeightedRows<kSlots> slots(plan, weights, some, end);
          add_slots<false, P>(slots, rows, packs, first, stride, sum);
        }
      });
    }
  }
}

Status run_gather_sum(const Call& call, const TensorView& rows, const TensorView& y) {
  const Plan plan = plan_of(call, false);
  Queue queue(call);
  with_type(rows.dtype, [&]<typename T>(T) {
    with_pack<T>(plan.width, {&rows, &y}, [&]<typename P>(P) {
      const Teams teams = teams_for(plan.tokens, plan.width / P::kSize);
      const auto run = [&](auto kernel) {
        queue.launch(kernel, teams.blocks, kRowThreads, 0, plan, teams, rows.as<const P>(),
                     weights_of(call), y.as<P>());
      };
      // Few slots keep as many loads in flight through several packs of each.
      if (plan.top_k <= 2) {
        run(gather_sum<P, 2, 2, true>);
      } else if (plan.top_k <= 8) {
        run(gather_sum<P, 1, 8, true>);
      } else {
        run(gather_sum<P, 1, 8, false>);
      }
    });
  });
  return queue.status();
}

DUOMOE_KERNEL(kCuda, permute_bwd) {
  return run_gather_sum(call, call.in("grad_rows"), call.out("grad_x"));
}

DUOMOE_KERNEL(kCuda, combine) { return run_gather_sum(call, call.in("rows"), call.out("y")); }

}  // namespace
}  // namespace duomoe::cuda
