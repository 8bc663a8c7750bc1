// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "../options.h"
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

DUOMOE_KERNEL(kCpu, activate) {
  const math::Activation activation = activation_of(call);
  const float alpha = alpha_of(call);
  for_elements(call, [&](DType dtype, int64_t at, int64_t n) {
    simd().activate(activation, alpha, dtype, call.in("x").as<char>() + at, n,
                    call.out("out").as<char>() + at);
  });
  return {};
}

DUOMOE_KERNEL(kCpu, activate_bwd) {
  const math::Activation activation = activation_of(call);
  const float alpha = alpha_of(call);
  for_elements(call, [&](DType dtype, int64_t at, int64_t n) {
    simd().activate_bwd(activation, alpha, dtype, call.in("grad_out").as<char>() + at,
                        call.in("x").as<char>() + at, n, call.out("grad_x").as<char>() + at);
  });
  return {};
}

DUOMOE_KERNEL(kCpu, glu) {
  const math::Activation activation = activation_of(call);
  const math::GluOptions glu = glu_options_of(call);
  for_elements(call, [&](DType dtype, int64_t at, int64_t n) {
    simd().glu(activation, glu, dtype, call.in("gate").as<char>() + at,
               call.in("up").as<char>() + at, n, call.out("out").as<char>() + at);
  });
  return {};
}

DUOMOE_KERNEL(kCpu, glu_bwd) {
  const math::Activation activation = activation_of(call);
  const math::GluOptions glu = glu_options_of(call);
  for_elements(call, [&](DType dtype, int64_t at, int64_t n) {
    simd().glu_bwd(activation, glu, dtype, call.in("grad_out").as<char>() + at,
                   call.in("gate").as<char>() + at, call.in("up").as<char>() + at, n,
                   call.out("grad_gate").as<char>() + at, call.out("grad_up").as<char>() + at);
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

Status convert(const Call& call, const TensorView& from, const TensorView& to) {
  constexpr int64_t kPart = 256;
  const auto from_size = static_cast<int64_t>(item_size(from.dtype));
  const auto to_size = static_cast<int64_t>(item_size(to.dtype));
  parallel_blocks(call, to.size(), kGrain, [&](int64_t begin, int64_t end) {
    float part[kPart];
    for (int64_t i = begin; i < end; i += kPart) {
      const int64_t n = std::min(kPart, end - i);
      simd().load(from.dtype, from.as<const char>() + i * from_size, part, n);
      simd().store(to.dtype, part, to.as<char>() + i * to_size, n);
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, cast) { return convert(call, call.in("x"), call.out("out")); }
DUOMOE_KERNEL(kCpu, cast_bwd) { return convert(call, call.in("grad_out"), call.out("grad_x")); }

}  // namespace
}  // namespace duomoe::cpu
