// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "op_table.h"

namespace duomoe {
namespace {

AttributeSpec integer(std::string name, int64_t minimum, std::string axis = "") {
  return {.name = std::move(name),
          .kind = AttributeKind::kInt,
          .minimum = minimum,
          .axis = std::move(axis)};
}
AttributeSpec real(std::string name) {
  return {.name = std::move(name), .kind = AttributeKind::kFloat};
}
AttributeSpec choice(std::string name, std::vector<std::string> choices) {
  return {.name = std::move(name), .kind = AttributeKind::kChoice, .choices = std::move(choices)};
}
AttributeSpec dtype(std::string name, std::string dtype_of = "") {
  return {.name = std::move(name),
          .kind = AttributeKind::kChoice,
          .choices = float_dtypes(),
          .dtype_of = std::move(dtype_of)};
}

// Orders match the enums of math/router.h.
AttributeSpec score() { return choice("score", {"softmax", "sigmoid", "sqrtsoftplus"}); }
AttributeSpec select_on() { return choice("select_on", {"score", "logit"}); }

// Order matches math::Activation.
AttributeSpec activation() {
  return choice("activation", {"silu", "gelu", "gelu_tanh", "relu", "relu_squared"});
}
std::vector<AttributeSpec> glu_options() {
  return {activation(), real("alpha"), real("limit"), real("up_offset")};
}

constexpr bool kOptional = true;

// The options of `route` that its backward needs too. Orders of choices match math/router.h.
std::vector<AttributeSpec> router_options(bool forward) {
  std::vector<AttributeSpec> options = {
      integer("top_k", 1, "K"),
      score(),
      choice("normalize", {"never", "always", "if_k_gt_1"}),
      real("eps"),
      choice("eps_mode", {"add", "clamp"}),
      real("scale"),
      integer("num_sequences", 1, "S"),
      integer("total_tokens", 0),
  };
  if (forward) {
    options.insert(options.end(), {
                                      select_on(),
                                      integer("num_groups", 1),
                                      integer("group_top_k", 1),
                                      integer("group_score_k", 1),
                                      choice("counts", {"actual", "unbiased"}),
                                  });
  }
  return options;
}

std::vector<OpSpec> make_table() {
  std::vector<OpSpec> ops;

  // --- gate ------------------------------------------------------------------------------------
  ops.push_back({
      .name = "gate",
      .summary = "logits = x . router + router_bias: operands rounded to gate_dtype, summed in "
                 "float32, rounded once "
                 "to gate_dtype. A masked token's logits are 0, and it takes part in no gradient, "
                 "whatever its x holds.",
      .inputs = {{"x", "T D", "<x>"},
                 {"router", "D E", "<w>"},
                 {"router_bias", "E", "<b>", kOptional},
                 {"token_mask", "T", "bool", kOptional}},
      .outputs = {{"logits", "T E", "@gate_dtype"}},
      .attributes = {dtype("gate_dtype")},
      .backward = {"gate_bwd_x", "gate_bwd_params"},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "gate_bwd_x",
      .summary = "grad_x = grad_logits . router^T.",
      .inputs = {{"grad_logits", "T E", "@gate_dtype"},
                 {"router", "D E", "<w>"},
                 {"token_mask", "T", "bool", kOptional}},
      .outputs = {{"grad_x", "T D", "@x_dtype"}},
      .attributes = {dtype("gate_dtype"), dtype("x_dtype", "x")},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "gate_bwd_params",
      .summary =
          "grad_router = x^T . grad_logits and grad_router_bias = sum over tokens of grad_logits.",
      .inputs = {{"grad_logits", "T E", "@gate_dtype"},
                 {"x", "T D", "<x>"},
                 {"token_mask", "T", "bool", kOptional}},
      .outputs = {{"grad_router", "D E", "@router_dtype"},
                  {"grad_router_bias", "E", "@router_bias_dtype"}},
      .attributes = {dtype("gate_dtype"), dtype("router_dtype", "router"),
                     dtype("router_bias_dtype", "router_bias")},
      .shard_axes = "T",
  });

  // --- route -----------------------------------------------------------------------------------
  ops.push_back({
      .name = "route",
      .summary = "Top-K selection, weights and the statistics of both losses, in one pass over the "
                 "logits.",
      .inputs = {{"logits", "T E", "<x>"},
                 {"bias", "E", "float32", kOptional},
                 {"given_indices", "T K", "int32", kOptional},
                 {"token_mask", "T", "bool", kOptional},
                 {"first_token", "", "int32", kOptional}},
      .outputs = {{"weights", "T K", "float32"},
                  {"indices", "T K", "int32"},
                  {"expert_counts", "E", "int32"},
                  {"sequence_counts", "S E", "int32"},
                  {"score_sums", "S E", "float32"},
                  {"logsumexp_sq", "S", "float32"},
                  {"num_tokens", "S", "int32"}},
      .attributes = router_options(/*forward=*/true),
      .backward = {"route_bwd"},
      .shard_axes = "T",
      .cuda_scratch = true,
  });
  ops.push_back({
      .name = "route_bwd",
      .summary = "Gradient of the weights, score_sums and logsumexp_sq with respect to the logits, "
                 "recomputed from the logits in one pass.",
      .inputs = {{"logits", "T E", "<x>"},
                 {"indices", "T K", "int32"},
                 {"token_mask", "T", "bool", kOptional},
                 {"first_token", "", "int32", kOptional},
                 {"grad_weights", "T K", "float32"},
                 {"grad_score_sums", "S E", "float32"},
                 {"grad_logsumexp_sq", "S", "float32"}},
      .outputs = {{"grad_logits", "T E", "<x>"}},
      .attributes = router_options(/*forward=*/false),
      .shard_axes = "T",
  });

  ops.push_back({
      .name = "count_mismatches",
      .summary = "mismatched_tokens: tokens whose experts differ between `indices` and `others`, slots "
                 "in any order and unused ones (negative ids) left out; mismatched_slots: slots of "
                 "`indices` that `others` lacks.",
      .inputs = {{"indices", "T K", "int32"}, {"others", "T K", "int32"}},
      .outputs = {{"mismatched_tokens", "", "int32"}, {"mismatched_slots", "", "int32"}},
      .attributes = {},
      .shard_axes = "T",
  });

  // --- losses ----------------------------------------------------------------------------------
  ops.push_back({
      .name = "load_balancing_loss",
      .summary =
          "coeff * mean over sequences with n > 0 of E / (K n^2) * sum_e counts_e * score_sums_e.",
      .inputs = {{"sequence_counts", "S E", "int32"},
                 {"score_sums", "S E", "float32"},
                 {"num_tokens", "S", "int32"}},
      .outputs = {{"loss", "", "float32"}},
      .attributes = {integer("top_k", 1), real("coeff")},
      .backward = {"load_balancing_loss_bwd"},
  });
  ops.push_back({
      .name = "load_balancing_loss_bwd",
      .summary =
          "grad_score_sums[s, e] = grad_loss * coeff * E / (K n_s^2 #{n > 0}) * counts[s, e].",
      .inputs = {{"sequence_counts", "S E", "int32"},
                 {"num_tokens", "S", "int32"},
                 {"grad_loss", "", "float32"}},
      .outputs = {{"grad_score_sums", "S E", "float32"}},
      .attributes = {integer("top_k", 1), real("coeff")},
  });
  ops.push_back({
      .name = "z_loss",
      .summary = "coeff * sum(logsumexp_sq) / sum(num_tokens); 0 without tokens.",
      .inputs = {{"logsumexp_sq", "S", "float32"}, {"num_tokens", "S", "int32"}},
      .outputs = {{"loss", "", "float32"}},
      .attributes = {real("coeff")},
      .backward = {"z_loss_bwd"},
  });
  ops.push_back({
      .name = "z_loss_bwd",
      .summary = "grad_logsumexp_sq[s] = grad_loss * coeff / sum(num_tokens).",
      .inputs = {{"num_tokens", "S", "int32"}, {"grad_loss", "", "float32"}},
      .outputs = {{"grad_logsumexp_sq", "S", "float32"}},
      .attributes = {real("coeff")},
  });

  // --- expert bias -----------------------------------------------------------------------------
  ops.push_back({
      .name = "update_expert_bias",
      .summary =
          "updated_bias[e] = bias[e] + rate * sign(mean load - counts[e]), the step less its "
          "mean over the experts where `center` is yes.",
      .inputs = {{"bias", "E", "float32"}, {"expert_counts", "E", "int32"}},
      .outputs = {{"updated_bias", "E", "float32"}},
      .attributes = {real("rate"), choice("center", {"no", "yes"})},
  });
  ops.push_back({
      .name = "count_quantile_bins",
      .summary =
          "cutoffs[t] is the (K+1)-th selection value of token t; cutoffs[t] - s[t, e] falls "
          "into one of B equal bins of [lower, upper), the end bins taking what lies beyond.",
      .inputs = {{"logits", "T E", "<x>"},
                 {"bias", "E", "float32", kOptional},
                 {"token_mask", "T", "bool", kOptional},
                 {"lower", "", "float32"},
                 {"upper", "", "float32"}},
      .outputs = {{"cutoffs", "T", "float32"}, {"bin_counts", "E B", "int32"}},
      .attributes = {integer("top_k", 1), score(), select_on(), integer("num_bins", 1, "B")},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "update_expert_bias_by_quantile",
      .summary =
          "updated_bias[e] = decay * bias[e] + (1 - decay) * (the K/E quantile of expert e's "
          "bins), less the mean over the experts.",
      .inputs = {{"bias", "E", "float32"},
                 {"bin_counts", "E B", "int32"},
                 {"lower", "", "float32"},
                 {"upper", "", "float32"}},
      .outputs = {{"updated_bias", "E", "float32"}},
      .attributes = {integer("top_k", 1), real("decay")},
      .cuda_scratch = true,
  });

  // --- dense routing: [T, E] matrices, as other libraries exchange them --------------------------
  ops.push_back({
      .name = "scatter_weights",
      .summary = "probs[t, e] = sum of weights[t, k] over the slots k of token t with expert e, in "
                 "slot order and float32, rounded once; 0 elsewhere.",
      .inputs = {{"weights", "T K", "float32"}, {"indices", "T K", "int32"}},
      .outputs = {{"probs", "T E", "@probs_dtype"}},
      .attributes = {integer("num_experts", 1, "E"), dtype("probs_dtype")},
      .backward = {"scatter_weights_bwd"},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "scatter_weights_bwd",
      .summary = "grad_weights[t, k] = grad_probs[t, indices[t, k]]; 0 for an unused slot.",
      .inputs = {{"grad_probs", "T E", "@probs_dtype"}, {"indices", "T K", "int32"}},
      .outputs = {{"grad_weights", "T K", "float32"}},
      .attributes = {integer("num_experts", 1, "E"), dtype("probs_dtype")},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "mark_experts",
      .summary = "routing_map[t, e] tells whether a slot of token t has expert e.",
      .inputs = {{"indices", "T K", "int32"}},
      .outputs = {{"routing_map", "T E", "bool"}},
      .attributes = {integer("num_experts", 1, "E")},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "mark_expert_bits",
      .summary = "mark_experts, packed: bit e % 8 of byte e / 8 of a token, B = ceil(num_experts / "
                 "8) bytes; the bits past the last expert are 0.",
      .inputs = {{"indices", "T K", "int32"}},
      .outputs = {{"routing_map", "T B", "uint8"}},
      .attributes = {integer("num_experts", 1), integer("num_bytes", 1, "B")},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "normalize_scores",
      .summary = "scores[t] = softmax(z), or s / sum(s) over all experts for the other scores.",
      .inputs = {{"logits", "T E", "<x>"}},
      .outputs = {{"scores", "T E", "float32"}},
      .attributes = {score()},
      .backward = {"normalize_scores_bwd"},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "normalize_scores_bwd",
      .summary =
          "grad_logits = scores * (grad_scores - sum(scores * grad_scores)) * d ln s / dz, the "
          "slope being 1 for the softmax.",
      .inputs = {{"logits", "T E", "<x>"}, {"grad_scores", "T E", "float32"}},
      .outputs = {{"grad_logits", "T E", "<x>"}},
      .attributes = {score()},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "aux_loss",
      .summary = "coeff * num_experts / (top_k n^2) * sum_c expert_loads[c] * sum_t probs[t, c], n "
                 "being num_tokens as float32, or live_tokens where it is given, and the columns c "
                 "the experts of one or several sequences; 0 without tokens.",
      .inputs = {{"probs", "T N", "<x>"},
                 {"expert_loads", "N", "float32"},
                 {"live_tokens", "", "float32", kOptional}},
      .outputs = {{"loss", "", "float32"}},
      .attributes = {integer("num_experts", 1), integer("top_k", 1), integer("num_tokens", 0),
                     real("coeff")},
      .backward = {"aux_loss_bwd"},
      .shard_axes = "T",
      .cuda_scratch = true,
  });
  ops.push_back({
      .name = "aux_loss_bwd",
      .summary = "grad_probs[t, c] = grad_loss * coeff * num_experts / (top_k n^2) * "
                 "expert_loads[c], the same for every token.",
      .inputs = {{"expert_loads", "N", "float32"},
                 {"live_tokens", "", "float32", kOptional},
                 {"grad_loss", "", "float32"}},
      .outputs = {{"grad_probs", "N", "@probs_dtype"}},
      .attributes = {integer("num_experts", 1), integer("top_k", 1), integer("num_tokens", 0),
                     real("coeff"), dtype("probs_dtype", "probs")},
  });

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
      .cuda_scratch = true,
  });
  ops.push_back({
      .name = "permute",
      .summary = "rows[r] = x[t] of the slot (t, k) = slot_of_row[r], times weights[t, k] in float32 "
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
      .summary = "grad_weights[t, k] = dot(x[t], grad_rows[row_of_slot[t, k]]); 0 for a slot without "
                 "a row.",
      .inputs = {{"grad_rows", "R D", "<x>"},
                 {"x", "T D", "<x>"},
                 {"row_of_slot", "T K", "int32"}},
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

  // --- row maps: where rows go, as other libraries exchange it -----------------------------------
  ops.push_back({
      .name = "plan_mask",
      .summary =
          "The rows of a map of tokens by experts, ordered by expert, then token: the first "
          "`limit` of them (-1: all), every expert's block padded to `alignment`; slot t * E + e "
          "is token t at expert e. row_id_map[t] holds the token's n rows as they would lie "
          "without padding, last expert first, from column E on their experts, and n in its last "
          "column; -1 elsewhere. pad_offsets[e] is the padding before expert e.",
      .inputs = {{"routing_map", "T E", "bool"}},
      .outputs = {{"row_of_slot", "T E", "int32"},
                  {"slot_of_row", "R", "int32"},
                  {"row_id_map", "T W", "int32"},
                  {"expert_counts", "E", "int32"},
                  {"routed_counts", "E", "int32"},
                  {"expert_offsets", "E+1", "int32"},
                  {"pad_offsets", "E", "int32"}},
      .attributes = {integer("num_rows", 0, "R"), integer("map_width", 3, "W"),
                     integer("limit", -1), integer("alignment", 1)},
      .cuda_scratch = true,
  });
  ops.push_back({
      .name = "read_row_map",
      .summary =
          "row_of_slot[t, e] is the row of token t at expert e by a row_id_map of plan_mask, "
          "moved down by pad_offsets[e]; -1 where there is none below num_rows.",
      .inputs = {{"row_id_map", "T W", "int32"}, {"pad_offsets", "E", "int32", kOptional}},
      .outputs = {{"row_of_slot", "T E", "int32"}},
      .attributes = {integer("num_experts", 1, "E"), integer("num_rows", 0)},
      .shard_axes = "T",
  });
  ops.push_back({
      .name = "invert_rows",
      .summary = "slot_of_row[r] is the slot with row_of_slot r, the last of several, or -1.",
      .inputs = {{"row_of_slot", "T K", "int32"}},
      .outputs = {{"slot_of_row", "R", "int32"}},
      .attributes = {integer("num_rows", 0, "R")},
  });
  ops.push_back({
      .name = "sort_slots",
      .summary =
          "The first R slots by id, ties by slot, for ids of any size; a slot with a negative "
          "id is unused.",
      .inputs = {{"indices", "T K", "int32"}},
      .outputs = {{"row_of_slot", "T K", "int32"}, {"slot_of_row", "R", "int32"}},
      .attributes = {integer("num_rows", 0, "R")},
      .cuda_scratch = true,
  });
  ops.push_back({
      .name = "place_chunks",
      .summary =
          "Neighbouring tokens form C chunks of split_sizes tokens; row_of_token lays the "
          "chunks down in the order of sorted_indices. -1 for tokens past the last chunk, and "
          "for rows that no token fills.",
      .inputs = {{"split_sizes", "C", "int32"}, {"sorted_indices", "C", "int32"}},
      .outputs = {{"row_of_token", "T", "int32"}, {"token_of_row", "T", "int32"}},
      .attributes = {integer("num_tokens", 0, "T")},
  });

  // --- experts ---------------------------------------------------------------------------------
  ops.push_back({
      .name = "grouped_matmul",
      .summary = "out[r] = rows[r] . w[e] + bias[e] for the rows of expert e, summed in float32 and "
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
      .cuda_scratch = true,
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
      .cuda_scratch = true,
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
      .cuda_scratch = true,
  });
  ops.push_back({
      .name = "grouped_matmul_bwd_bias",
      .summary = "grad_bias[e] = sum of grad_out over the rows of expert e, in float32; exactly 0 for "
                 "an expert without rows.",
      .inputs = {{"grad_out", "R N", "<g>"},
                 {"expert_offsets", "E+1", "int32"},
                 {"expert_counts", "E", "int32"}},
      .outputs = {{"grad_bias", "E N", "@bias_dtype"}},
      .attributes = {dtype("bias_dtype", "bias")},
      .shard_axes = "N",
      .cuda_scratch = true,
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
  return ops;
}

}  // namespace

const std::vector<std::string>& float_dtypes() {
  static const std::vector<std::string> names = {"float32", "bfloat16", "float16"};
  return names;
}

const std::vector<OpSpec>& op_table() {
  static const std::vector<OpSpec> table = make_table();
  return table;
}

int op_index(std::string_view name) {
  const auto& table = op_table();
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace duomoe
