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
  static constexpr int64_t kArrays = 6;
  static int64_t array_length(int64_t experts) { return padded(experts) + math::kLanes; }

  Selector(int64_t experts, int64_t top_k, int64_t groups, int64_t group_top_k,
           int64_t group_score_k, Arena& arena)
      : experts_(experts),
        top_k_(top_k),
        groups_(groups),
        group_size_(experts / groups),
        kept_(group_top_k),
        group_score_k_(std::min(group_score_k, group_size_)),
        scratch_(arena.take<uint32_t>(4 * array_length(experts))),
        group_keys_(arena.take<uint32_t>(array_length(experts))),
        kept_keys_(arena.take<uint32_t>(array_length(experts))),
        kept_groups_(kept_) {}

  // keys as SimdLoops::selection_keys writes them, in an array of array_length(experts) elements;
  // indices[top_k] is the result.
  void select(const uint32_t* keys, int32_t* indices) {
    if (groups_ == 1 || kept_ == groups_) return take(keys, experts_, top_k_, indices);
    value_groups(keys);
    take(group_keys_, groups_, kept_, kept_groups_.data());
    std::sort(kept_groups_.begin(), kept_groups_.end());
    const int64_t size = group_size_, count = kept_ * size;
    for (int64_t i = 0; i < kept_; ++i) {
      std::copy_n(keys + kept_groups_[i] * size, size, kept_keys_ + i * size);
    }
    std::fill(kept_keys_ + count, kept_keys_ + padded(count), 0);
    take(kept_keys_, count, top_k_, indices);
    const uint32_t divisor = static_cast<uint32_t>(size);
    for (int64_t k = 0; k < top_k_; ++k) {
      const uint32_t at = static_cast<uint32_t>(indices[k]), group = at / divisor;
      indices[k] = static_cast<int32_t>(kept_groups_[group] * divisor + at - group * divisor);
    }
  }

 private:
  // group_keys_[g] = order_key(sum of the group's best `group_score_k` values, largest first).
  void value_groups(const uint32_t* keys) {
    if (group_score_k_ <= 2) {
      return simd().group_keys(keys, groups_, group_size_, group_score_k_, scratch_, group_keys_);
    }
    for (int64_t g = 0; g < groups_; ++g) {
      uint32_t* best = scratch_;
      std::copy_n(keys + g * group_size_, group_size_, best);
      std::partial_sort(best, best + group_score_k_, best + group_size_, std::greater<>());
      float sum = math::value_of_key(best[0]);
      for (int64_t i = 1; i < group_score_k_; ++i) sum += math::value_of_key(best[i]);
      group_keys_[g] = math::order_key(sum);
    }
    std::fill(group_keys_ + groups_, group_keys_ + padded(groups_), 0);
  }

  // One number whose order is (key descending, position ascending) when sorted from large to small.
  static uint64_t composite(uint32_t key, int64_t position) {
    return (static_cast<uint64_t>(key) << 32) | (0xffffffffu - static_cast<uint32_t>(position));
  }
  static int32_t position_of(uint64_t composite) {
    return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(composite));
  }

  // The positions of the k best of n keys; `keys` is padded with 0.
  void take(const uint32_t* keys, int64_t n, int64_t k, int32_t* positions) {
    if (k > kMaxTop) return take_many(keys, n, k, positions);
    if (simd().top(keys, n, k, reinterpret_cast<int32_t*>(scratch_), positions)) return;
    // Most keys are equal. The k best so far, sorted; a later one with an equal key loses, so
    // positions ascend among equals.
    uint64_t best[kMaxTop];
    int64_t count = 0;
    for (int64_t e = 0; e < n; ++e) {
      if (count == k && keys[e] <= static_cast<uint32_t>(best[count - 1] >> 32)) continue;
      const uint64_t item = composite(keys[e], e);
      int64_t at = count < k ? count++ : count - 1;
      for (; at > 0 && best[at - 1] < item; --at) best[at] = best[at - 1];
      best[at] = item;
    }
    for (int64_t i = 0; i < k; ++i) positions[i] = position_of(best[i]);
  }

  void take_many(const uint32_t* keys, int64_t n, int64_t k, int32_t* positions) {
    order_.resize(n);
    for (int64_t e = 0; e < n; ++e) order_[e] = composite(keys[e], e);
    if (k < n) {
      std::nth_element(order_.begin(), order_.begin() + k, order_.end(), std::greater<>());
    }
    std::sort(order_.begin(), order_.begin() + k, std::greater<>());
    for (int64_t i = 0; i < k; ++i) positions[i] = position_of(order_[i]);
  }

  int64_t experts_, top_k_, groups_, group_size_, kept_, group_score_k_;
  uint32_t *scratch_, *group_keys_, *kept_keys_;
  std::vector<int32_t> kept_groups_;
  std::vector<uint64_t> order_;
};

}  // namespace duomoe::cpu
