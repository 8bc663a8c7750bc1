// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "data_checks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

namespace duomoe {
namespace {

std::atomic<bool>& flag() {
  static std::atomic<bool> on = [] {
    const char* value = std::getenv("DUOMOE_DEBUG");
    return value && *value && std::strcmp(value, "0") != 0;
  }();
  return on;
}

Fetch& fetch_of(Backend backend) {
  static Fetch table[2] = {nullptr, nullptr};
  return table[static_cast<int>(backend)];
}

// A tensor's elements on the host; none of an absent one.
template <typename T>
Status read(const Call& call, Backend backend, const TensorView& view, std::vector<T>& values) {
  values.resize(view.present() ? view.size() : 0);
  if (values.empty()) return {};
  if (backend == Backend::kCpu) {
    std::memcpy(values.data(), view.data, values.size() * sizeof(T));
    return {};
  }
  const Fetch fetch = fetch_of(backend);
  return fetch ? fetch(call.executor, view, values.data()) : Status{};
}

std::string allowed(int64_t limit) {
  return ", allowed: -1 (unused) to " + std::to_string(limit - 1);
}

// Every id of [T, K] is -1 or below `limit`, but for masked tokens. `shown` is the argument's name
// in the public functions.
Status check_ids(const Call& call, Backend backend, const char* name, const char* shown,
                 int64_t limit, const TensorView& mask = {}) {
  std::vector<int32_t> ids;
  std::vector<uint8_t> keep;
  if (Status s = read(call, backend, call.in(name), ids); !s.ok()) return s;
  if (Status s = read(call, backend, mask, keep); !s.ok()) return s;
  const int64_t top_k = call.in(name).shape[1];
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!keep.empty() && !keep[i / top_k]) continue;
    if (ids[i] < -1 || ids[i] >= limit) {
      return {std::string(shown) + " of token " + std::to_string(i / top_k) + ", slot " +
              std::to_string(i % top_k) + " is " + std::to_string(ids[i]) + allowed(limit)};
    }
  }
  return {};
}

// Every slot number of [R] is -1 or below T * K.
Status check_slots(const Call& call, Backend backend) {
  std::vector<int32_t> slots;
  if (Status s = read(call, backend, call.in("slot_of_row"), slots); !s.ok()) return s;
  const int64_t limit = call.axis('T') * call.axis('K');
  for (size_t r = 0; r < slots.size(); ++r) {
    if (slots[r] < -1 || slots[r] >= limit) {
      return {"slot_of_row of row " + std::to_string(r) + " is " + std::to_string(slots[r]) +
              allowed(limit)};
    }
  }
  return {};
}

// The range of the bins is one.
Status check_bounds(const Call& call, Backend backend) {
  std::vector<float> lower, upper;
  if (Status s = read(call, backend, call.in("lower"), lower); !s.ok()) return s;
  if (Status s = read(call, backend, call.in("upper"), upper); !s.ok()) return s;
  if (lower[0] < upper[0] && std::isfinite(upper[0] - lower[0])) return {};
  return {"bounds must be finite, the lower below the upper, got " + std::to_string(lower[0]) +
          " and " + std::to_string(upper[0])};
}

// A token's line lists as many rows as it says, of experts below E, each within the rows.
Status check_row_map(const Call& call, Backend backend) {
  std::vector<int32_t> map, pads;
  if (Status s = read(call, backend, call.in("row_id_map"), map); !s.ok()) return s;
  if (Status s = read(call, backend, call.in("pad_offsets"), pads); !s.ok()) return s;
  const int64_t experts = call.axis('E'), num_rows = call.integer("num_rows");
  for (int64_t t = 0; t < call.axis('T'); ++t) {
    const int32_t* line = map.data() + t * (2 * experts + 1);
    const std::string token = "row_id_map of token " + std::to_string(t);
    const int64_t n = line[2 * experts];
    if (n < 0 || n > experts) {
      return {token + " lists " + std::to_string(n) + " rows, allowed: 0 to " +
              std::to_string(experts)};
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t e = line[experts + i];
      if (e < 0 || e >= experts) {
        return {token + " names expert " + std::to_string(e) + ", allowed: 0 to " +
                std::to_string(experts - 1)};
      }
      const int64_t row = int64_t{line[i]} + (pads.empty() ? 0 : pads[e]);
      if (line[i] < 0 || row < 0 || row >= num_rows) {
        return {token + " leads to row " + std::to_string(row) + " of " + std::to_string(num_rows)};
      }
    }
  }
  return {};
}

