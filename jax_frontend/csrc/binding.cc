// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// One XLA FFI handler per op of the core's table and platform, all from one template; pybind11
// hands them to Python as capsules. An absent optional input is left out of the operands and named
// by the attribute `present`, a bit per input. A call that takes a workspace has it as one result
// more, behind the op's own: unlike memory that XLA lends for the length of a call, it is there too
// when a command buffer that recorded the call is replayed.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

 private:
  ffi::ThreadPool& pool_;
};

// Lends the result that stands behind the op's own.
class CudaExecutor final : public duomoe::Executor {
 public:
  CudaExecutor(void* cuda_stream, size_t outputs, const ffi::RemainingRets& rets) {
    stream = cuda_stream;
    if (rets.size() <= outputs) return;
    if (auto buffer = rets.get<ffi::AnyBuffer>(outputs)) {
      data_ = (*buffer)->untyped_data();
      bytes_ = static_cast<int64_t>((*buffer)->size_bytes());
    }
  }
  void* workspace(int64_t bytes) override { return bytes <= bytes_ ? data_ : nullptr; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// For calls whose workspace is not known when they are traced.
class ScratchExecutor final : public duomoe::Executor {
 public:
  ScratchExecutor(void* cuda_stream, ffi::ScratchAllocator& allocator) : allocator_(allocator) {
    stream = cuda_stream;
  }
  void* workspace(int64_t bytes) override {
    return allocator_.Allocate(static_cast<size_t>(bytes), kAlignment).value_or(nullptr);
  }

 private:
  static constexpr size_t kAlignment = 16;  // XLA refuses to promise more; its allocator gives 256
  ffi::ScratchAllocator& allocator_;
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
  if (at != args.size() || rets.size() < outputs.size() || rets.size() > outputs.size() + 1)
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
ffi::Error cuda_call(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attrs) {
  CudaExecutor executor(stream, duomoe::op_table()[kIndex].outputs.size(), rets);
  return to_error(call_op(kIndex, Backend::kCuda, executor, args, rets, attrs));
}

template <size_t kIndex>
ffi::Error cuda_scratch_call(void* stream, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                             ffi::RemainingRets rets, ffi::Dictionary attrs) {
  ScratchExecutor executor(stream, scratch);
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
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<void*>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To(cuda_call<kIndex>, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

template <size_t kIndex>
XLA_FFI_Error* cuda_scratch_handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<void*>>()
                             .Ctx<ffi::ScratchAllocator>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To(cuda_scratch_call<kIndex>)
                             .release();
  return handler->Call(frame);
}

constexpr size_t kMaxOps = 64;

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);
struct Handlers {
  Handler cpu, cuda, cuda_scratch;
};

template <size_t... kIndex>
constexpr std::array<Handlers, sizeof...(kIndex)> make_handlers(std::index_sequence<kIndex...>) {
  return {Handlers{cpu_handler<kIndex>, cuda_handler<kIndex>, cuda_scratch_handler<kIndex>}...};
}

constexpr auto kHandlers = make_handlers(std::make_index_sequence<kMaxOps>());

// Bytes of the workspace that the CUDA kernel of a call takes; 0 if it takes none, or is not in
// this build. A shape per input, None if it is absent; dtypes and choices as their positions.
int64_t workspace_bytes(int index, const std::vector<std::optional<std::vector<int64_t>>>& shapes,
                        const std::vector<int>& dtypes, const std::vector<double>& attributes) {
  std::vector<TensorView> inputs(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (!shapes[i]) continue;
    inputs[i].rank = static_cast<int>(shapes[i]->size());
    inputs[i].dtype = static_cast<DType>(dtypes[i]);
    std::copy(shapes[i]->begin(), shapes[i]->end(), inputs[i].shape.begin());
  }
  std::vector<AttributeValue> values(attributes.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (duomoe::op_table()[index].attributes[i].kind == AttributeKind::kFloat) {
      values[i].real = attributes[i];
    } else {
      values[i].integer = static_cast<int64_t>(attributes[i]);
    }
  }
  int64_t bytes = 0;
  const Status s = duomoe::workspace_bytes(index, Backend::kCuda, inputs, values, bytes);
  if (!s.ok()) throw std::runtime_error("duomoe " + s.message);
  return bytes;
}

pybind11::capsule capsule(Handler handler) {
  return pybind11::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace

PYBIND11_MODULE(_binding, module) {
  module.doc() = "XLA FFI handlers of the duomoe core";
  module.def("has_workspace", [](int op) { return duomoe::has_workspace(op, Backend::kCuda); });
  module.def("workspace_bytes", workspace_bytes);
  // {op name: (capsule for CPU, for CUDA, for CUDA without a workspace)}
  module.def("handlers", [] {
    const auto& table = duomoe::op_table();
    if (table.size() > kMaxOps)
      throw std::logic_error("duomoe: raise kMaxOps in jax_frontend/csrc/binding.cc");
    pybind11::dict result;
    for (size_t i = 0; i < table.size(); ++i) {
      result[pybind11::str(table[i].name)] =
          pybind11::make_tuple(capsule(kHandlers[i].cpu), capsule(kHandlers[i].cuda),
                               capsule(kHandlers[i].cuda_scratch));
    }
    return result;
  });
}
