// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>

#include "../fp_mode.h"
#include "../registry.h"

namespace duomoe::cpu {

// f(begin, end) over [0, n) in blocks of `grain`, on the caller's threads and in the core's
// floating-point mode.
template <typename F>
void parallel_blocks(const Call& call, int64_t n, int64_t grain, F f) {
  const int64_t count = (n + grain - 1) / grain;
  auto block = [&](int64_t i) {
    const ScopedFpMode mode;
    f(i * grain, std::min(n, (i + 1) * grain));
  };
  if (count == 1) return block(0);
  if (count > 1) call.executor.parallel_for(count, block);
}

// f(i) for i in [0, n), for tasks of unequal length: every thread takes the next one when it is
// done with its last, however the executor deals out its own.
template <typename F>
void parallel_tasks(const Call& call, int64_t n, F f) {
  std::atomic<int64_t> next{0};
  parallel_blocks(call, n, 1, [&](int64_t, int64_t) {
    for (int64_t i; next.load(std::memory_order_relaxed) < n && (i = next.fetch_add(1)) < n;) f(i);
  });
}

// Elements per task that keep a task's overhead small for work of a few operations per element.
constexpr int64_t kGrain = 1 << 14;

// A row-major [rows, width] buffer, addressed by row in bytes.
struct Rows {
  char* data;
  int64_t bytes;  // of a row

  Rows(const TensorView& view, int64_t width)
      : data(view.as<char>()), bytes(width * static_cast<int64_t>(item_size(view.dtype))) {}
  char* operator[](int64_t row) const { return data + row * bytes; }
};

inline int64_t rows_per_task(int64_t width) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
}

}  // namespace duomoe::cpu