// Sizes are not negative and fit the tokens, and the order is a permutation.
Status check_chunks(const Call& call, Backend backend) {
  std::vector<int32_t> sizes, order;
  if (Status s = read(call, backend, call.in("split_sizes"), sizes); !s.ok()) return s;
  if (Status s = read(call, backend, call.in("sorted_indices"), order); !s.ok()) return s;
  int64_t total = 0;
  for (size_t c = 0; c < sizes.size(); ++c) {
    if (sizes[c] < 0) {
      return {"split_sizes of chunk " + std::to_string(c) + " is " + std::to_string(sizes[c])};
    }
    total += sizes[c];
  }
  if (total > call.axis('T')) {
    return {"split_sizes sum to " + std::to_string(total) + ", more than the " +
            std::to_string(call.axis('T')) + " tokens"};
  }
  std::vector<bool> seen(sizes.size(), false);
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t c = order[i];
    if (c < 0 || c >= static_cast<int64_t>(seen.size()) || seen[c]) {
      return {"the order of the chunks is no permutation: place " + std::to_string(i) + " holds " +
              std::to_string(c)};
    }
    seen[c] = true;
  }
  return {};
}

// What `limit` leaves out was asked for; what num_rows cuts off was not.
Status check_mask_rows(const Call& call, Backend backend) {
  std::vector<int32_t> kept, routed;
  if (Status s = read(call, backend, call.out("expert_counts"), kept); !s.ok()) return s;
  if (Status s = read(call, backend, call.out("routed_counts"), routed); !s.ok()) return s;
  const int64_t limit = call.integer("limit");
  int64_t left = limit >= 0 ? limit : call.axis('T') * call.axis('E');
  for (size_t e = 0; e < kept.size(); ++e) {
    const int64_t wanted = std::min<int64_t>(routed[e], left);
    if (kept[e] != wanted) {
      return {"the rows leave expert " + std::to_string(e) + " " + std::to_string(kept[e]) +
              " of the " + std::to_string(wanted) + " that routing_map asks for"};
    }
    left -= wanted;
  }
  return {};
}

}  // namespace

void set_debug_checks(bool on) { flag() = on; }
bool debug_checks() { return flag(); }

bool register_fetch(Backend backend, Fetch fetch) {
  fetch_of(backend) = fetch;
  return true;
}

Status check_inputs_data(const Call& call, Backend backend) {
  const std::string& op = call.op.name;
  if (op == "route") {
    return check_ids(call, backend, "given_indices", "indices", call.axis('E'),
                     call.in("token_mask"));
  }
  if (op == "count_quantile_bins") return check_bounds(call, backend);
  if (op == "mark_expert_bits") {
    return check_ids(call, backend, "indices", "indices", call.integer("num_experts"));
  }
  if (op == "route_bwd" || op == "plan_dispatch" || op == "scatter_weights" ||
      op == "mark_experts") {
    return check_ids(call, backend, "indices", "indices", call.axis('E'));
  }
  if (op == "read_row_map") return check_row_map(call, backend);
  if (op == "place_chunks") return check_chunks(call, backend);
  if (op == "sort_slots") {
    return check_ids(call, backend, "indices", "indices", std::numeric_limits<int32_t>::max());
  }
  if (op == "permute" || op == "combine_bwd") {
    if (Status s = check_slots(call, backend); !s.ok()) return s;
  }
  if (op == "permute" || op == "permute_bwd" || op == "combine" || op == "combine_bwd" ||
      op == "invert_rows") {
    return check_ids(call, backend, "row_of_slot", "row_of_slot", call.axis('R'));
  }
  return {};
}

Status check_outputs_data(const Call& call, Backend backend) {
  if (call.op.name == "plan_mask") return check_mask_rows(call, backend);
  if (call.op.name != "plan_dispatch") return {};
  // What capacity drops was asked for; what num_rows cuts off was not.
  std::vector<int32_t> kept, routed, rows;
  if (Status s = read(call, backend, call.out("expert_counts"), kept); !s.ok()) return s;
  if (Status s = read(call, backend, call.out("routed_counts"), routed); !s.ok()) return s;
  if (Status s = read(call, backend, call.out("row_of_slot"), rows); !s.ok()) return s;
  std::vector<int32_t> ids;
  if (Status s = read(call, backend, call.in("indices"), ids); !s.ok()) return s;
  const int64_t capacity = call.integer("capacity");
  for (size_t e = 0; e < kept.size(); ++e) {
    const int64_t wanted = capacity >= 0 ? std::min<int64_t>(routed[e], capacity) : routed[e];
    if (kept[e] == wanted) continue;
    std::string message = "max_rows leaves expert " + std::to_string(e) + " " +
                          std::to_string(kept[e]) + " of " + std::to_string(wanted) + " rows";
    // Where capacity drops slots too, a slot without a row does not tell who dropped it.
    if (routed[e] > wanted) return {message};
    size_t slot = 0;
    while (slot + 1 < ids.size() && !(ids[slot] == static_cast<int32_t>(e) && rows[slot] < 0)) {
      ++slot;
    }
    return {message + "; the first dropped token is " + std::to_string(slot / call.axis('K'))};
  }
  return {};
}

}  // namespace duomoe
