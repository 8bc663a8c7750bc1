// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Registers every op of the core's table with torch, through the stable ABI. The schemas come from
// the table; one boxed function serves all ops and devices.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "registry.h"

// Its name in torch 2.11 and 2.12.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

// In libtorch_cuda only; absent from a CPU build of torch.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace {

using duomoe::AttributeKind;
using duomoe::AttributeValue;
using duomoe::DType;
using duomoe::OpSpec;
using duomoe::Status;
using duomoe::TensorView;
using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr std::array<ScalarType, 6> kScalarTypes = {ScalarType::Float, ScalarType::BFloat16,
                                                    ScalarType::Half,  ScalarType::Int,
                                                    ScalarType::Bool,  ScalarType::Byte};

std::string schema_of(const OpSpec& op) {
  std::string text = op.name + "(";
  const char* separator = "";
  auto argument = [&](const std::string& type, const std::string& name) {
    text += separator + type + " " + name;
    separator = ", ";
  };
  for (const auto& input : op.inputs) argument(input.optional ? "Tensor?" : "Tensor", input.name);
  for (const auto& attribute : op.attributes) {
    static constexpr const char* kTypes[] = {"SymInt", "float", "str"};
    argument(kTypes[static_cast<int>(attribute.kind)], attribute.name);
  }
  text += ") -> ";
  if (op.outputs.size() == 1) return text + "Tensor";
  text += "(";
  separator = "";
  for (const auto& output : op.outputs) argument("Tensor", output.name);
  return text + ")";
}

[[noreturn]] void fail(const std::string& message) {
  throw std::runtime_error("duomoe " + message);
}

DType dtype_of(const OpSpec& op, const std::string& name, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  for (size_t i = 0; i < kScalarTypes.size(); ++i) {
    if (kScalarTypes[i] == type) return static_cast<DType>(i);
  }
  fail(op.name + ": " + name +
       " has a dtype that no op takes (allowed: float32, bfloat16, float16, int32, bool, uint8)");
}

TensorView view_of(const OpSpec& op, const std::string& name, const Tensor& tensor) {
  TensorView view;
  const auto sizes = tensor.sizes();
  if (sizes.size() > duomoe::kMaxRank)
    fail(op.name + ": " + name + " has rank " + std::to_string(sizes.size()));
  view.rank = static_cast<int>(sizes.size());
  for (int i = 0; i < view.rank; ++i) view.shape[i] = sizes[i];
  view.dtype = dtype_of(op, name, tensor);
  view.data = tensor.data_ptr();
  return view;
}

// A string argument, taken from its handle (the ABI's own conversion leaks one string a call).
std::string take_string(StableIValue value) {
  const auto handle = torch::stable::detail::to<StringHandle>(value);
  size_t length = 0;
  const char* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

Tensor empty(const TensorView& view, int32_t device_type, int32_t device_index) {
  std::array<int64_t, duomoe::kMaxRank> strides{};
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<int64_t>(1, view.shape[i]);
  }
  AtenTensorHandle handle = nullptr;
  const int32_t dtype = torch::stable::detail::to<int32_t>(
      torch::stable::detail::from(kScalarTypes[static_cast<size_t>(view.dtype)]));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      view.rank, view.shape.data(), strides.data(), dtype, device_type, device_index, &handle));
  return Tensor(handle);
}

class TorchExecutor final : public duomoe::Executor {
 public:
  TorchExecutor(int32_t device_type, int32_t device_index)
      : device_type_(device_type), device_index_(device_index) {}

  void parallel_for(int64_t count, const std::function<void(int64_t)>& task) override {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) task(i);
    });
  }

  // From torch's caching allocator: freed memory is reused in stream order.
  void* workspace(int64_t bytes) override {
    TensorView view{.dtype = DType::kUInt8, .rank = 1};
    view.shape[0] = bytes;
    workspace_ = empty(view, device_type_, device_index_);
    return workspace_->data_ptr();
  }

 private:
  int32_t device_type_, device_index_;
  std::optional<Tensor> workspace_;
};

