// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The op table as JSON, which the Python package `duomoe` reads.
#include <sstream>

#include "op_table.h"

namespace duomoe {
namespace {

void quote(std::ostream& os, const std::string& text) {
  os << '"';
  for (char c : text) {
    if (c == '"' || c == '\\') os << '\\';
    os << c;
  }
  os << '"';
}

template <typename T, typename Write>
void list(std::ostream& os, const std::vector<T>& items, Write write) {
  os << '[';
  for (size_t i = 0; i < items.size(); ++i) {
    if (i) os << ", ";
    write(items[i]);
  }
  os << ']';
}

}  // namespace

std::string op_table_json() {
  std::ostringstream os;
  auto text = [&](const std::string& s) { quote(os, s); };
  auto field = [&](const char* key, const std::string& value, bool first = false) {
    os << (first ? "" : ", ") << '"' << key << "\": ";
    quote(os, value);
  };
  auto tensor = [&](const TensorSpec& t) {
    os << '{';
    field("name", t.name, true);
    field("axes", t.axes);
    field("dtype", t.dtype);
    os << ", \"optional\": " << (t.optional ? "true" : "false") << '}';
  };
  list(os, op_table(), [&](const OpSpec& op) {
    os << '{';
    field("name", op.name, true);
    field("summary", op.summary);
    field("shard_axes", op.shard_axes);
    os << ", \"inputs\": ";
    list(os, op.inputs, tensor);
    os << ", \"outputs\": ";
    list(os, op.outputs, tensor);
    os << ", \"attributes\": ";
    list(os, op.attributes, [&](const AttributeSpec& a) {
      static const char* kinds[] = {"int", "float", "choice"};
      os << '{';
      field("name", a.name, true);
      field("kind", kinds[static_cast<int>(a.kind)]);
      field("axis", a.axis);
      field("dtype_of", a.dtype_of);
      os << ", \"minimum\": " << a.minimum << ", \"choices\": ";
      list(os, a.choices, text);
      os << '}';
    });
    os << ", \"backward\": ";
    list(os, op.backward, text);
    os << '}';
  });
  return os.str();
}

}  // namespace duomoe
