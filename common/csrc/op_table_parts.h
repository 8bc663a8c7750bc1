// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The parts of the op table, and what their declarations share.
#pragma once

#include <utility>

#include "op_table.h"

namespace duomoe {

void add_router_ops(std::vector<OpSpec>& ops);    // gate, route, losses, expert bias
void add_dispatch_ops(std::vector<OpSpec>& ops);  // plan, rows, experts
void add_exchange_ops(std::vector<OpSpec>& ops);  // routing and row maps of other libraries

constexpr bool kOptional = true;

inline AttributeSpec integer(std::string name, int64_t minimum, std::string axis = "") {
  return {.name = std::move(name),
          .kind = AttributeKind::kInt,
          .minimum = minimum,
          .axis = std::move(axis)};
}
inline AttributeSpec real(std::string name) {
  return {.name = std::move(name), .kind = AttributeKind::kFloat};
}
inline AttributeSpec choice(std::string name, std::vector<std::string> choices) {
  return {.name = std::move(name), .kind = AttributeKind::kChoice, .choices = std::move(choices)};
}
inline AttributeSpec dtype(std::string name, std::string dtype_of = "") {
  return {.name = std::move(name),
          .kind = AttributeKind::kChoice,
          .choices = float_dtypes(),
          .dtype_of = std::move(dtype_of)};
}

// Orders match the enums of math/router.h.
inline AttributeSpec score() { return choice("score", {"softmax", "sigmoid", "sqrtsoftplus"}); }
inline AttributeSpec select_on() { return choice("select_on", {"score", "logit"}); }

}  // namespace duomoe
