// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// One XLA FFI handler per op of the core's table and platform, all from one template; pybind11
// hands them to Python as capsules. An absent optional input is left out of the operands and named
// by the attribute `present`, a bit per input.

#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using duomoe::AttributeKind;
using duomoe::AttributeValue;
using duomoe::Backend;
using duomoe::DType;
using duomoe::OpSpec;
using duomoe::Status;
using duomoe::TensorView;

// XLA's CPU threads. The calling thread takes tasks too, so that a full pool can never block it.
class CpuExecutor final : public duomoe::Executor {
 public:
  explicit CpuExecutor(ffi::ThreadPool& pool) : pool_(pool) {}

  void parallel_for(int64_t count, const std::function<void(int64_t)>& task) override {
    struct State {
      std::atomic<int64_t> next{0}, done{0};
      int64_t count;
      const std::function<void(int64_t)>* task;
      std::mutex mutex;
      std::condition_variable all_done;
    };
    // Shared, because a helper that starts after the last task is taken outlives this call.
    auto state = std::make_shared<State>();
    state->count = count;
    state->task = &task;
    auto work = [](const std::shared_ptr<State>& s) {
      int64_t finished = 0;
      for (int64_t i; (i = s->next.fetch_add(1)) < s->count; ++finished) (*s->task)(i);
      if (finished && s->done.fetch_add(finished) + finished == s->count) {
        const std::lock_guard<std::mutex> lock(s->mutex);
        s->all_done.notify_one();
      }
    };
    const int64_t helpers = std::min(count - 1, pool_.num_threads() - 1);
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([state, work] { work(state); });
    work(state);
    std::unique_lock<std::mutex> lock(state->mutex);
    state->all_done.wait(lock, [&] { return state->done.load() == count; });
  }

  void* scratch(size_t) override { return nullptr; }

 private:
  ffi::ThreadPool& pool_;
};

class CudaExecutor final : public duomoe::Executor {
 public:
  CudaExecutor(void* cuda_stream, ffi::ScratchAllocator& allocator, bool may_take_scratch)
      : allocator_(allocator), may_take_scratch_(may_take_scratch) {
    stream = cuda_stream;
  }
  void parallel_for(int64_t count, const std::function<void(int64_t)>& task) override {
    for (int64_t i = 0; i < count; ++i) task(i);
  }
  void* scratch(size_t bytes) override {
    return may_take_scratch_ ? allocator_.Allocate(bytes, kAlignment).value_or(nullptr) : nullptr;
  }

 private:
  static constexpr size_t kAlignment = 16;  // XLA refuses to promise more; its allocator gives 256
  ffi::ScratchAllocator& allocator_;
  bool may_take_scratch_;
};

std::optional<DType> dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kFloat32;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    case ffi::DataType::F16:
      return DType::kFloat16;
    case ffi::DataType::S32:
      return DType::kInt32;
    case ffi::DataType::PRED:
      return DType::kBool;
    case ffi::DataType::U8:
      return DType::kUInt8;
    default:
      return std::nullopt;
  }
}

Status make_view(const OpSpec& op, const std::string& name, ffi::AnyBuffer buffer,
                 TensorView& view) {
  const auto dims = buffer.dimensions();
  const auto dtype = dtype_of(buffer.element_type());
  if (!dtype || dims.size() > duomoe::kMaxRank)
    return {op.name + ": " + name + " has a dtype or rank that no op takes"};
  view.rank = static_cast<int>(dims.size());
  for (int i = 0; i < view.rank; ++i) view.shape[i] = dims[i];
  view.dtype = *dtype;
  view.data = buffer.untyped_data();
  return {};
}

Status read_attributes(const OpSpec& op, const ffi::Dictionary& dictionary,
                       std::vector<AttributeValue>& values) {
  for (size_t i = 0; i < op.attributes.size(); ++i) {
    const auto& spec = op.attributes[i];
    const Status missing{op.name + ": attribute " + spec.name + " is missing or of another type"};
    switch (spec.kind) {
      case AttributeKind::kInt: {
        const auto value = dictionary.get<int64_t>(spec.name);
        if (!value) return missing;
        values[i].integer = *value;
        break;
      }
      case AttributeKind::kFloat: {
        const auto value = dictionary.get<double>(spec.name);
        if (!value) return missing;
        values[i].real = *value;
        break;
      }
      case AttributeKind::kChoice: {
        const auto value = dictionary.get<std::string_view>(spec.name);
        if (!value) return missing;
        values[i].integer = duomoe::choice_index(spec, *value);
        if (values[i].integer < 0)
          return {op.name + ": " + spec.name + " has no choice '" + std::string(*value) + "'"};
        break;
      }
    }
  }
  return {};
}

