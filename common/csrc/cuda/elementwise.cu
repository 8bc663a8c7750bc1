// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

namespace duomoe::cuda {
namespace {

using math::from_float;
using math::to_float;

constexpr int kThreads = 256;

struct Add {
  template <typename T>
  static __device__ void at(int64_t i, const T* a, const T* b, T* out) {
    out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  }
};

struct Swiglu {
  template <typename T>
  static __device__ void at(int64_t i, const T* gate, const T* up, T* out) {
    const float x = to_float(gate[i]);
    out[i] = from_float<T>(x * math::sigmoid(x) * to_float(up[i]));
  }
};

// silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))
struct SwigluBwd {
  template <typename T>
  static __device__ void at(int64_t i, const T* grad_out, const T* gate, const T* up, T* grad_gate,
                            T* grad_up) {
    const float x = to_float(gate[i]), y = to_float(grad_out[i]);
    const float t = math::exp(-math::absolute(x)), divisor = 1.0f + t;
    const float s = (x >= 0.0f ? 1.0f : t) / divisor, complement = (x >= 0.0f ? t : 1.0f) / divisor;
    grad_up[i] = from_float<T>(y * (x * s));
    grad_gate[i] = from_float<T>(y * to_float(up[i]) * (s * math::fma(x, complement, 1.0f)));
  }
};

template <typename Formula, typename... Pointers>
__global__ void for_each_element(int64_t n, Pointers... pointers) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    Formula::at(i, pointers...);
  }
}

// Formula::at(i, views...) for every element of equal dense tensors.
template <typename Formula, typename... Views>
Status for_elements(const Call& call, const Views&... views) {
  const TensorView& shape = call.outputs[0];
  Queue queue(call);
  with_type(shape.dtype, [&]<typename T>(T) {
    queue.launch(for_each_element<Formula, decltype(views.template as<T>())...>,
                 grid_for(shape.size(), kThreads), kThreads, 0, shape.size(),
                 views.template as<T>()...);
  });
  return queue.status();
}

DUOMOE_KERNEL(kCuda, add) {
  return for_elements<Add>(call, call.in("a"), call.in("b"), call.out("out"));
}

DUOMOE_KERNEL(kCuda, swiglu) {
  return for_elements<Swiglu>(call, call.in("gate"), call.in("up"), call.out("out"));
}

DUOMOE_KERNEL(kCuda, swiglu_bwd) {
  return for_elements<SwigluBwd>(call, call.in("grad_out"), call.in("gate"), call.in("up"),
                                 call.out("grad_gate"), call.out("grad_up"));
}

}  // namespace
}  // namespace duomoe::cuda
