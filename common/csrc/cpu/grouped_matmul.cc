// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The experts' products and the gate's, and their gradients, as lists of plain products.
#include <cstring>
#include <vector>

#include "matmul.h"

namespace duomoe::cpu {
namespace {

// The rows of each expert, clipped to the rows that exist: offsets may come from a caller's own
// plan.
struct Group {
  int64_t begin, rows;
};
std::vector<Group> groups_of(const Call& call) {
  const int32_t* offsets = call.in("expert_offsets").as<const int32_t>();
  const int32_t* counts = call.in("expert_counts").as<const int32_t>();
  const int64_t num_rows = call.axis('R');
  std::vector<Group> groups(call.axis('E'));
  int64_t end = 0;
  for (size_t e = 0; e < groups.size(); ++e) {
    const int64_t begin = std::clamp<int64_t>(offsets[e], end, num_rows);
    end = std::clamp<int64_t>(begin + std::max<int32_t>(counts[e], 0), begin, num_rows);
    groups[e] = {begin, end - begin};
  }
  return groups;
}

void zero_other_rows(const Call& call, const std::vector<Group>& groups, const TensorView& view,
                     int64_t width) {
  const Rows rows(view, width);
  int64_t end = 0;
  auto clear = [&](int64_t begin, int64_t until) {
    if (until > begin && rows.bytes > 0) std::memset(rows[begin], 0, (until - begin) * rows.bytes);
  };
  for (const Group& g : groups) {
    if (g.rows == 0) continue;
    clear(end, g.begin);
    end = g.begin + g.rows;
  }
  clear(end, call.axis('R'));
}

DUOMOE_KERNEL(kCpu, grouped_matmul) {
  const int64_t d = call.axis('D'), n = call.axis('N');
  const std::vector<Group> groups = groups_of(call);
  zero_other_rows(call, groups, call.out("out"), n);
  const TensorView& bias = call.in("bias");
  std::vector<Product> products;
  for (size_t e = 0; e < groups.size(); ++e) {
    const auto [begin, rows] = groups[e];
    products.push_back({.a = {call.in("rows"), begin * d, d, 1},
                        .b = {call.in("w"), static_cast<int64_t>(e) * d * n, n, 1},
                        .c = {call.out("out"), begin * n, n, 1},
                        .rows = rows,
                        .columns = n,
                        .depth = d,
                        .bias = bias.present() ? Rows(bias, n)[static_cast<int64_t>(e)] : nullptr,
                        .bias_dtype = bias.dtype});
  }
  run_products(call, products, DType::kFloat32);
  return {};
}

DUOMOE_KERNEL(kCpu, grouped_matmul_bwd_rows) {
  const int64_t d = call.axis('D'), n = call.axis('N');
  const std::vector<Group> groups = groups_of(call);
  zero_other_rows(call, groups, call.out("grad_rows"), d);
  std::vector<Product> products;
  for (size_t e = 0; e < groups.size(); ++e) {
    const auto [begin, rows] = groups[e];
    products.push_back({.a = {call.in("grad_out"), begin * n, n, 1},
                        .b = {call.in("w"), static_cast<int64_t>(e) * d * n, 1, n},
                        .c = {call.out("grad_rows"), begin * d, d, 1},
                        .rows = rows,
                        .columns = d,
                        .depth = n});
  }
  run_products(call, products, DType::kFloat32);
  return {};
}

DUOMOE_KERNEL(kCpu, grouped_matmul_bwd_w) {
  const int64_t d = call.axis('D'), n = call.axis('N');
  const std::vector<Group> groups = groups_of(call);
  std::vector<Product> products;
  for (size_t e = 0; e < groups.size(); ++e) {
    const auto [begin, rows] = groups[e];
    products.push_back({.a = {call.in("rows"), begin * d, 1, d},
                        .b = {call.in("grad_out"), begin * n, n, 1},
                        .c = {call.out("grad_w"), static_cast<int64_t>(e) * d * n, n, 1},
                        .rows = d,
                        .columns = n,
                        .depth = rows});
  }
  run_products(call, products, DType::kFloat32);
  return {};
}

// result[j] = sum over rows, in order and in blocks of kTileDepth as a product sums them, of
// x[i][j].
void sum_rows(const Rows& x, DType dtype, int64_t begin, int64_t end, const uint8_t* keep,
              int64_t width, DType result_dtype, void* result) {
  std::vector<float> total(width, 0.0f), block(width);
  for (int64_t first = begin; first < end; first += kTileDepth) {
    std::fill(block.begin(), block.end(), 0.0f);
    for (int64_t i = first; i < std::min<int64_t>(end, first + kTileDepth); ++i) {
      if (!keep || keep[i]) simd().accumulate_scaled(dtype, 1.0f, x[i], width, block.data());
    }
    simd().accumulate(block.data(), width, total.data());
  }
  simd().store(result_dtype, total.data(), result, width);
}

DUOMOE_KERNEL(kCpu, grouped_matmul_bwd_bias) {
  const int64_t n = call.axis('N');
  const std::vector<Group> groups = groups_of(call);
  const TensorView &grad = call.in("grad_out"), &bias = call.out("grad_bias");
  const Rows rows(grad, n), result(bias, n);
  parallel_blocks(call, call.axis('E'), 1, [&](int64_t e, int64_t) {
    const auto [begin, count] = groups[e];
    sum_rows(rows, grad.dtype, begin, begin + count, nullptr, n, bias.dtype, result[e]);
  });
  return {};
}

// Clears the rows of masked tokens, of a [T, width] result.
void clear_masked(const Call& call, const TensorView& view, int64_t width) {
  const TensorView& mask = call.in("token_mask");
  if (!mask.present() || width == 0) return;
  const Rows rows(view, width);
  for (int64_t t = 0; t < call.axis('T'); ++t) {
    if (!mask.as<const uint8_t>()[t]) std::memset(rows[t], 0, rows.bytes);
  }
}

DUOMOE_KERNEL(kCpu, gate) {
  const int64_t t = call.axis('T'), d = call.axis('D'), e = call.axis('E');
  const TensorView& bias = call.in("router_bias");
  run_products(call,
               {{.a = {call.in("x"), 0, d, 1},
                 .b = {call.in("router"), 0, e, 1},
                 .c = {call.out("logits"), 0, e, 1},
                 .rows = t,
                 .columns = e,
                 .depth = d,
                 .bias = bias.data,
                 .bias_dtype = bias.dtype}},
               call.out("logits").dtype);
  clear_masked(call, call.out("logits"), e);
  return {};
}

DUOMOE_KERNEL(kCpu, gate_bwd_x) {
  const int64_t t = call.axis('T'), d = call.axis('D'), e = call.axis('E');
  run_products(call,
               {{.a = {call.in("grad_logits"), 0, e, 1},
                 .b = {call.in("router"), 0, 1, e},
                 .c = {call.out("grad_x"), 0, d, 1},
                 .rows = t,
                 .columns = d,
                 .depth = e}},
               call.in("grad_logits").dtype);
  clear_masked(call, call.out("grad_x"), d);
  return {};
}

DUOMOE_KERNEL(kCpu, gate_bwd_params) {
  const int64_t t = call.axis('T'), d = call.axis('D'), e = call.axis('E');
  const TensorView& grad = call.in("grad_logits");
  const uint8_t* keep = call.in("token_mask").as<const uint8_t>();
  run_products(call,
               {{.a = {call.in("x"), 0, 1, d},
                 .b = {grad, 0, e, 1},
                 .c = {call.out("grad_router"), 0, e, 1},
                 .rows = d,
                 .columns = e,
                 .depth = t,
                 .keep = keep}},
               grad.dtype);
  const ScopedFpMode mode;
  const TensorView& bias = call.out("grad_router_bias");
  sum_rows(Rows(grad, e), grad.dtype, 0, t, keep, e, bias.dtype, bias.data);
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
