// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving rows between token order and expert order: permute, combine and their gradients. Row and
// slot numbers outside their range count as unused, so that a plan of other origin cannot read out
// of bounds.
#include <cstring>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace duomoe::cpu {
namespace {

// sum over k, in slot order and float32, of weights[t, k] * rows[row_of_slot[t, k]], rounded once.
void gather_sum(const Call& call, const TensorView& source, const float* weights,
                const TensorView& target) {
  const int64_t tokens = call.axis('T'), top_k = call.axis('K'), width = call.axis('D');
  const int64_t num_rows = call.axis('R');
  const int32_t* row_of_slot = call.in("row_of_slot").as<const int32_t>();
  const Rows rows(source, width), y(target, width);
  parallel_blocks(call, tokens, rows_per_task(width * top_k), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
        const int64_t row = row_of_slot[slot];
        if (row < 0 || row >= num_rows) continue;
        simd().accumulate_scaled(source.dtype, weights ? weights[slot] : 1.0f, rows[row], width,
                                 sum.data());
      }
      simd().store(target.dtype, sum.data(), y[t], width);
    }
  });
}

void clear(const Rows& rows, int64_t row) {
  if (rows.bytes > 0) std::memset(rows[row], 0, rows.bytes);
}

DUOMOE_KERNEL(kCpu, permute) {
  const int64_t top_k = call.axis('K'), width = call.axis('D'), slots = call.axis('T') * top_k;
  const int32_t* slot_of_row = call.in("slot_of_row").as<const int32_t>();
  const Rows x(call.in("x"), width), rows(call.out("rows"), width);
  parallel_blocks(call, call.axis('R'), rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = slot_of_row[r];
      if (slot >= 0 && slot < slots) {
        if (rows.bytes > 0) std::memcpy(rows[r], x[slot / top_k], rows.bytes);
      } else {
        clear(rows, r);
      }
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, permute_bwd) {
  gather_sum(call, call.in("grad_rows"), nullptr, call.out("grad_x"));
  return {};
}

DUOMOE_KERNEL(kCpu, combine) {
  gather_sum(call, call.in("rows"), call.in("weights").as<const float>(), call.out("y"));
  return {};
}

DUOMOE_KERNEL(kCpu, combine_bwd) {
  const int64_t top_k = call.axis('K'), width = call.axis('D'), num_rows = call.axis('R');
  const int64_t slots = call.axis('T') * top_k;
  const int32_t* row_of_slot = call.in("row_of_slot").as<const int32_t>();
  const int32_t* slot_of_row = call.in("slot_of_row").as<const int32_t>();
  const float* weights = call.in("weights").as<const float>();
  float* grad_weights = call.out("grad_weights").as<float>();
  const DType dtype = call.in("rows").dtype;
  const Rows grad_y(call.in("grad_y"), width), rows(call.in("rows"), width),
      grad_rows(call.out("grad_rows"), width);
  parallel_blocks(call, num_rows, rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = slot_of_row[r];
      if (slot >= 0 && slot < slots) {
        simd().scale(dtype, weights ? weights[slot] : 1.0f, grad_y[slot / top_k], width,
                     grad_rows[r]);
      } else {
        clear(grad_rows, r);
      }
    }
  });
  parallel_blocks(call, slots, rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t row = row_of_slot[slot];
      grad_weights[slot] = row >= 0 && row < num_rows
                               ? simd().dot(dtype, grad_y[slot / top_k], rows[row], width)
                               : 0.0f;
    }
  });
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
