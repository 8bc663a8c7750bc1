// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Rules between options and shapes that the op table cannot state, checked for every backend.
#pragma once

#include "math/activation.h"
#include "registry.h"

namespace duomoe {

// The order of the choices of `drop_order` in the op table.
enum class DropOrder { kPosition, kWeight };

// The options of the activations.
inline math::Activation activation_of(const Call& call) {
  return call.choice<math::Activation>("activation");
}
inline float alpha_of(const Call& call) { return static_cast<float>(call.real("alpha")); }
inline math::GluOptions glu_options_of(const Call& call) {
  return {alpha_of(call), static_cast<float>(call.real("limit")),
          static_cast<float>(call.real("up_offset"))};
}

Status check_options(const Call& call);

}  // namespace duomoe
