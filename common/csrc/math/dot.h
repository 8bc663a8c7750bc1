// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The order of sums of a dot product over the width D of a row, the same in both backends. Made for
// loads of 16 bytes: element i is in column i % 256; a column adds the products of its elements in
// order, with fma from 0; lane l joins its neighbouring columns 8 l, ..., 8 l + 7 in pairs, pairs
// of pairs and both halves; the 32 lanes are joined in the butterfly of router.h. A column without
// elements is 0, and is added.
#pragma once

#include "router.h"

namespace duomoe::math {

constexpr int kColumnsOfLane = 8;
constexpr int kDotColumns = kColumnsOfLane * kLanes;

DUOMOE_FN float join_columns(const float* c) {
  return ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]));
}

}  // namespace duomoe::math
