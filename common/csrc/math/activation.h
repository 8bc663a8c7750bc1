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
};

// x sigmoid(v) and its derivative sigmoid(v) (1 + x v' (1 - sigmoid(v))).
DUOMOE_FN ValueAndSlope gated_by_sigmoid(float x, float v, float slope_of_v) {
  const SigmoidPair s = sigmoid_pair(v);
  return {x * s.value, s.value * fma(x * slope_of_v, s.complement, 1.0f)};
}

// e^(-x^2 / 2): the square's rounding error would grow with it, so it is carried along. Beyond 16
// the result is 0, and the square of an infinity must not be taken.
DUOMOE_FN float gaussian(float x) {
  const float size = absolute(x), z = size > 16.0f ? 16.0f : size, half = 0.5f * z;
  const float square = half * z, error = fma(half, z, -square);
  const float y = exp_nonpositive(-square);
  return fma(-error, y, y);
}

// Phi(-|x|) = t q(t) e^(-x^2 / 2) / 2 with t = 1 / (1 + |x| / (2 sqrt 2)) and
// t q(t) = e^(z^2) erfc(z) for z = |x| / sqrt 2; q is a polynomial of degree 9, fitted on
// 0.15 <= t <= 1, below which the result underflows.
DUOMOE_FN float lower_tail(float x, float density) {
  const float t = 1.0f / fma(absolute(x), 0.353553390593273762f, 1.0f);
  float q = 0.00978405122f;
  q = fma(q, t, -0.109714009f);
  q = fma(q, t, 0.39729175f);
  q = fma(q, t, -0.628304839f);
  q = fma(q, t, 0.3871741f);
  q = fma(q, t, -0.0804645121f);
  q = fma(q, t, 0.219577715f);
  q = fma(q, t, 0.239866182f);
  q = fma(q, t, 0.28271839f);
  q = fma(q, t, 0.282071143f);
  return 0.5f * t * q * density;
}

template <Activation kActivation>
DUOMOE_FN ValueAndSlope activate(float x, float alpha) {
  if constexpr (kActivation == Activation::kSilu) {
    return gated_by_sigmoid(x, alpha * x, alpha);
  } else if constexpr (kActivation == Activation::kGelu) {
    const float density = gaussian(x), tail = lower_tail(x, density);
    const float phi = x >= 0.0f ? 1.0f - tail : tail;
    return {x * phi, fma(x * 0.398942280401432678f, density, phi)};
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const float square = x * x;
    return gated_by_sigmoid(x, 1.595769121605731f * x * fma(square, 0.044715f, 1.0f),
                            1.595769121605731f * fma(square, 0.134145f, 1.0f));
  } else {
    const float positive = x > 0.0f ? x : x != x ? x : 0.0f;
    return kActivation == Activation::kRelu
               ? ValueAndSlope{positive, x > 0.0f ? 1.0f : 0.0f}
               : ValueAndSlope{positive * positive, positive + positive};
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
  float factor;                 // clamp(up) + up_offset
  bool gate_inside, up_inside;  // of the limits, or NaN

  DUOMOE_FN_MEMBER float value() const { return f.value * factor; }
  DUOMOE_FN_MEMBER float grad_gate(float grad) const {
    return gate_inside ? grad * factor * f.slope : 0.0f;
  }
  DUOMOE_FN_MEMBER float grad_up(float grad) const { return up_inside ? grad * f.value : 0.0f; }
};
template <Activation kActivation>
DUOMOE_FN Glu glu(float gate, float up, const GluOptions& options) {
  const float limit = options.limit > 0.0f ? options.limit : infinity();
  const bool above = up > limit, below = up < -limit, gate_above = gate > limit;
  const float clamped = above ? limit : below ? -limit : up;
  return {activate<kActivation>(gate_above ? limit : gate, options.alpha),
          clamped + options.up_offset, !gate_above, !above && !below};
}

}  // namespace duomoe::math
