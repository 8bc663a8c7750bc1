// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving rows between token order and expert order: permute, its gradient with respect to the
// tokens, and combine.
#include "rows.cuh"
#include "rows_phases.cuh"

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

// Some slots of a token, whose row numbers and weights are read at once.
template <int kSlots>
struct SlotRows {
  int32_t row[kSlots];  // -1: none
  float weight[kSlots];
  bool all = true;  // have a row

  // Of slots [slot, end). The others have no row, nor has, if `joined`, one that its row is not
  // made from.
  __device__ SlotRows(const Plan& plan, const float* weights, int64_t slot, int64_t end,
                      bool joined) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const bool exists = slot + s < end;
      row[s] = exists ? plan.row_of_slot[slot + s] : -1;
      weight[s] = exists && weights ? weights[slot + s] : 1.0f;
    }
    int64_t back[kSlots];  // all asked for before the first is looked at
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const bool there = plan.has_row(row[s]);
      back[s] = there ? slot + s : -1;
      if (joined && there) back[s] = plan.slot_of_row[row[s]];
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (back[s] != slot + s) row[s] = -1;
      all = all && row[s] >= 0;
    }
  }
};

// Calls f(kHeld, kSlots, kOnce), each a constant: packs that a thread has in flight of a row; slots
// whose rows it reads or writes together; whether those are all of a token, so that row numbers and
// weights are read once and not for every pack. Few slots have more packs.
template <typename F>
void with_slots(int64_t top_k, F f) {
  using std::integral_constant;
  if (top_k <= 2) {
    f(integral_constant<int, 2>{}, integral_constant<int, 2>{}, std::true_type{});
  } else if (top_k <= 8) {
    f(integral_constant<int, 1>{}, integral_constant<int, 8>{}, std::true_type{});
  } else {
    f(integral_constant<int, 1>{}, integral_constant<int, 8>{}, std::false_type{});
  }
}

// --- from tokens to rows -------------------------------------------------------------------------

// Writes weight * held[j] to pack first + j * stride of each slot's row. kAll: all slots have one.
template <bool kAll, typename P, int kHeld, int kSlots>
__device__ void store_slots(const SlotRows<kSlots>& slots, P* rows, int64_t packs, int64_t first,
                            int stride, const P (&held)[kHeld]) {
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (!kAll && slots.row[s] < 0) continue;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int64_t i = first + j * stride;
      if (kHeld == 1 || i < packs)
        store_once(rows + slots.row[s] * packs + i, scaled(slots.weight[s], held[j]));
    }
  }
}

// Pack first + j * stride of a row; 0 behind its end.
template <typename P, int kHeld>
__device__ void load_packs(const P* row, int64_t packs, int64_t first, int stride,
                           P (&held)[kHeld]) {
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int64_t i = first + j * stride;
    held[j] = i < packs ? load_once(row + i) : P{};
  }
}

// rows[r] = weight * x of the token of slot_of_row[r], 0 without one. A team reads its token once,
// kHeld packs a thread at a time, and writes them to one row after another. What is read next is
// asked for before the maps are and before it writes.
template <typename P, int kHeld, int kSlots, bool kOnce>
__global__ void __launch_bounds__(kRowThreads, kOnce ? 4 : 2)
    spread(Plan plan, Teams teams, int64_t fillers, const P* x, const float* weights, P* rows) {
  if (static_cast<int64_t>(blockIdx.x) < fillers) return fill_rows(plan, fillers, x, weights, rows);
  const int64_t packs = plan.width / P::kSize;
  const int stride = teams.threads();
  for (int64_t t = teams.number(fillers); t < plan.tokens; t += teams.count()) {
    const int64_t slot = t * plan.top_k, end = slot + plan.top_k;
    const P* from = x + t * packs;
    P next[kHeld];
    load_packs(from, packs, teams.member(), stride, next);
    const auto each_pack = [&](auto write) {
#pragma unroll 1
      for (int64_t first = teams.member(); first < packs; first += kHeld * stride) {
        P held[kHeld];
#pragma unroll
        for (int j = 0; j < kHeld; ++j) held[j] = next[j];
        load_packs(from, packs, first + kHeld * stride, stride, next);
        write(first, held);
      }
    };
    if constexpr (kOnce) {
      const SlotRows<kSlots> slots(plan, weights, slot, end, true);
      if (slots.all) {
        each_pack([&](int64_t first, const auto& held) {
          store_slots<true>(slots, rows, packs, first, stride, held);
        });
      } else {
        each_pack([&](int64_t first, const auto& held) {
          store_slots<false>(slots, rows, packs, first, stride, held);
        });
      }
    } else {
      each_pack([&](int64_t first, const auto& held) {
        for (int64_t some = slot; some < end; some += kSlots) {
          const SlotRows<kSlots> slots(plan, weights, some, end, true);
          store_slots<false>(slots, rows, packs, first, stride, held);
        }
      });
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
      if constexpr (std::is_same_v<P, Pack<uint16_t, kPackBytes / sizeof(uint16_t)>>) {
        // Copies alone: rows with weights have their rounding to do meanwhile.
        if (!weights_of(call)) {
          const Phases phases = phases_of(queue, plan.tokens, plan.top_k, width * sizeof(T));
          if (phases.count > 0)
            return launch_phases(queue, typed, phases, x.as<const P>(), rows.as<P>());
        }
      }
      const Teams teams = teams_for(plan.tokens, width / P::kSize);
      const int64_t fillers = fill_blocks(plan);
      with_slots(plan.top_k, [&](auto held, auto slots, auto once) {
        constexpr int kHeld = once ? held : 2;  // a look at the maps for more packs
        queue.launch(spread<P, kHeld, slots, once>, fillers + teams.blocks, kRowThreads, 0, typed,
                     teams, fillers, x.as<const P>(), weights_of(call), rows.as<P>());
      });
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

// sum[j] += weight * row, in slot order, for pack first + j * stride of each row. All packs are
// loaded before the first is added. kAll: every slot has a row.
template <bool kAll, typename P, int kHeld, int kSlots>
__device__ void add_slots(const SlotRows<kSlots>& slots, const P* rows, int64_t packs,
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
// once. `weights` may be null: 1.
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
      const SlotRows<kSlots> slots(plan, weights, slot, end, false);
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
          const SlotRows<kSlots> slots(plan, weights, some, end, false);
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
      with_slots(plan.top_k, [&](auto held, auto slots, auto once) {
        queue.launch(gather_sum<P, held, slots, once>, teams.blocks, kRowThreads, 0, plan, teams,
                     rows.as<const P>(), weights_of(call), y.as<P>());
      });
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
