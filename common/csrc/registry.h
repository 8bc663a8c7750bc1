// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// From an op's name to its kernel: `run` checks a call against the op table once, for both bindings
// and all backends, then hands it to the kernel as a `Call` whose parts are read by name.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "op_table.h"
#include "tensor_view.h"
#include "workspace.h"

namespace duomoe {

enum class Backend { kCpu, kCuda };

// The value of one attribute; which member counts follows from the attribute's kind.
struct AttributeValue {
  int64_t integer = 0;  // an int, or a choice's position
  double real = 0;
};

// The position of a choice's name, or -1. For bindings that receive choices as text.
DUOMOE_EXPORT int choice_index(const AttributeSpec& spec, std::string_view name);

class Call {
 public:
  const OpSpec& op;
  std::span<const TensorView> inputs;
  std::span<const TensorView> outputs;
  std::span<const AttributeValue> attributes;
  Executor& executor;
  std::array<int64_t, 26> axes{};  // length by axis letter, -1 where the op has no such axis
  Workspace workspace{};           // of the size that the kernel declared

  const TensorView& in(std::string_view name) const;
  const TensorView& out(std::string_view name) const;
  int64_t axis(char letter) const { return axes[letter - 'A']; }
  int64_t integer(std::string_view name) const { return attribute(name).integer; }
  double real(std::string_view name) const { return attribute(name).real; }
  template <typename Enum>
  Enum choice(std::string_view name) const {
    return static_cast<Enum>(attribute(name).integer);
  }
  bool has_attribute(std::string_view name) const;

 private:
  const AttributeValue& attribute(std::string_view name) const;
};

using Kernel = Status (*)(const Call&);

// Defines a kernel: DUOMOE_KERNEL(kCpu, route) { ... return {}; }
#define DUOMOE_KERNEL(backend, op_name)                                                  \
  static Status op_name##_kernel(const Call& call);                                      \
  static const bool op_name##_registered =                                               \
      ::duomoe::register_kernel(#op_name, ::duomoe::Backend::backend, op_name##_kernel); \
  static Status op_name##_kernel([[maybe_unused]] const Call& call)

bool register_kernel(std::string_view op, Backend backend, Kernel kernel);

using WorkspaceBytes = int64_t (*)(const Call&);

// Declares how much memory a kernel takes from call.workspace, at most:
// DUOMOE_WORKSPACE(kCuda, route) { return piece_bytes<float>(call.axis('E')); }
// The call has no data and no outputs: read axes, attributes, and the inputs' presence and dtypes.
#define DUOMOE_WORKSPACE(backend, op_name)                                                     \
  static int64_t op_name##_workspace(const Call& call);                                        \
  static const bool op_name##_workspace_registered =                                           \
      ::duomoe::register_workspace(#op_name, ::duomoe::Backend::backend, op_name##_workspace); \
  static int64_t op_name##_workspace([[maybe_unused]] const Call& call)

bool register_workspace(std::string_view op, Backend backend, WorkspaceBytes bytes);

// Binds the axes of the inputs and attributes and writes the shape and dtype of every output (no
// data). For a binding that allocates the outputs itself. All spans follow the order of the op
// table.
DUOMOE_EXPORT Status infer_outputs(int op, std::span<const TensorView> inputs,
                                   std::span<const AttributeValue> attributes,
                                   std::span<TensorView> outputs);

// Writes the size of the workspace that a call of these inputs (no data) takes; 0 if it takes none.
DUOMOE_EXPORT Status workspace_bytes(int op, Backend backend, std::span<const TensorView> inputs,
                                     std::span<const AttributeValue> attributes, int64_t& bytes);

// Checks everything, then runs the kernel. Writes nothing unless the checks pass.
DUOMOE_EXPORT Status run(int op, Backend backend, std::span<const TensorView> inputs,
                         std::span<const TensorView> outputs,
                         std::span<const AttributeValue> attributes, Executor& executor);

DUOMOE_EXPORT bool has_kernel(int op, Backend backend);
DUOMOE_EXPORT bool has_workspace(int op, Backend backend);

}  // namespace duomoe
