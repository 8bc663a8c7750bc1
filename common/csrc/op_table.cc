// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "op_table.h"

#include "op_table_parts.h"

namespace duomoe {
namespace {

std::vector<OpSpec> make_table() {
  std::vector<OpSpec> ops;
  add_router_ops(ops);
  add_dispatch_ops(ops);
  add_exchange_ops(ops);
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
