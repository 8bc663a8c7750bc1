// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The experts' activations f(x), their slopes f'(x), and gated linear units.
#pragma once

#include "scalar.h"

namespace duomoe::math {

// Order matches `activation` in the op table.
//   silu          x sigmoid(alpha x)
//   gelu          x Phi(x), Phi being the normal distribution function
//   gelu_tanh     x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
//   relu          max(x, 0)
//   relu_squared  max(x, 0)^2
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

struct ValueAndSlope {
  float value, slope;
  uint32_t alive = ~0u;  // or 0, where a cotangent does not count, even if it is not finite

  DUOMOE_FN_MEMBER float grad(float g) const { return masked(alive, g * slope); }
};

// In the lower tail f and f' are products of an exponential with something larger. There the
// exponential is taken 2^63 times as large, since alone it may be denormal where the product is
// not.

// v with |v| > 131 counts as +-131, where sigmoid(v) is 0 or 1 for every purpose; `error` is what
// the rounded v lacks.
struct Exponent {
  float v, error;
};
DUOMOE_FN Exponent bounded(float v, float error) {
  const bool inside = absolute(v) <= 131.0f;
  return {v > 131.0f ? 131.0f : v < -131.0f ? -131.0f : v, inside ? error : 0.0f};
}

// x s and its derivative s (1 + x v' (1 - s)) with s = sigmoid(v + error). The error must not be
// left out: in the lower tail s changes by e^error, and v is large there.
DUOMOE_FN ValueAndSlope gated_by_sigmoid(float x, const Exponent& e, float x_slope_of_v) {
  const float size = absolute(e.v), scaled = scaled_exp(-size, -130.0f);
  const float t = (size > -kLowestExponent ? 0.0f : scaled) * kInverseScale;
  const SigmoidPair s = sigmoid_pair(e.v, t);
  const bool tail = e.v < -64.0f;  // s = e^v
  const float top = tail ? scaled : s.value, unit = tail ? kInverseScale : 1.0f;
  const float value = fma(top * s.complement, e.error, top);
  return {x * value * unit, value * fma(x_slope_of_v, s.complement, 1.0f) * unit};
}

// v = x (c + d x^2) with c = 2 sqrt(2 / pi) and d = 0.044715 c in two floats each.
DUOMOE_FN ValueAndSlope gelu_tanh(float x) {
  constexpr float c = 1.5957691669464111f, c_rest = -4.53406805e-08f;
  constexpr float d = 0.07135481387376785f, d_rest = 2.39883247e-09f;
  const float z = x > 16.0f ? 16.0f : x < -16.0f ? -16.0f : x;  // where |v| = 318
  const float square = z * z, square_rest = fma(z, z, -square);
  const float p = d * square, p_rest = fma(d, square, -p) + fma(d, square_rest, d_rest * square);
  const float q = c + p, back = q - c;
  const float q_rest = (c - (q - back)) + (p - back) + (p_rest + c_rest);
  const float v = z * q;
  return gated_by_sigmoid(x, bounded(v, fma(z, q, -v) + z * q_rest), z * fma(3.0f, p, c));
}

// x Phi(x) and its derivative Phi(x) + x phi(x), from phi(x) = e^(-x^2 / 2) / sqrt(2 pi) and, with
// t = 1 / (1 + |x| / (2 sqrt 2)), Phi(-|x|) = t q(t) e^(-x^2 / 2) / 2: t q(t) = e^(z^2) erfc(z) for
// z = |x| / sqrt 2, q being a polynomial of degree 9 in t - 3/8, fitted on 0.158 <= t <= 1. The
// square's rounding error is carried along: the exponential grows with it. e^-110 counts as 0.
DUOMOE_FN ValueAndSlope gelu(float x) {
  const float size = absolute(x), z = size > 16.0f ? 16.0f : size, half = 0.5f * z;
  const float square = half * z, error = fma(half, z, -square);
  float scaled = scaled_exp(-square, -110.0f);
  scaled = fma(-error, scaled, scaled);
  const bool tail = x < -11.0f;
  const float unit = tail ? kInverseScale : 1.0f;
  const float density = tail ? scaled : (size > 13.0f ? 0.0f : scaled) * kInverseScale;
  const float t = 1.0f / fma(z, 0.353553390593273762f, 1.0f);
  const float u = t - 0.375f;
  float q = 0.005183896682f;
  q = fma(q, u, -0.0390563727f);
  q = fma(q, u, 0.05945732355f);
  q = fma(q, u, 0.01275996462f);
  q = fma(q, u, -0.07644293728f);
  q = fma(q, u, -0.04463246382f);
  q = fma(q, u, 0.1061902629f);
  q = fma(q, u, 0.2452465255f);
  q = fma(q, u, 0.2777293976f);
  q = fma(q, u, 0.2166532795f);
  const float lower = t * q * density, phi = x >= 0.0f ? 1.0f - lower : lower;
  return {
      x * phi * unit,
      fma(z * (x < 0.0f ? -0.398942280401432678f : 0.398942280401432678f), density, phi) * unit};
}

template <Activation kActivation>
DUOMOE_FN ValueAndSlope activate(float x, float alpha) {
  if constexpr (kActivation == Activation::kSilu) {
    const float v = alpha * x;
    const Exponent e = bounded(v, fma(alpha, x, -v));
    return gated_by_sigmoid(x, e, e.v);
  } else if constexpr (kActivation == Activation::kGelu) {
    return gelu(x);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    return gelu_tanh(x);
  } else {
    const uint32_t alive = mask_of(!(x <= 0.0f));
    const float positive = masked(alive, x);  // or NaN
    if constexpr (kActivation == Activation::kRelu) {
      return {positive, x != x ? x : 1.0f, alive};
    }
    return {positive * positive, positive + positive, alive};
  }
}

// f.operator()<activation>().
template <typename F>
static inline void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kSilu:
      return f.template operator()<Activation::kSilu>();
    case Activation::kGelu:
      return f.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return f.template operator()<Activation::kGeluTanh>();
    case Activation::kRelu:
      return f.template operator()<Activation::kRelu>();
    case Activation::kReluSquared:
      return f.template operator()<Activation::kReluSquared>();
  }
}

struct GluOptions {
  float alpha;
  float limit;  // 0: none
  float up_offset;
};

// f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset). A NaN stays one.
struct Glu {
  ValueAndSlope f;
  float factor;                     // clamp(up) + up_offset
  uint32_t gate_inside, up_inside;  // ~0 within the limits or NaN, else 0

  DUOMOE_FN_MEMBER float value() const { return f.value * factor; }
  DUOMOE_FN_MEMBER float grad_gate(float grad) const {
    return masked(gate_inside, f.grad(grad * factor));
  }
  DUOMOE_FN_MEMBER float grad_up(float grad) const { return masked(up_inside, grad * f.value); }
};
template <Activation kActivation>
DUOMOE_FN Glu glu(float gate, float up, const GluOptions& options) {
  const float limit = options.limit > 0.0f ? options.limit : infinity();
  const bool above = up > limit, below = up<-limit, gate_above = gate> limit;
  const float clamped = above ? limit : below ? -limit : up;
  return {activate<kActivation>(gate_above ? limit : gate, options.alpha),
          clamped + options.up_offset, mask_of(!gate_above), mask_of(!(absolute(up) > limit))};
}

}  // namespace duomoe::math
