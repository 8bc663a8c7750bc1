// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "registry.h"

#include <exception>
#include <sstream>
#include <stdexcept>

#include "cpu/pages.h"
#include "data_checks.h"
#include "fp_mode.h"
#include "options.h"
#include "version.h"

namespace duomoe {
namespace {

struct Kernels {
  std::array<Kernel, 2> of{};
  std::array<WorkspaceBytes, 2> workspace_of{};
};

std::vector<Kernels>& kernels() {
  static std::vector<Kernels> table(op_table().size());
  return table;
}

std::string shape_text(const TensorView& view) {
  std::ostringstream os;
  os << '[';
  for (int i = 0; i < view.rank; ++i) os << (i ? ", " : "") << view.shape[i];
  os << ']';
  return os.str();
}

const char* dtype_text(DType dtype) {
  static const char* names[] = {"float32", "bfloat16", "float16", "int32", "bool", "uint8"};
  return names[static_cast<int>(dtype)];
}

bool is_float(DType dtype) { return dtype <= DType::kFloat16; }

// Binds axis letters and dtype variables while it walks over the tensors of one call.
class Binder {
 public:
  Binder(const OpSpec& op, std::span<const AttributeValue> attributes,
         std::array<int64_t, 26>& axes)
      : op_(op), attributes_(attributes), axes_(axes) {
    axes_.fill(-1);
    dtypes_.fill(-1);
  }

  Status bind_attributes() {
    if (attributes_.size() != op_.attributes.size()) {
      return fail("takes " + std::to_string(op_.attributes.size()) + " attributes, got " +
                  std::to_string(attributes_.size()));
    }
    for (size_t i = 0; i < attributes_.size(); ++i) {
      const AttributeSpec& spec = op_.attributes[i];
      const int64_t value = attributes_[i].integer;
      if (spec.kind == AttributeKind::kInt && value < spec.minimum) {
        return fail(spec.name + " must be at least " + std::to_string(spec.minimum) + ", got " +
                    std::to_string(value));
      }
      if (spec.kind == AttributeKind::kChoice &&
          (value < 0 || value >= static_cast<int64_t>(spec.choices.size()))) {
        return fail(spec.name + " is not one of its choices");
      }
      if (!spec.axis.empty()) axes_[spec.axis[0] - 'A'] = value;
    }
    return {};
  }

  Status bind_input(const TensorSpec& spec, const TensorView& view) {
    if (!view.present()) {
      return spec.optional ? Status{} : fail(spec.name + " is missing");
    }
    return bind(spec, view);
  }

  Status infer_output(const TensorSpec& spec, TensorView& view) {
    view = {};
    view.rank = 0;
    for (size_t i = 0; i < spec.axes.size(); ++i) {
      const char c = spec.axes[i];
      if (c == ' ') continue;
      if (c == '+') {
        view.shape[view.rank - 1] += 1;
        ++i;
        continue;
      }
      const int64_t length = axes_[c - 'A'];
      if (length < 0) return fail(std::string("axis ") + c + " is not given by any argument");
      view.shape[view.rank++] = length;
    }
    return output_dtype(spec, view.dtype);
  }

  Status check_output(const TensorSpec& spec, const TensorView& view) {
    TensorView expected;
    if (Status s = infer_output(spec, expected); !s.ok()) return s;
    if (!view.present() || view.rank != expected.rank || view.dtype != expected.dtype ||
        !std::equal(view.shape.begin(), view.shape.begin() + view.rank, expected.shape.begin())) {
      return fail(std::string("output ") + spec.name + " must be " + dtype_text(expected.dtype) +
                  shape_text(expected) + ", got " + dtype_text(view.dtype) + shape_text(view));
    }
    return {};
  }

 private:
  Status fail(const std::string& text) const { return {op_.name + ": " + text}; }

  int attribute_value(std::string_view name) const {
    for (size_t i = 0; i < op_.attributes.size(); ++i) {
      if (op_.attributes[i].name == name) return static_cast<int>(attributes_[i].integer);
    }
    return -1;
  }

  Status output_dtype(const TensorSpec& spec, DType& dtype) const {
    if (spec.dtype[0] == '<') {
      dtype = static_cast<DType>(dtypes_[spec.dtype[1] - 'a']);
    } else if (spec.dtype[0] == '@') {
      dtype = static_cast<DType>(attribute_value(std::string_view(spec.dtype).substr(1)));
    } else {
      dtype = spec.dtype == "float32" ? DType::kFloat32
              : spec.dtype == "int32" ? DType::kInt32
              : spec.dtype == "bool"  ? DType::kBool
                                      : DType::kUInt8;
    }
    return {};
  }

