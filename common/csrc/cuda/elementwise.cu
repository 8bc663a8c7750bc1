// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "../options.h"
#include "launch.h"

namespace duomoe::cuda {
namespace {

using math::Activation;
using math::from_float;
using math::GluOptions;
using math::to_float;

constexpr int kThreads = 256;

// A formula's `at` computes element i.
struct Add {
  template <typename T>
  __device__ void at(int64_t i, const T* a, const T* b, T* out) const {
    out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  }
};

template <Activation kActivation>
struct Activate {
  float alpha;

  template <typename T>
  __device__ void at(int64_t i, const T* x, T* out) const {
    out[i] = from_float<T>(math::activate<kActivation>(to_float(x[i]), alpha).value);
  }
};

template <Activation kActivation>
struct ActivateBwd {
  float alpha;

  template <typename T>
  __device__ void at(int64_t i, const T* grad_out, const T* x, T* grad_x) const {
    const math::ValueAndSlope f = math::activate<kActivation>(to_float(x[i]), alpha);
    grad_x[i] = from_float<T>(f.grad(to_float(grad_out[i])));
  }
};

template <Activation kActivation>
struct Glu {
  GluOptions options;

  template <typename T>
  __device__ void at(int64_t i, const T* gate, const T* up, T* out) const {
    const math::Glu unit = math::glu<kActivation>(to_float(gate[i]), to_float(up[i]), options);
    out[i] = from_float<T>(unit.value());
  }
};

template <Activation kActivation>
struct GluBwd {
  GluOptions options;

  template <typename T>
  __device__ void at(int64_t i, const T* grad_out, const T* gate, const T* up, T* grad_gate,
                     T* grad_up) const {
    const float grad = to_float(grad_out[i]);
    const math::Glu unit = math::glu<kActivation>(to_float(gate[i]), to_float(up[i]), options);
    grad_gate[i] = from_float<T>(unit.grad_gate(grad));
    grad_up[i] = from_float<T>(unit.grad_up(grad));
  }
};

template <typename Formula, typename... Pointers>
__global__ void for_each_element(int64_t n, Formula formula, Pointers... pointers) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    formula.at(i, pointers...);
  }
}

// formula.at(i, views...) for every element of equal dense tensors.
template <typename Formula, typename... Views>
Status for_elements(const Call& call, const Formula& formula, const Views&... views) {
  const TensorView& shape = call.outputs[0];
  Queue queue(call);
  with_type(shape.dtype, [&]<typename T>(T) {
    queue.launch(for_each_element<Formula, decltype(views.template as<T>())...>,
                 grid_for(shape.size(), kThreads), kThreads, 0, shape.size(), formula,
                 views.template as<T>()...);
  });
  return queue.status();
}

DUOMOE_KERNEL(kCuda, add) {
  return for_elements(call, Add{}, call.in("a"), call.in("b"), call.out("out"));
}

// f.operator()<activation>() for the activation of a call.
template <typename F>
Status with_activation(const Call& call, F f) {
  Status status;
  math::with_activation(activation_of(call), [&]<Activation kActivation>() {
    status = f.template operator()<kActivation>();
  });
  return status;
}

DUOMOE_KERNEL(kCuda, activate) {
  return with_activation(call, [&]<Activation kActivation>() {
    return for_elements(call, Activate<kActivation>{alpha_of(call)}, call.in("x"), call.out("out"));
  });
}

DUOMOE_KERNEL(kCuda, activate_bwd) {
  return with_activation(call, [&]<Activation kActivation>() {
    return for_elements(call, ActivateBwd<kActivation>{alpha_of(call)}, call.in("grad_out"),
                        call.in("x"), call.out("grad_x"));
  });
}

DUOMOE_KERNEL(kCuda, glu) {
  return with_activation(call, [&]<Activation kActivation>() {
    return for_elements(call, Glu<kActivation>{glu_options_of(call)}, call.in("gate"),
                        call.in("up"), call.out("out"));
  });
}

DUOMOE_KERNEL(kCuda, glu_bwd) {
  return with_activation(call, [&]<Activation kActivation>() {
    return for_elements(call, GluBwd<kActivation>{glu_options_of(call)}, call.in("grad_out"),
                        call.in("gate"), call.in("up"), call.out("grad_gate"), call.out("grad_up"));
  });
}

__global__ void convert(int64_t n, DType from_type, const void* from, DType to_type, void* to) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    store(to_type, load(from_type, from, i), to, i);
  }
}

Status run_convert(const Call& call, const TensorView& from, const TensorView& to) {
  Queue queue(call);
  queue.launch(convert, grid_for(to.size(), kThreads), kThreads, 0, to.size(), from.dtype,
               static_cast<const void*>(from.data), to.dtype, to.data);
  return queue.status();
}

DUOMOE_KERNEL(kCuda, cast) { return run_convert(call, call.in("x"), call.out("out")); }
DUOMOE_KERNEL(kCuda, cast_bwd) {
  return run_convert(call, call.in("grad_out"), call.out("grad_x"));
}

}  // namespace
}  // namespace duomoe::cuda
