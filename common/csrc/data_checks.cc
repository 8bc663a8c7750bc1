// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "data_checks.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
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

// An int32 tensor on the host.
Status read(const Call& call, Backend backend, const TensorView& view,
            std::vector<int32_t>& values) {
  values.resize(view.size());
  if (values.empty()) return {};
  if (backend == Backend::kCpu) {
    std::memcpy(values.data(), view.data, values.size() * sizeof(int32_t));
    return {};
  }
  const Fetch fetch = fetch_of(backend);
  return fetch ? fetch(call.executor, view, values.data()) : Status{};
}

// Every id of [T, K] is -1 or below `limit`. `shown` is the argument's name in the public
// functions.
Status check_ids(const Call& call, Backend backend, const char* name, const char* shown,
                 int64_t limit) {
  const TensorView& view = call.in(name);
  if (!view.present()) return {};
  std::vector<int32_t> ids;
  if (Status s = read(call, backend, view, ids); !s.ok()) return s;
  const int64_t top_k = view.shape[1];
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < -1 || ids[i] >= limit) {
      return {std::string(shown) + " of token " + std::to_string(i / top_k) + ", slot " +
              std::to_string(i % top_k) + " is " + std::to_string(ids[i]) +
              ", allowed: -1 (unused) to " + std::to_string(limit - 1)};
    }
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
  if (op == "route") return check_ids(call, backend, "given_indices", "indices", call.axis('E'));
  if (op == "route_bwd" || op == "plan_dispatch") {
    return check_ids(call, backend, "indices", "indices", call.axis('E'));
  }
  if (op == "permute" || op == "permute_bwd" || op == "combine" || op == "combine_bwd") {
    return check_ids(call, backend, "row_of_slot", "row_of_slot", call.axis('R'));
  }
  return {};
}

Status check_outputs_data(const Call& call, Backend backend) {
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
    size_t slot = 0;
    while (slot + 1 < ids.size() && !(ids[slot] == static_cast<int32_t>(e) && rows[slot] < 0))
      ++slot;
    return {"max_rows leaves expert " + std::to_string(e) + " " + std::to_string(kept[e]) + " of " +
            std::to_string(wanted) + " rows; the first dropped token is " +
            std::to_string(slot / call.axis('K'))};
  }
  return {};
}

}  // namespace duomoe
