// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Rules between options and shapes that the op table cannot state, checked for every backend.
#pragma once

#include "registry.h"

namespace duomoe {

// The order of the choices of `drop_order` in the op table.
enum class DropOrder { kPosition, kWeight };

Status check_options(const Call& call);

}  // namespace duomoe
