// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The loops of the experts' activations; a part of simd_loops.h.

#include "../math/activation.h"
#include "simd_types.h"

namespace duomoe::cpu {
namespace {

using math::Activation;
using math::GluOptions;

// f<activation>(T{}) for an activation and a dtype.
template <typename F>
inline __attribute__((always_inline)) void with_activation_and_type(Activation activation,
                                                                    DType dtype, F f) {
  math::with_activation(activation, [=]<Activation kActivation>() {
    with_type(dtype, [=]<typename T>(T) { f.template operator()<kActivation, T>(); });
  });
}

void activate(Activation activation, float alpha, DType dtype, const void* from, int64_t n,
              void* to) {
  with_activation_and_type(activation, dtype, [=]<Activation kActivation, typename T>() {
    const T* x = static_cast<const T*>(from);
    T* y = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) {
      y[i] = from_float<T>(math::activate<kActivation>(to_float(x[i]), alpha).value);
    }
  });
}

void activate_bwd(Activation activation, float alpha, DType dtype, const void* grad,
                  const void* from, int64_t n, void* to) {
  with_activation_and_type(activation, dtype, [=]<Activation kActivation, typename T>() {
    const T* g = static_cast<const T*>(grad);
    const T* x = static_cast<const T*>(from);
    T* y = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) {
      y[i] = from_float<T>(math::activate<kActivation>(to_float(x[i]), alpha).grad(to_float(g[i])));
    }
  });
}

void glu(Activation activation, const GluOptions& options, DType dtype, const void* gate,
         const void* up, int64_t n, void* to) {
  with_activation_and_type(activation, dtype, [=]<Activation kActivation, typename T>() {
    const T* g = static_cast<const T*>(gate);
    const T* u = static_cast<const T*>(up);
    T* y = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) {
      y[i] = from_float<T>(math::glu<kActivation>(to_float(g[i]), to_float(u[i]), options).value());
    }
  });
}

void glu_bwd(Activation activation, const GluOptions& options, DType dtype, const void* grad,
             const void* gate, const void* up, int64_t n, void* grad_gate, void* grad_up) {
  with_activation_and_type(activation, dtype, [=]<Activation kActivation, typename T>() {
    const T* d = static_cast<const T*>(grad);
    const T* g = static_cast<const T*>(gate);
    const T* u = static_cast<const T*>(up);
    T* dg = static_cast<T*>(grad_gate);
    T* du = static_cast<T*>(grad_up);
    for (int64_t i = 0; i < n; ++i) {
      const float y = to_float(d[i]);
      const math::Glu unit = math::glu<kActivation>(to_float(g[i]), to_float(u[i]), options);
      dg[i] = from_float<T>(unit.grad_gate(y));
      du[i] = from_float<T>(unit.grad_up(y));
    }
  });
}

}  // namespace
}  // namespace duomoe::cpu
