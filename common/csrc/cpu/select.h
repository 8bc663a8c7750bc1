// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Top-K of one row by (value descending, id ascending), optionally within the best groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "arena.h"
#include "simd.h"

namespace duomoe::cpu {

class Selector {
 public:
  // What it takes of the arena: kArrays arrays of array_length(experts) elements.
  static constexpr int64_t kArrays = 4;
  static int64_t array_length(int64_t experts) { return padded(experts) + math::kLanes; }

  Selector(int64_t experts, int64_t top_k, int64_t groups, int64_t group_top_k,
           int64_t group_score_k, Arena& arena)
      : experts_(experts),
        top_k_(top_k),
        groups_(groups),
        group_size_(experts / groups),
        kept_(group_top_k),
        group_score_k_(std::min(group_score_k, group_size_)),
        scratch_(arena.take<uint32_t>(2 * array_length(experts))),
        kept_keys_(arena.take<uint32_t>(array_length(experts))),
        kept_ids_(arena.take<int32_t>(array_length(experts))) {}

  // keys as SimdLoops::selection_keys writes them, in an array of array_length(experts) elements;
  // indices[top_k] is the result.
  void select(const uint32_t* keys, int32_t* indices) {
    if (groups_ == 1 || kept_ == groups_) return take(keys, experts_, indices);
    if (!simd().keep_groups(keys, groups_, group_size_, group_score_k_, kept_, scratch_, kept_keys_,
                            kept_ids_)) {
      keep_groups(keys);
    }
    take(kept_keys_, kept_ * group_size_, indices);
    for (int64_t k = 0; k < top_k_; ++k) indices[k] = kept_ids_[indices[k]];
  }

 private:
  // SimdLoops::keep_groups for any options.
  void keep_groups(const uint32_t* keys) {
    order_.resize(groups_);
    for (int64_t g = 0; g < groups_; ++g) {
      uint32_t* best = scratch_;
      std::copy_n(keys + g * group_size_, group_size_, best);
      std::partial_sort(best, best + group_score_k_, best + group_size_, std::greater<>());
      float sum = math::value_of_key(best[0]);  // largest first
      for (int64_t i = 1; i < group_score_k_; ++i) sum += math::value_of_key(best[i]);
      order_[g] = math::composite(math::order_key(sum), g);
    }
    std::partial_sort(order_.begin(), order_.begin() + kept_, order_.end(), std::greater<>());
    std::sort(order_.begin(), order_.begin() + kept_,
              [](uint64_t a, uint64_t b) { return math::id_of(a) < math::id_of(b); });
    int64_t count = 0;
    for (int64_t i = 0; i < kept_; ++i) {
      const int64_t first = math::id_of(order_[i]) * group_size_;
      for (int64_t e = first; e < first + group_size_; ++e, ++count) {
        kept_keys_[count] = keys[e];
        kept_ids_[count] = static_cast<int32_t>(e);
      }
    }
    std::fill(kept_keys_ + count, kept_keys_ + padded(count), 0);
  }

  // The positions of the top_k best of n keys; `keys` is padded with 0.
  void take(const uint32_t* keys, int64_t n, int32_t* positions) {
    const int64_t k = top_k_;
    if (k > kMaxTop) return take_many(keys, n, k, positions);
    if (simd().top(keys, n, k, reinterpret_cast<int32_t*>(scratch_), positions)) return;
    // Most keys are equal. The k best so far, sorted; a later one with an equal key loses, so
    // positions ascend among equals.
    uint64_t best[kMaxTop];
    int64_t count = 0;
    for (int64_t e = 0; e < n; ++e) {
      if (count == k && keys[e] <= static_cast<uint32_t>(best[count - 1] >> 32)) continue;
      const uint64_t item = math::composite(keys[e], e);
      int64_t at = count < k ? count++ : count - 1;
      for (; at > 0 && best[at - 1] < item; --at) best[at] = best[at - 1];
      best[at] = item;
    }
    for (int64_t i = 0; i < k; ++i) positions[i] = math::id_of(best[i]);
  }

  void take_many(const uint32_t* keys, int64_t n, int64_t k, int32_t* positions) {
    order_.resize(n);
    for (int64_t e = 0; e < n; ++e) order_[e] = math::composite(keys[e], e);
    if (k < n) {
      std::nth_element(order_.begin(), order_.begin() + k, order_.end(), std::greater<>());
    }
    std::sort(order_.begin(), order_.begin() + k, std::greater<>());
    for (int64_t i = 0; i < k; ++i) positions[i] = math::id_of(order_[i]);
  }

  int64_t experts_, top_k_, groups_, group_size_, kept_, group_score_k_;
  uint32_t *scratch_, *kept_keys_;
  int32_t* kept_ids_;
  std::vector<uint64_t> order_;
};

}  // namespace duomoe::cpu
