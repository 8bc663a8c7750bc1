// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "op_table_parts.h"

namespace duomoe {
namespace {

// Order matches math::Activation.
AttributeSpec activation() {
  return choice("activation", {"silu", "gelu", "gelu_tanh", "relu", "relu_squared"});
}
std::vector<AttributeSpec> glu_options() {
  return {activation(), real("alpha"), real("limit"), real("up_offset")};
}

}  // namespace

void add_dispatch_ops(std::vector<OpSpec>& ops) {
  // --- dispatch --------------------------------------------------------------------------------
  ops.push_back({
      .name = "plan_dispatch",
      .summary =
          "Stable order of the slots by expert, with capacity, alignment and a bound on the rows.",
      .inputs = {{"indices", "T K", "int32"}, {"weights", "T K", "float32", kOptional}},
      .outputs = {{"row_of_slot", "T K", "int32"},
                  {"slot_of_row", "R", "int32"},
                  {"expert_counts", "E", "int32"},
                  {"routed_counts", "E", "int32"},
                  {"expert_offsets", "E+1", "int32"}},
      .attributes = {integer("num_experts", 1, "E"), integer("num_rows", 0, "R"),
                     integer("capacity", -1), choice("drop_order", {"position", "weight"}),
                     integer("alignment", 1)},
  });
  ops.push_back({
      .name = "permute",
      .summary =
          "rows[r] = x[t] of the slot (t, k) = slot_of_row[r], times weights[t, k] in float32 "
          "and rounded once where weights are given; rows without a slot are zero.",
      .inputs = {{"x", "T D", "<x>"},
                 {"row_of_slot", "T K", "int32"},
                 {"slot_of_row", "R", "int32"},
                 {"weights", "T K", "float32", kOptional}},
      .outputs = {{"rows", "R D", "<x>"}},
      .attributes = {},
      .backward = {"permute_bwd", "permute_bwd_weights"},
      .shard_axes = "D",
  });
  ops.push_back({
      .name = "permute_bwd",
      .summary = "grad_x[t] = sum over k, in slot order and float32, of weights[t, k] * "
                 "grad_rows[row_of_slot[t, k]].",
      .inputs = {{"grad_rows", "R D", "<x>"},
                 {"row_of_slot", "T K", "int32"},
                 {"weights", "T K", "float32", kOptional}},
      .outputs = {{"grad_x", "T D", "<x>"}},
      .attributes = {},
      .shard_axes = "D",
  });
  ops.push_back({
      .name = "permute_bwd_weights",
      .summary =
          "grad_weights[t, k] = dot(x[t], grad_rows[row_of_slot[t, k]]); 0 for a slot without "
          "a row.",
      .inputs = {{"grad_rows", "R D", "<x>"}, {"x", "T D", "<x>"}, {"row_of_slot", "T K", "int32"}},
      .outputs = {{"grad_weights", "T K", "float32"}},
      .attributes = {},
      .shard_axes = "D",
  });
  ops.push_back({
      .name = "combine",
      .summary = "y[t] = sum over k, in slot order and float32, of weights[t, k] * "
                 "rows[row_of_slot[t, k]].",
      .inputs = {{"rows", "R D", "<x>"},
                 {"row_of_slot", "T K", "int32"},
                 {"slot_of_row", "R", "int32"},
                 {"weights", "T K", "float32", kOptional}},
      .outputs = {{"y", "T D", "<x>"}},
      .attributes = {},
      .backward = {"combine_bwd"},
      .shard_axes = "D",
  });
  ops.push_back({
      .name = "combine_bwd",
      .summary =
          "grad_rows = weight * grad_y of the row's token; grad_weights = dot(grad_y, rows).",
      .inputs = {{"grad_y", "T D", "<x>"},
                 {"rows", "R D", "<x>"},
                 {"row_of_slot", "T K", "int32"},
                 {"slot_of_row", "R", "int32"},
                 {"weights", "T K", "float32", kOptional}},
      .outputs = {{"grad_rows", "R D", "<x>"}, {"grad_weights", "T K", "float32"}},
      .attributes = {},
      .shard_axes = "D",
  });

  // --- experts ---------------------------------------------------------------------------------
  ops.push_back({
      .name = "grouped_matmul",
      .summary =
          "out[r] = rows[r] . w[e] + bias[e] for the rows of expert e, summed in float32 and "
          "rounded once; other rows are zero.",
      .inputs = {{"rows", "R D", "<x>"},
                 {"w", "E D N", "<w>"},
                 {"expert_offsets", "E+1", "int32"},
                 {"expert_counts", "E", "int32"},
                 {"bias", "E N", "<b>", kOptional}},
      .outputs = {{"out", "R N", "@out_dtype"}},
      .attributes = {dtype("out_dtype")},
      .backward = {"grouped_matmul_bwd_rows", "grouped_matmul_bwd_w", "grouped_matmul_bwd_bias"},
      .shard_axes = "N",
  });
  ops.push_back({
      .name = "grouped_matmul_bwd_rows",
      .summary = "grad_rows[r] = grad_out[r] . w[e]^T.",
      .inputs = {{"grad_out", "R N", "<g>"},
                 {"w", "E D N", "<w>"},
                 {"expert_offsets", "E+1", "int32"},
                 {"expert_counts", "E", "int32"}},
      .outputs = {{"grad_rows", "R D", "@rows_dtype"}},
      .attributes = {dtype("rows_dtype", "rows")},
      .shard_axes = "D",
  });
  ops.push_back({
      .name = "grouped_matmul_bwd_w",
      .summary = "grad_w[e] = rows^T . grad_out over the rows of expert e; exactly 0 for an expert "
                 "without rows.",
      .inputs = {{"rows", "R D", "<x>"},
                 {"grad_out", "R N", "<g>"},
                 {"expert_offsets", "E+1", "int32"},
                 {"expert_counts", "E", "int32"}},
      .outputs = {{"grad_w", "E D N", "@w_dtype"}},
      .attributes = {dtype("w_dtype", "w")},
      .shard_axes = "D N",
  });
  ops.push_back({
      .name = "grouped_matmul_bwd_bias",
      .summary =
          "grad_bias[e] = sum of grad_out over the rows of expert e, in float32; exactly 0 for "
          "an expert without rows.",
      .inputs = {{"grad_out", "R N", "<g>"},
                 {"expert_offsets", "E+1", "int32"},
                 {"expert_counts", "E", "int32"}},
      .outputs = {{"grad_bias", "E N", "@bias_dtype"}},
      .attributes = {dtype("bias_dtype", "bias")},
      .shard_axes = "N",
  });
  ops.push_back({
      .name = "activate",
      .summary = "out = f(x) in float32, rounded once; `activation` names f.",
      .inputs = {{"x", "R F", "<x>"}},
      .outputs = {{"out", "R F", "<x>"}},
      .attributes = {activation(), real("alpha")},
      .backward = {"activate_bwd"},
      .shard_axes = "R F",
  });
  ops.push_back({
      .name = "activate_bwd",
      .summary = "grad_x = grad_out * f'(x).",
      .inputs = {{"grad_out", "R F", "<x>"}, {"x", "R F", "<x>"}},
      .outputs = {{"grad_x", "R F", "<x>"}},
      .attributes = {activation(), real("alpha")},
      .shard_axes = "R F",
  });
  ops.push_back({
      .name = "glu",
      .summary = "out = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset) in float32, "
                 "rounded once; no limit if `limit` is 0.",
      .inputs = {{"gate", "R F", "<x>"}, {"up", "R F", "<x>"}},
      .outputs = {{"out", "R F", "<x>"}},
      .attributes = glu_options(),
      .backward = {"glu_bwd"},
      .shard_axes = "R F",
  });
  ops.push_back({
      .name = "glu_bwd",
      .summary = "grad_gate = grad_out * (clamp(up) + up_offset) * f'(gate), grad_up = grad_out * "
                 "f(min(gate, limit)); 0 for an element beyond its limit.",
      .inputs = {{"grad_out", "R F", "<x>"}, {"gate", "R F", "<x>"}, {"up", "R F", "<x>"}},
      .outputs = {{"grad_gate", "R F", "<x>"}, {"grad_up", "R F", "<x>"}},
      .attributes = glu_options(),
      .shard_axes = "R F",
  });
  ops.push_back({
      .name = "scale_rows",
      .summary = "y[t] = scale[t] * x[t] in float32, rounded once.",
      .inputs = {{"x", "T D", "<x>"}, {"scale", "T", "float32"}},
      .outputs = {{"y", "T D", "<x>"}},
      .attributes = {},
      .backward = {"scale_rows_bwd"},
      .shard_axes = "T D",
  });
  ops.push_back({
      .name = "scale_rows_bwd",
      .summary = "grad_x[t] = scale[t] * grad_y[t], grad_scale[t] = dot(x[t], grad_y[t]).",
      .inputs = {{"grad_y", "T D", "<x>"}, {"x", "T D", "<x>"}, {"scale", "T", "float32"}},
      .outputs = {{"grad_x", "T D", "<x>"}, {"grad_scale", "T", "float32"}},
      .attributes = {},
      .shard_axes = "T D",
  });

  // --- plumbing --------------------------------------------------------------------------------
  ops.push_back({
      .name = "add",
      .summary = "out = a + b in float32, rounded once: for the two parts of a result, and the "
                 "cotangents of a tensor that is used twice, because the frameworks' own additions "
                 "may flush denormals.",
      .inputs = {{"a", "R D", "<x>"}, {"b", "R D", "<x>"}},
      .outputs = {{"out", "R D", "<x>"}},
      .attributes = {},
      .shard_axes = "R D",
  });
  ops.push_back({
      .name = "cast",
      .summary = "out = x in another dtype, rounded once. The frameworks' own casts may flush "
                 "denormals.",
      .inputs = {{"x", "R D", "<x>"}},
      .outputs = {{"out", "R D", "@out_dtype"}},
      .attributes = {dtype("out_dtype")},
      .backward = {"cast_bwd"},
      .shard_axes = "R D",
  });
  ops.push_back({
      .name = "cast_bwd",
      .summary = "grad_x = grad_out in the dtype of x, rounded once.",
      .inputs = {{"grad_out", "R D", "@out_dtype"}},
      .outputs = {{"grad_x", "R D", "@x_dtype"}},
      .attributes = {dtype("out_dtype"), dtype("x_dtype", "x")},
      .shard_axes = "R D",
  });
}

}  // namespace duomoe
