// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "op_table_parts.h"

namespace duomoe {
namespace {

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

}  // namespace

void add_router_ops(std::vector<OpSpec>& ops) {
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
      .summary =
          "mismatched_tokens: tokens whose experts differ between `indices` and `others`, slots "
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
  });
}

}  // namespace duomoe
