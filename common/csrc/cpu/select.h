// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Top-K of one row by (value descending, id ascending), optionally within the best groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "../math/scalar.h"

namespace duomoe::cpu {

class Selector {
 public:
  Selector(int64_t experts, int64_t top_k, int64_t groups, int64_t group_top_k,
           int64_t group_score_k)
      : experts_(experts),
        top_k_(top_k),
        groups_(groups),
        group_size_(experts / groups),
        kept_(group_top_k),
        group_score_k_(std::min(group_score_k, group_size_)),
        order_(experts),
        group_order_(groups) {}

  // values and keys as SimdLoops::selection writes them; indices[top_k] is the result.
  void select(const float* values, const uint32_t* keys, int32_t* indices) {
    if (groups_ == 1 || kept_ == groups_) {
      take(keys, {{0, experts_}}, indices);
      return;
    }
    for (int64_t g = 0; g < groups_; ++g) {
      const float value = group_value(values + g * group_size_, keys + g * group_size_);
      group_order_[g] = composite(math::order_key(value), g);
    }
    std::partial_sort(group_order_.begin(), group_order_.begin() + kept_, group_order_.end(),
                      std::greater<>());
    ranges_.clear();
    for (int64_t i = 0; i < kept_; ++i) {
      const int64_t g = id_of(group_order_[i]);
      ranges_.push_back({g * group_size_, (g + 1) * group_size_});
    }
    std::sort(ranges_.begin(), ranges_.end());
    take(keys, ranges_, indices);
  }

 private:
  using Range = std::pair<int64_t, int64_t>;

  // One number whose order is (key descending, id ascending) when sorted from large to small.
  static uint64_t composite(uint32_t key, int64_t id) {
    return (static_cast<uint64_t>(key) << 32) | (0xffffffffu - static_cast<uint32_t>(id));
  }
  static int64_t id_of(uint64_t composite) {
    return 0xffffffffu - static_cast<uint32_t>(composite);
  }

  // Sum of the group's best `group_score_k` values, largest first.
  float group_value(const float* values, const uint32_t* keys) {
    for (int64_t i = 0; i < group_size_; ++i) order_[i] = composite(keys[i], i);
    std::partial_sort(order_.begin(), order_.begin() + group_score_k_, order_.begin() + group_size_,
                      std::greater<>());
    float sum = values[id_of(order_[0])];
    for (int64_t i = 1; i < group_score_k_; ++i) sum += values[id_of(order_[i])];
    return sum;
  }

  void take(const uint32_t* keys, const std::vector<Range>& ranges, int32_t* indices) {
    if (top_k_ <= kInsertionLimit) {
      // The K best so far, sorted; a later expert with an equal key loses, so ids ascend among
      // equals.
      uint64_t best[kInsertionLimit];
      int64_t count = 0;
      for (const auto& [begin, end] : ranges) {
        for (int64_t e = begin; e < end; ++e) {
          if (count == top_k_ && keys[e] <= static_cast<uint32_t>(best[count - 1] >> 32)) continue;
          const uint64_t item = composite(keys[e], e);
          int64_t at = count < top_k_ ? count++ : count - 1;
          for (; at > 0 && best[at - 1] < item; --at) best[at] = best[at - 1];
          best[at] = item;
        }
      }
      for (int64_t k = 0; k < top_k_; ++k) indices[k] = static_cast<int32_t>(id_of(best[k]));
      return;
    }
    int64_t count = 0;
    for (const auto& [begin, end] : ranges) {
      for (int64_t e = begin; e < end; ++e) order_[count++] = composite(keys[e], e);
    }
    if (top_k_ < count) {
      std::nth_element(order_.begin(), order_.begin() + top_k_, order_.begin() + count,
                       std::greater<>());
    }
    std::sort(order_.begin(), order_.begin() + top_k_, std::greater<>());
    for (int64_t k = 0; k < top_k_; ++k) indices[k] = static_cast<int32_t>(id_of(order_[k]));
  }

  static constexpr int64_t kInsertionLimit = 32;
  int64_t experts_, top_k_, groups_, group_size_, kept_, group_score_k_;
  std::vector<uint64_t> order_, group_order_;
  std::vector<Range> ranges_;
};

}  // namespace duomoe::cpu