void call_op(int index, StableIValue* stack) {
  const OpSpec& op = duomoe::op_table()[index];
  std::vector<std::pair<const std::string*, Tensor>> held;
  held.reserve(op.inputs.size());
  std::vector<TensorView> inputs(op.inputs.size());
  std::vector<int> held_of_input(op.inputs.size(), -1);
  size_t at = 0;
  for (size_t i = 0; i < op.inputs.size(); ++i, ++at) {
    std::optional<Tensor> tensor;
    if (op.inputs[i].optional) {
      tensor = torch::stable::detail::to<std::optional<Tensor>>(stack[at]);
    } else {
      tensor = torch::stable::detail::to<Tensor>(stack[at]);
    }
    if (!tensor) continue;
    held_of_input[i] = static_cast<int>(held.size());
    held.emplace_back(&op.inputs[i].name, std::move(*tensor));
  }
  std::vector<AttributeValue> attributes(op.attributes.size());
  std::string bad_choice;
  for (size_t i = 0; i < attributes.size(); ++i, ++at) {
    switch (op.attributes[i].kind) {
      case AttributeKind::kInt:
        attributes[i].integer = torch::stable::detail::to<int64_t>(stack[at]);
        break;
      case AttributeKind::kFloat:
        attributes[i].real = torch::stable::detail::to<double>(stack[at]);
        break;
      case AttributeKind::kChoice: {
        const std::string name = take_string(stack[at]);
        attributes[i].integer = duomoe::choice_index(op.attributes[i], name);
        if (attributes[i].integer < 0)
          bad_choice = op.attributes[i].name + " has no choice '" + name + "'";
        break;
      }
    }
  }
  if (!bad_choice.empty()) fail(op.name + ": " + bad_choice);

  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(held[0].second.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(held[0].second.get(), &device_index));
  for (auto& [name, tensor] : held) {
    int32_t type = 0, position = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &position));
    if (type != device_type || position != device_index) {
      fail(op.name + ": all arguments must be on one device, but " + *name + " is not where " +
           *held[0].first + " is");
    }
    if (!tensor.is_contiguous()) tensor = torch::stable::contiguous(tensor);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (held_of_input[i] >= 0)
      inputs[i] = view_of(op, op.inputs[i].name, held[held_of_input[i]].second);
  }

  const bool cuda = device_type == static_cast<int32_t>(DeviceType::CUDA);
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  TorchExecutor executor(device_type, device_index);
  if (cuda) {
    guard.emplace(device_index);
    if (!aoti_torch_get_current_cuda_stream) fail(op.name + ": this torch was built without CUDA");
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(device_index, &executor.stream));
  }

  std::vector<TensorView> outputs(op.outputs.size());
  if (Status s = duomoe::infer_outputs(index, inputs, attributes, outputs); !s.ok())
    fail(s.message);
  std::vector<Tensor> results;
  results.reserve(outputs.size());
  for (TensorView& view : outputs) {
    results.push_back(empty(view, device_type, device_index));
    view.data = results.back().data_ptr();
  }
  const Status status = duomoe::run(index, cuda ? duomoe::Backend::kCuda : duomoe::Backend::kCpu,
                                    inputs, outputs, attributes, executor);
  if (!status.ok()) fail(status.message);
  for (size_t i = 0; i < results.size(); ++i) stack[i] = torch::stable::detail::from(results[i]);
}

constexpr size_t kMaxOps = 64;

template <size_t kIndex>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  call_op(static_cast<int>(kIndex), stack);
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

template <size_t... kIndex>
constexpr std::array<Boxed, sizeof...(kIndex)> boxed_functions(std::index_sequence<kIndex...>) {
  return {boxed<kIndex>...};
}

constexpr auto kBoxed = boxed_functions(std::make_index_sequence<kMaxOps>());

template <typename F>
void for_each_op(F f) {
  const auto& table = duomoe::op_table();
  if (table.size() > kMaxOps)
    throw std::logic_error("duomoe: raise kMaxOps in torch_frontend/csrc/binding.cc");
  for (size_t i = 0; i < table.size(); ++i) f(table[i], kBoxed[i]);
}

}  // namespace

STABLE_TORCH_LIBRARY(duomoe, library) {
  for_each_op([&](const OpSpec& op, Boxed) { library.def(schema_of(op).c_str()); });
}

STABLE_TORCH_LIBRARY_IMPL(duomoe, CPU, library) {
  for_each_op([&](const OpSpec& op, Boxed function) { library.impl(op.name.c_str(), function); });
}

STABLE_TORCH_LIBRARY_IMPL(duomoe, CUDA, library) {
  for_each_op([&](const OpSpec& op, Boxed function) { library.impl(op.name.c_str(), function); });
}
