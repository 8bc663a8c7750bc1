// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// How two routings of a token differ.
#pragma once

#include "scalar.h"

namespace duomoe::math {

// Slots of `ids` that `others` lacks: negative ids are unused slots, and an id that stands n times
// in `ids` and m < n times in `others` is lacking n - m times.
DUOMOE_FN int32_t lacking_slots(const int32_t* ids, const int32_t* others, int64_t top_k) {
  int32_t lacking = 0;
  for (int64_t k = 0; k < top_k; ++k) {
    if (ids[k] < 0) continue;
    int32_t before = 0, there = 0;
    for (int64_t j = 0; j < top_k; ++j) {
      before += j < k && ids[j] == ids[k];
      there += others[j] == ids[k];
    }
    lacking += before >= there;
  }
  return lacking;
}

}  // namespace duomoe::math