  Status bind(const TensorSpec& spec, const TensorView& view) {
    int rank = 0;
    for (size_t i = 0; i < spec.axes.size(); ++i) {
      const char c = spec.axes[i];
      if (c == ' ') continue;
      if (rank >= view.rank) return shape_error(spec, view);
      int64_t length = view.shape[rank++];
      if (i + 1 < spec.axes.size() && spec.axes[i + 1] == '+') {
        length -= 1;
        i += 2;
      }
      int64_t& bound = axes_[c - 'A'];
      if (bound < 0) bound = length;
      if (bound != length || length < 0) return shape_error(spec, view);
    }
    if (rank != view.rank) return shape_error(spec, view);
    if (spec.dtype[0] == '<') {
      int& bound = dtypes_[spec.dtype[1] - 'a'];
      if (!is_float(view.dtype)) {
        return fail(spec.name + " must be float32, bfloat16 or float16, got " +
                    dtype_text(view.dtype));
      }
      if (bound < 0) bound = static_cast<int>(view.dtype);
      if (bound != static_cast<int>(view.dtype)) {
        return fail(spec.name + " must be " + dtype_text(static_cast<DType>(bound)) + ", got " +
                    dtype_text(view.dtype));
      }
      return {};
    }
    DType wanted;
    if (Status s = output_dtype(spec, wanted); !s.ok()) return s;
    if (wanted != view.dtype) {
      return fail(spec.name + " must be " + dtype_text(wanted) + ", got " + dtype_text(view.dtype));
    }
    return {};
  }

  Status shape_error(const TensorSpec& spec, const TensorView& view) const {
    return fail(spec.name + " must have shape [" + spec.axes +
                "] in agreement with the other arguments, got " + shape_text(view));
  }

