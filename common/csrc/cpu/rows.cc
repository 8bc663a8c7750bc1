// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving rows between token order and expert order: permute, combine and their gradients; and
// scaling rows. Row and slot numbers outside their range count as unused, so that a plan of other origin cannot read out
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

// rows[r] = weights[slot] * x[token] in float32, rounded once, or a copy without weights; 0 for a
// row without a slot.
void spread(const Call& call, const TensorView& source, const float* weights,
            const TensorView& target) {
  const int64_t top_k = call.axis('K'), width = call.axis('D'), slots = call.axis('T') * top_k;
  const int32_t* slot_of_row = call.in("slot_of_row").as<const int32_t>();
  const Rows x(source, width), rows(target, width);
  parallel_blocks(call, call.axis('R'), rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = slot_of_row[r];
      if (slot < 0 || slot >= slots) {
        clear(rows, r);
      } else if (weights) {
        simd().scale(source.dtype, weights[slot], x[slot / top_k], width, rows[r]);
      } else if (rows.bytes > 0) {
        std::memcpy(rows[r], x[slot / top_k], rows.bytes);
      }
    }
  });
}

// dots[t, k] = dot(x[t], rows[row_of_slot[t, k]]), 0 for a slot without a row.
void dot_slots(const Call& call, const TensorView& tokens, const TensorView& source,
               const TensorView& target) {
  const int64_t top_k = call.axis('K'), width = call.axis('D'), num_rows = call.axis('R');
  const int32_t* row_of_slot = call.in("row_of_slot").as<const int32_t>();
  const Rows x(tokens, width), rows(source, width);
  float* dots = target.as<float>();
  parallel_blocks(call, call.axis('T') * top_k, rows_per_task(width),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t slot = begin; slot < end; ++slot) {
                      const int64_t row = row_of_slot[slot];
                      dots[slot] = row >= 0 && row < num_rows
                                       ? simd().dot(source.dtype, x[slot / top_k], rows[row], width)
                                       : 0.0f;
                    }
                  });
}

const float* weights_of(const Call& call) { return call.in("weights").as<const float>(); }

DUOMOE_KERNEL(kCpu, permute) {
  spread(call, call.in("x"), weights_of(call), call.out("rows"));
  return {};
}

DUOMOE_KERNEL(kCpu, permute_bwd) {
  gather_sum(call, call.in("grad_rows"), weights_of(call), call.out("grad_x"));
  return {};
}

DUOMOE_KERNEL(kCpu, permute_bwd_weights) {
  dot_slots(call, call.in("x"), call.in("grad_rows"), call.out("grad_weights"));
  return {};
}

DUOMOE_KERNEL(kCpu, combine) {
  gather_sum(call, call.in("rows"), weights_of(call), call.out("y"));
  return {};
}

DUOMOE_KERNEL(kCpu, combine_bwd) {
  spread(call, call.in("grad_y"), weights_of(call), call.out("grad_rows"));
  dot_slots(call, call.in("grad_y"), call.in("rows"), call.out("grad_weights"));
  return {};
}

// target[t] = scale[t] * source[t]
void scale_tokens(const Call& call, const TensorView& source, const TensorView& target) {
  const int64_t width = call.axis('D');
  const float* scale = call.in("scale").as<const float>();
  const Rows from(source, width), to(target, width);
  parallel_blocks(call, call.axis('T'), rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      simd().scale(source.dtype, scale[t], from[t], width, to[t]);
    }
  });
}

DUOMOE_KERNEL(kCpu, scale_rows) {
  scale_tokens(call, call.in("x"), call.out("y"));
  return {};
}

DUOMOE_KERNEL(kCpu, scale_rows_bwd) {
  scale_tokens(call, call.in("grad_y"), call.out("grad_x"));
  const int64_t width = call.axis('D');
  const TensorView& view = call.in("x");
  const Rows x(view, width), grad_y(call.in("grad_y"), width);
  float* grad_scale = call.out("grad_scale").as<float>();
  parallel_blocks(call, call.axis('T'), rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      grad_scale[t] = simd().dot(view.dtype, x[t], grad_y[t], width);
    }
  });
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
