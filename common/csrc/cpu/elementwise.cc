// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"
#include "simd.h"

namespace duomoe::cpu {
namespace {

// f(dtype, first element, count) over equal dense tensors, in blocks.
template <typename F>
void for_elements(const Call& call, F f) {
  const TensorView& shape = call.outputs[0];
  const auto size = static_cast<int64_t>(item_size(shape.dtype));
  parallel_blocks(call, shape.size(), kGrain,
                  [&](int64_t begin, int64_t end) { f(shape.dtype, begin * size, end - begin); });
}

DUOMOE_KERNEL(kCpu, swiglu) {
  for_elements(call, [&](DType dtype, int64_t at, int64_t n) {
    simd().swiglu(dtype, call.in("gate").as<char>() + at, call.in("up").as<char>() + at, n,
                  call.out("out").as<char>() + at);
  });
  return {};
}

DUOMOE_KERNEL(kCpu, swiglu_bwd) {
  for_elements(call, [&](DType dtype, int64_t at, int64_t n) {
    simd().swiglu_bwd(dtype, call.in("grad_out").as<char>() + at, call.in("gate").as<char>() + at,
                      call.in("up").as<char>() + at, n, call.out("grad_gate").as<char>() + at,
                      call.out("grad_up").as<char>() + at);
  });
  return {};
}

DUOMOE_KERNEL(kCpu, add) {
  for_elements(call, [&](DType dtype, int64_t at, int64_t n) {
    simd().add(dtype, call.in("a").as<char>() + at, call.in("b").as<char>() + at, n,
               call.out("out").as<char>() + at);
  });
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
