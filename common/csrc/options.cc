// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <limits>

namespace duomoe {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

Status check_route(const Call& call) {
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), top_k = call.axis('K');
  if (top_k > experts) {
    return {"top_k must be between 1 and the number of experts (" + text(experts) + "), got " +
            text(top_k)};
  }
  const int64_t sequences = call.axis('S');
  const bool slice = call.in("first_token").present();
  const int64_t total = slice ? call.integer("total_tokens") : tokens;
  if (total % sequences) {
    return {"the number of tokens (" + text(total) + ") must be divisible by num_sequences (" +
            text(sequences) + ")"};
  }
  if (total > std::numeric_limits<int32_t>::max() / top_k) {
    return {"counts are int32: tokens * top_k must stay below 2^31, got " + text(total) + " * " +
            text(top_k)};
  }
  if (call.has_attribute("num_groups")) {
    const int64_t groups = call.integer("num_groups"), kept = call.integer("group_top_k");
    if (experts % groups) {
      return {"the number of experts (" + text(experts) + ") must be divisible by num_groups (" +
              text(groups) + ")"};
    }
    if (kept > groups)
      return {"group_top_k (" + text(kept) + ") must not exceed num_groups (" + text(groups) + ")"};
    if (kept * (experts / groups) < top_k) {
      return {"the kept groups hold " + text(kept * (experts / groups)) +
              " experts, fewer than top_k (" + text(top_k) + ")"};
    }
  }
  return {};
}

}  // namespace

Status check_options(const Call& call) {
  if (call.op.name == "route" || call.op.name == "route_bwd") return check_route(call);
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  if (call.axis('T') >= 0 && call.axis('K') > 0 && call.axis('T') > limit / call.axis('K')) {
    return {"row numbers are int32: tokens * top_k must stay below 2^31, got " +
            text(call.axis('T')) + " * " + text(call.axis('K'))};
  }
  if (call.op.name == "plan_mask" || call.op.name == "read_row_map") {
    const int64_t tokens = call.axis('T'), experts = call.axis('E');
    if (call.axis('W') != 2 * experts + 1) {
      return {"row_id_map must have 2 * experts + 1 columns, got " + text(call.axis('W')) +
              " for " + text(experts) + " experts"};
    }
    if (experts > 0 && tokens > limit / experts) {
      return {"row numbers are int32: tokens * experts must stay below 2^31, got " + text(tokens) +
              " * " + text(experts)};
    }
  }
  if (call.op.name == "place_chunks" && call.axis('T') > limit) {
    return {"row numbers are int32: tokens must stay below 2^31, got " + text(call.axis('T'))};
  }
  if (call.op.name == "plan_dispatch" || call.op.name == "plan_mask") {
    if (call.integer("alignment") > limit) {
      return {"alignment must stay below 2^31, got " + text(call.integer("alignment"))};
    }
    if (call.op.name == "plan_dispatch" && call.integer("capacity") >= 0 &&
        call.choice<DropOrder>("drop_order") == DropOrder::kWeight &&
        !call.in("weights").present()) {
      return {"drop_order='weight' needs weights"};
    }
  }
  if (call.op.name == "count_quantile_bins" && call.integer("top_k") >= call.axis('E')) {
    return {"top_k must be below the number of experts (" + text(call.axis('E')) + "), got " +
            text(call.integer("top_k"))};
  }
  if (call.op.name == "update_expert_bias_by_quantile") {
    const double decay = call.real("decay");
    if (call.integer("top_k") > call.axis('E')) {
      return {"top_k must not exceed the number of experts (" + text(call.axis('E')) + "), got " +
              text(call.integer("top_k"))};
    }
    if (!(decay >= 0 && decay <= 1)) {
      return {"decay must be between 0 and 1, got " + std::to_string(decay)};
    }
  }
  if (call.op.name == "mark_expert_bits" &&
      call.axis('B') != (call.integer("num_experts") + 7) / 8) {
    return {"num_bytes must be ceil(num_experts / 8), got " + text(call.axis('B')) + " for " +
            text(call.integer("num_experts")) + " experts"};
  }
  if ((call.op.name == "aux_loss" || call.op.name == "aux_loss_bwd") &&
      call.axis('N') % call.integer("num_experts")) {
    return {"the columns (" + text(call.axis('N')) + ") must be a multiple of num_experts (" +
            text(call.integer("num_experts")) + ")"};
  }
  if (call.has_attribute("limit") && !(call.real("limit") >= 0)) {
    return {"limit must not be negative, got " + std::to_string(call.real("limit"))};
  }
  if (call.axis('R') > limit)
    return {"row numbers are int32: rows must stay below 2^31, got " + text(call.axis('R'))};
  return {};
}

}  // namespace duomoe