  const OpSpec& op_;
  std::span<const AttributeValue> attributes_;
  std::array<int64_t, 26>& axes_;
  std::array<int, 26> dtypes_;
};

Status bind_inputs(const OpSpec& op, Binder& binder, std::span<const TensorView> inputs) {
  if (inputs.size() != op.inputs.size()) {
    return {op.name + ": takes " + std::to_string(op.inputs.size()) + " inputs, got " +
            std::to_string(inputs.size())};
  }
  if (Status s = binder.bind_attributes(); !s.ok()) return s;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (Status s = binder.bind_input(op.inputs[i], inputs[i]); !s.ok()) return s;
  }
  return {};
}

template <typename Spec>
int position(const std::vector<Spec>& specs, std::string_view name) {
  for (size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

Status lend_workspace(Call& call, WorkspaceBytes declared) {
  const int64_t bytes = declared ? declared(call) : 0;
  if (bytes <= 0) return {};
  call.workspace = Workspace(call.executor.workspace(bytes), bytes);
  if (call.workspace.lent()) return {};
  return {"could not get a workspace of " + std::to_string(bytes) + " bytes"};
}

template <typename Spec>
int known_position(const OpSpec& op, const std::vector<Spec>& specs, std::string_view name) {
  const int i = position(specs, name);
  if (i < 0) throw std::logic_error(op.name + " declares nothing named " + std::string(name));
  return i;
}

}  // namespace

const TensorView& Call::in(std::string_view name) const {
  return inputs[known_position(op, op.inputs, name)];
}
const TensorView& Call::out(std::string_view name) const {
  return outputs[known_position(op, op.outputs, name)];
}
const AttributeValue& Call::attribute(std::string_view name) const {
  return attributes[known_position(op, op.attributes, name)];
}
bool Call::has_attribute(std::string_view name) const { return position(op.attributes, name) >= 0; }

int choice_index(const AttributeSpec& spec, std::string_view name) {
  for (size_t i = 0; i < spec.choices.size(); ++i) {
    if (spec.choices[i] == name) return static_cast<int>(i);
  }
  return -1;
}

bool register_kernel(std::string_view op, Backend backend, Kernel kernel) {
  const int i = op_index(op);
  if (i < 0) throw std::logic_error("kernel for an op that the table lacks: " + std::string(op));
  kernels()[i].of[static_cast<int>(backend)] = kernel;
  return true;
}

bool register_workspace(std::string_view op, Backend backend, WorkspaceBytes bytes) {
  const int i = op_index(op);
  if (i < 0) throw std::logic_error("workspace of an op that the table lacks: " + std::string(op));
  kernels()[i].workspace_of[static_cast<int>(backend)] = bytes;
  return true;
}

bool has_kernel(int op, Backend backend) {
  return kernels()[op].of[static_cast<int>(backend)] != nullptr;
}

bool has_workspace(int op, Backend backend) {
  return kernels()[op].workspace_of[static_cast<int>(backend)] != nullptr;
}

Status workspace_bytes(int index, Backend backend, std::span<const TensorView> inputs,
                       std::span<const AttributeValue> attributes, int64_t& bytes) {
  bytes = 0;
  const WorkspaceBytes declared = kernels()[index].workspace_of[static_cast<int>(backend)];
  if (!declared) return {};
  const OpSpec& op = op_table()[index];
  Executor lends_nothing;
  Call call{op, inputs, {}, attributes, lends_nothing};
  Binder binder(op, attributes, call.axes);
  if (Status s = bind_inputs(op, binder, inputs); !s.ok()) return s;
  bytes = declared(call);
  return {};
}

Status infer_outputs(int index, std::span<const TensorView> inputs,
                     std::span<const AttributeValue> attributes, std::span<TensorView> outputs) {
  const OpSpec& op = op_table()[index];
  std::array<int64_t, 26> axes;
  Binder binder(op, attributes, axes);
  if (Status s = bind_inputs(op, binder, inputs); !s.ok()) return s;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (Status s = binder.infer_output(op.outputs[i], outputs[i]); !s.ok()) return s;
  }
  return {};
}

Status run(int index, Backend backend, std::span<const TensorView> inputs,
           std::span<const TensorView> outputs, std::span<const AttributeValue> attributes,
           Executor& executor) {
  const OpSpec& op = op_table()[index];
  Call call{op, inputs, outputs, attributes, executor};
  Binder binder(op, attributes, call.axes);
  if (Status s = bind_inputs(op, binder, inputs); !s.ok()) return s;
  if (outputs.size() != op.outputs.size()) return {op.name + ": wrong number of outputs"};
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (Status s = binder.check_output(op.outputs[i], outputs[i]); !s.ok()) return s;
  }
  const Kernel kernel = kernels()[index].of[static_cast<int>(backend)];
  if (!kernel) {
    return {op.name + (backend == Backend::kCuda ? ": this build of duomoe has no CUDA kernel for "
                                                   "it; rebuild with DUOMOE_CUDA=1, or move "
                                                   "the arguments to the CPU"
                                                 : ": has no CPU kernel")};
  }
  // Options become float32 on this thread too.
  const ScopedFpMode mode;
  try {
    if (Status s = check_options(call); !s.ok()) return {op.name + ": " + s.message};
    if (backend == Backend::kCpu) cpu::advise_huge_pages(outputs);
    const bool check_data = debug_checks();
    Status s = check_data ? check_inputs_data(call, backend) : Status{};
    if (s.ok()) s = lend_workspace(call, kernels()[index].workspace_of[static_cast<int>(backend)]);
    if (s.ok()) s = kernel(call);
    if (s.ok() && check_data) s = check_outputs_data(call, backend);
    return s.ok() ? s : Status{op.name + ": " + s.message};
  } catch (const std::exception& error) {
    return {op.name + ": " + error.what()};
  }
}

}  // namespace duomoe

// The C functions that the Python package `duomoe` reads through ctypes.
extern "C" {
DUOMOE_EXPORT void duomoe_set_debug_checks(int on) { duomoe::set_debug_checks(on != 0); }
DUOMOE_EXPORT const char* duomoe_version() { return DUOMOE_VERSION; }
DUOMOE_EXPORT const char* duomoe_op_table() {
  static const std::string json = duomoe::op_table_json();
  return json.c_str();
}
// 1 if the library holds a kernel of this op (its position in the table) for a backend (0 CPU, 1
// CUDA).
DUOMOE_EXPORT int duomoe_has_kernel(int op, int backend) {
  if (op < 0 || op >= static_cast<int>(duomoe::op_table().size())) return 0;
  return duomoe::has_kernel(op, static_cast<duomoe::Backend>(backend)) ? 1 : 0;
}
}
