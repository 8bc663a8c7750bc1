// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Writing and reading rows that are too many for the caches.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace duomoe::cpu {

// Outputs from this size on are written past the caches: little of them would be left there for
// who reads them next, and a line that is written whole need not be read first.
#if !defined(DUOMOE_STREAMED_BYTES)  // a test has another size
#define DUOMOE_STREAMED_BYTES (int64_t{1} << 25)
#endif
constexpr int64_t kStreamedBytes = DUOMOE_STREAMED_BYTES;

// Copies past the caches. fence_streams() before another thread reads the copy.
inline void copy_stream(const char* from, int64_t bytes, char* to) {
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  if (bytes < head + kLine) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  if (head > 0) std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    const auto* x = reinterpret_cast<const __m128i*>(from + i);
    auto* y = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(x), b = _mm_loadu_si128(x + 1), c = _mm_loadu_si128(x + 2),
                  d = _mm_loadu_si128(x + 3);
    _mm_stream_si128(y, a);
    _mm_stream_si128(y + 1, b);
    _mm_stream_si128(y + 2, c);
    _mm_stream_si128(y + 3, d);
  }
  if (i < bytes) std::memcpy(to + i, from + i, bytes - i);
#else
  if (bytes > 0) std::memcpy(to, from, bytes);
#endif
}

inline void fence_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Rows are too short for the hardware to notice.
inline void prefetch(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

}  // namespace duomoe::cpu
