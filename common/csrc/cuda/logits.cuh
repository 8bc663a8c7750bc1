// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Reading and writing rows of logits of any float type, four neighbouring experts at a time.
#pragma once

#include "launch.h"
#include "warp.h"

namespace duomoe::cuda {

using math::kAdjacent;
using math::kColumns;

// A row of logits. The dtype is the same for all threads, so that a switch on it costs little, and
// kernels need not be compiled once per dtype.
struct Logits {
  DType dtype;
  const void* data;

  __device__ float operator()(int64_t e) const { return load(dtype, data, e); }
};

// Whether rows of `experts` elements from `data` on can be read four elements at once.
inline bool whole_vectors(const void* data, DType dtype, int64_t experts) {
  const int64_t bytes = kAdjacent * static_cast<int64_t>(item_size(dtype));
  return experts % kAdjacent == 0 && reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Four neighbouring elements as they are in memory; 16-bit ones are in the first two words.
using Raw = uint4;

// Elements [first, first + 4) of a row that starts at element `row` of `data`; those from `end` on
// are 0.
__device__ inline Raw load_raw(DType dtype, const void* data, int64_t row, int first, int end,
                               bool whole) {
  Raw raw{};
  if (first >= end) return raw;
  const int64_t at = row + first;
  if (whole) {
    if (dtype == DType::kFloat32) {
      return __ldcs(reinterpret_cast<const uint4*>(static_cast<const float*>(data) + at));
    }
    const uint2 half =
        __ldcs(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at));
    return {half.x, half.y, 0, 0};
  }
  unsigned word[kAdjacent] = {};
  for (int i = 0; i < kAdjacent && first + i < end; ++i) {
    if (dtype == DType::kFloat32) {
      word[i] = static_cast<const uint32_t*>(data)[at + i];
    } else {
      word[i / 2] |= static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at + i])
                     << (i % 2 * 16);
    }
  }
  return {word[0], word[1], word[2], word[3]};
}

__device__ inline void unpack(DType dtype, const Raw& raw, float* z) {
  if (dtype == DType::kFloat32) {
    z[0] = math::float_of(raw.x);
    z[1] = math::float_of(raw.y);
    z[2] = math::float_of(raw.z);
    z[3] = math::float_of(raw.w);
  } else if (dtype == DType::kBFloat16) {
    z[0] = math::float_of(raw.x << 16);
    z[1] = math::float_of(raw.x & 0xffff0000u);
    z[2] = math::float_of(raw.y << 16);
    z[3] = math::float_of(raw.y & 0xffff0000u);
  } else {
    z[0] = math::to_float(math::Float16{static_cast<uint16_t>(raw.x)});
    z[1] = math::to_float(math::Float16{static_cast<uint16_t>(raw.x >> 16)});
    z[2] = math::to_float(math::Float16{static_cast<uint16_t>(raw.y)});
    z[3] = math::to_float(math::Float16{static_cast<uint16_t>(raw.y >> 16)});
  }
}

template <typename T>
__device__ uint32_t pair_of(float low, float high) {
  return math::from_float<T>(low).bits | static_cast<uint32_t>(math::from_float<T>(high).bits)
                                             << 16;
}

// The inverse of load_raw and unpack.
__device__ inline void store_four(DType dtype, const float* z, void* data, int64_t row, int first,
                                  int end, bool whole) {
  if (first >= end) return;
  const int64_t at = row + first;
  if (!whole) {
    for (int i = 0; i < kAdjacent && first + i < end; ++i) store(dtype, z[i], data, at + i);
  } else if (dtype == DType::kFloat32) {
    __stcs(reinterpret_cast<float4*>(static_cast<float*>(data) + at),
           make_float4(z[0], z[1], z[2], z[3]));
  } else {
    const bool brain = dtype == DType::kBFloat16;
    const uint2 half =
        brain ? uint2{pair_of<math::BFloat16>(z[0], z[1]), pair_of<math::BFloat16>(z[2], z[3])}
              : uint2{pair_of<math::Float16>(z[0], z[1]), pair_of<math::Float16>(z[2], z[3])};
    __stcs(reinterpret_cast<uint2*>(static_cast<uint16_t*>(data) + at), half);
  }
}

// The largest |x|, NaN if one is NaN.
__device__ inline float largest_magnitude(float a, float b) {
  float larger;
  asm("{\n\t.reg .f32 x;\n\tabs.f32 x, %2;\n\tmax.NaN.f32 %0, %1, x;\n\t}"
      : "=f"(larger)
      : "f"(a), "f"(b));
  return larger;
}

}  // namespace duomoe::cuda