Status call_op(int index, Backend backend, duomoe::Executor& executor, ffi::RemainingArgs args,
               ffi::RemainingRets rets, ffi::Dictionary dictionary) {
  const OpSpec& op = duomoe::op_table()[index];
  const auto present = dictionary.get<int64_t>("present");
  if (!present) return {op.name + ": attribute present is missing"};
  std::vector<TensorView> inputs(op.inputs.size()), outputs(op.outputs.size());
  std::vector<AttributeValue> attributes(op.attributes.size());
  size_t at = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!(*present >> i & 1)) continue;
    const auto buffer = args.get<ffi::AnyBuffer>(at++);
    if (!buffer) return {op.name + ": " + op.inputs[i].name + " is missing"};
    if (Status s = make_view(op, op.inputs[i].name, *buffer, inputs[i]); !s.ok()) return s;
  }
  if (at != args.size() || rets.size() != outputs.size())
    return {op.name + ": wrong number of operands or results"};
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer) return {op.name + ": result " + op.outputs[i].name + " is missing"};
    if (Status s = make_view(op, op.outputs[i].name, **buffer, outputs[i]); !s.ok()) return s;
  }
  if (Status s = read_attributes(op, dictionary, attributes); !s.ok()) return s;
  return duomoe::run(index, backend, inputs, outputs, attributes, executor);
}

ffi::Error to_error(const Status& status) {
  return status.ok() ? ffi::Error::Success()
                     : ffi::Error::InvalidArgument("duomoe " + status.message);
}

template <size_t kIndex>
ffi::Error cpu_call(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attrs) {
  CpuExecutor executor(pool);
  return to_error(call_op(kIndex, Backend::kCpu, executor, args, rets, attrs));
}

template <size_t kIndex>
ffi::Error cuda_call(void* stream, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                     ffi::RemainingRets rets, ffi::Dictionary attrs) {
  CudaExecutor executor(stream, scratch, duomoe::op_table()[kIndex].cuda_scratch);
  return to_error(call_op(kIndex, Backend::kCuda, executor, args, rets, attrs));
}

template <size_t kIndex>
XLA_FFI_Error* cpu_handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To(cpu_call<kIndex>)
                             .release();
  return handler->Call(frame);
}

template <size_t kIndex>
XLA_FFI_Error* cuda_handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = [] {
    auto binding = ffi::Ffi::Bind()
                       .Ctx<ffi::PlatformStream<void*>>()
                       .Ctx<ffi::ScratchAllocator>()
                       .RemainingArgs()
                       .RemainingRets()
                       .Attrs();
    if (duomoe::op_table()[kIndex].cuda_scratch) return binding.To(cuda_call<kIndex>).release();
    return binding.To(cuda_call<kIndex>, {ffi::Traits::kCmdBufferCompatible}).release();
  }();
  return handler->Call(frame);
}

constexpr size_t kMaxOps = 64;

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);
struct Handlers {
  Handler cpu, cuda;
};

template <size_t... kIndex>
constexpr std::array<Handlers, sizeof...(kIndex)> make_handlers(std::index_sequence<kIndex...>) {
  return {Handlers{cpu_handler<kIndex>, cuda_handler<kIndex>}...};
}

constexpr auto kHandlers = make_handlers(std::make_index_sequence<kMaxOps>());

}  // namespace

PYBIND11_MODULE(_binding, module) {
  module.doc() = "XLA FFI handlers of the duomoe core";
  // {op name: (capsule for CPU, capsule for CUDA)}
  module.def("handlers", [] {
    const auto& table = duomoe::op_table();
    if (table.size() > kMaxOps)
      throw std::logic_error("duomoe: raise kMaxOps in jax_frontend/csrc/binding.cc");
    pybind11::dict result;
    for (size_t i = 0; i < table.size(); ++i) {
      result[pybind11::str(table[i].name)] =
          pybind11::make_tuple(pybind11::capsule(reinterpret_cast<void*>(kHandlers[i].cpu)),
                               pybind11::capsule(reinterpret_cast<void*>(kHandlers[i].cuda)));
    }
    return result;
  });
}
