// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "op_table_parts.h"

namespace duomoe {

void add_exchange_ops(std::vector<OpSpec>& ops) {
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
}

}  // namespace duomoe
