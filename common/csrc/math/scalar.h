// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Scalar functions that give the same bits on the CPU and on a GPU: every operation is IEEE float32
// (correctly rounded division and square root), and a fused multiply-add stands only where `fma`
// does (the build turns contraction off). All are free of branches on data, so that a compiler may
// vectorise.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DUOMOE_FN static __host__ __device__ __forceinline__
#define DUOMOE_FN_MEMBER __host__ __device__ __forceinline__
#else
// `static` and inlined by force: these headers are compiled for several instruction sets, and an
// out-of-line copy of the widest one must never serve the others.
#define DUOMOE_FN static inline __attribute__((always_inline))
#define DUOMOE_FN_MEMBER inline __attribute__((always_inline))
#endif

namespace duomoe::math {

DUOMOE_FN uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
DUOMOE_FN float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

DUOMOE_FN float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return ::fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

DUOMOE_FN float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// masked(mask_of(keep), x) is keep ? x : 0, but no branch, which a compiler might merge with others
// and then not vectorise.
DUOMOE_FN uint32_t mask_of(bool keep) { return 0u - static_cast<uint32_t>(keep); }
DUOMOE_FN float masked(uint32_t mask, float x) { return float_of(bits_of(x) & mask); }

DUOMOE_FN float infinity() { return float_of(0x7f800000u); }

// c = n ln2 + r for |c| <= 130 with an integer n and |r| <= ln2 / 2. `shift` is 1.5 * 2^23 plus a
// small even number, so that c log2(e) + shift rounds to the integer n + shift, whose low bits are
// in `shifted`.
struct ExpArgument {
  float r;
  uint32_t shifted;
};
DUOMOE_FN ExpArgument reduce_exp(float c, float shift) {
  const float shifted = fma(c, 1.44269504088896341f, shift);
  const float n = shifted - shift;
  const float r = fma(n, -0.693145751953125f, c);
  return {fma(n, -1.42860682030941723212e-6f, r), bits_of(shifted)};
}

// e^c = 2^n p with a polynomial of degree 7 in r for p (coefficients: SLEEF's expf, u10).
struct ExpParts {
  float p;
  uint32_t shifted;
};
DUOMOE_FN ExpParts exp_parts(float c, float shift) {
  const auto [r, shifted] = reduce_exp(c, shift);
  float q = 0.000198527617612853646278381f;
  q = fma(q, r, 0.00139304355252534151077271f);
  q = fma(q, r, 0.00833336077630519866943359f);
  q = fma(q, r, 0.0416664853692054748535156f);
  q = fma(q, r, 0.166666671633720397949219f);
  q = fma(q, r, 0.5f);
  return {fma(r * r, q, r) + 1.0f, shifted};
}

// e^x, 1 ulp: 2^n is applied in two steps so that results down to the smallest denormal are rounded
// once.
DUOMOE_FN float exp(float x) {
  const bool nan = x != x;
  float c = nan ? 0.0f : x;
  c = c > 89.0f ? 89.0f : c;      // e^89 overflows
  c = c < -105.0f ? -105.0f : c;  // e^-105 rounds to 0
  const ExpParts parts = exp_parts(c, 12582912.0f);
  const int32_t i = static_cast<int32_t>(parts.shifted) - 0x4b400000;
  const int32_t half = i >> 1, rest = i - half;
  const float y = parts.p * float_of(static_cast<uint32_t>(half + 127) << 23) *
                  float_of(static_cast<uint32_t>(rest + 127) << 23);
  return nan ? x : y;
}

// e^x for |x| <= kModerate, below 0.9 ulp: the polynomial has degree 6 (its error is below 2^-28),
// and n is added to the exponent field of p, whose value and whose result are normal.
constexpr float kModerate = 60.0f;
DUOMOE_FN float exp_moderate(float x) {
  const auto [r, shifted] = reduce_exp(x, 12582912.0f);
  float p = 0.0013814466936371871f;
  p = fma(p, r, 0.00836878040971272f);
  p = fma(p, r, 0.041668394213284596f);
  p = fma(p, r, 0.1666652010783495f);
  p = fma(p, r, 0.49999993412490323f);
  p = fma(p, r, 1.0f);
  p = fma(p, r, 1.0f);
  return float_of(bits_of(p) + (shifted << 23));
}

// 1 / x, correctly rounded, for x in [2^-100, 2^100]. One Newton step from an estimate that is off
// by an ulp at most rounds as a division does.
DUOMOE_FN float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return ::fmaf(y, ::fmaf(-x, y, 1.0f), y);
#else
  return 1.0f / x;
#endif
}

// a / b, correctly rounded, for positive a and b in [2^-96, 2^30] whose quotient is normal: one
// step from the product with y = 1 / b, correctly rounded, by an exact residual (what a compiler
// makes of a division, less its checks).
DUOMOE_FN float quotient_by_reciprocal(float a, float b, float y) {
  const float q = a * y;
  return fma(fma(-b, q, a), y, q);
}
DUOMOE_FN float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return quotient_by_reciprocal(a, b, reciprocal(b));
#else
  return a / b;
#endif
}

// 2^63 e^x for x <= 0 or NaN, which is normal; 0 below `lowest`, which is -130 or more. n is in
// [-188, 0]: with 63 + 127 in the shift the exponent field of 2^(n + 63) is the low bits of the
// shifted number. A NaN passes through p.
constexpr float kInverseScale = 1.08420217248550443e-19f;  // 2^-63
DUOMOE_FN float scaled_exp(float x, float lowest) {
  const bool zero = x < lowest;
  const ExpParts parts = exp_parts(zero ? 0.0f : x, 12582912.0f + 190.0f);
  return zero ? 0.0f : parts.p * float_of(parts.shifted << 23);
}

// exp(x) for x <= 0 or NaN, the same bits in fewer steps: only the step of 2^-63 rounds. Below -104
// the result is 0, and no multiplication may underflow to it: that is slow on a CPU.
// kNormal: x >= kLowestNormal, so that the result is normal and 2^n can be applied at once; the
// same bits again.
constexpr float kLowestExponent = -104.0f, kLowestNormal = -87.0f;
template <bool kNormal = false>
DUOMOE_FN float exp_nonpositive(float x) {
  if constexpr (kNormal) {
    const ExpParts parts = exp_parts(x, 12582912.0f + 126.0f);
    return parts.p * float_of((parts.shifted << 23) + 0x00800000u);
  }
  return scaled_exp(x, kLowestExponent) * kInverseScale;
}

// 2 atanh(t) + e ln2 = log((1 + t) / (1 - t) * 2^e) for |t| <= 1/5, about 1 ulp (coefficients:
// SLEEF's logf).
DUOMOE_FN float log_from_ratio(float t, float e) {
  const float s = t * t;
  float q = 0.2392828464508056640625f;
  q = fma(q, s, 0.28518211841583251953125f);
  q = fma(q, s, 0.400005877017974853515625f);
  q = fma(q, s, 0.666666686534881591796875f);
  return fma(e, 0.693147180559945286226764f, fma(t * s, q, t + t));
}

// log(x) for x > 0 or NaN; +inf for +inf. Arguments here are sums of exponentials, never denormal.
DUOMOE_FN float log(float x) {
  const int32_t shifted =
      static_cast<int32_t>(bits_of(x)) - 0x3f400000;  // so that m is in [0.75, 1.5)
  const int32_t e = shifted >> 23;
  const float m = float_of(static_cast<uint32_t>(static_cast<int32_t>(bits_of(x)) - e * (1 << 23)));
  const float y = log_from_ratio((m - 1.0f) / (m + 1.0f), static_cast<float>(e));
  return x < infinity() ? y : x;
}

// log(1 + u) for 0 <= u <= 1, or NaN.
DUOMOE_FN float log1p_unit(float u) {
  const bool small = u <= 0.5f;
  const float t = (small ? u : u - 1.0f) / (small ? u + 2.0f : u + 3.0f);
  return log_from_ratio(t, small ? 0.0f : 1.0f);
}

DUOMOE_FN float absolute(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

// 1 / (1 + e^-x), without overflow for any x.
template <bool kNormal = false>
DUOMOE_FN float sigmoid(float x) {
  const float t = exp_nonpositive<kNormal>(-absolute(x));
  return (x >= 0.0f ? 1.0f : t) / (1.0f + t);
}

// sigmoid(x) and 1 - sigmoid(x) with one division: of 1 / (1 + t) and t / (1 + t), t = e^-|x|, the
// second is q + r y with y = 1 / (1 + t), q = t y and r = t - q (1 + t), which has the bits of the
// quotient for every t in [0, 1].
struct SigmoidPair {
  float value, complement;
};
DUOMOE_FN SigmoidPair sigmoid_pair(float x, float t) {
  const float divisor = 1.0f + t, y = 1.0f / divisor;
  const float q = t * y, small = fma(fma(-q, divisor, t), y, q);
  return {x >= 0.0f ? y : small, x >= 0.0f ? small : y};
}
template <bool kNormal = false>
DUOMOE_FN SigmoidPair sigmoid_pair(float x) {
  return sigmoid_pair(x, exp_nonpositive<kNormal>(-absolute(x)));
}

// An order-preserving integer: a > b as floats iff key(a) > key(b). -0 equals +0, -inf lies below
// every finite value and every NaN below -inf (at 0).
DUOMOE_FN uint32_t order_key(float x) {
  const uint32_t u = bits_of(x + 0.0f);  // -0 + 0 = +0
  const uint32_t key = u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
  return x != x ? 0u : key;
}

// The number of a key; the key of a NaN, 0, gives a NaN, and that of -0 gives 0.
DUOMOE_FN float value_of_key(uint32_t key) {
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(key) >> 31);
  return float_of(key ^ (~sign | 0x80000000u));
}

// One number whose order from large to small is (key descending, id ascending): the tie rule.
DUOMOE_FN uint64_t composite(uint32_t key, int64_t id) {
  return (static_cast<uint64_t>(key) << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
DUOMOE_FN int32_t id_of(uint64_t composite) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(composite));
}

// --- 16-bit floats -----------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

DUOMOE_FN float to_float(float x) { return x; }
DUOMOE_FN float to_float(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
DUOMOE_FN float to_float(Float16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = h.bits & 0x7fffu;
  // Exponent and mantissa moved in place, then rebiased by an exact multiplication that also
  // normalises denormals.
  const float finite = float_of(magnitude << 13) * float_of(0x77800000u);  // 2^112
  const uint32_t special = 0x7f800000u | (magnitude << 13);  // inf and NaN keep their payload
  return float_of(sign | (magnitude >= 0x7c00u ? special : bits_of(finite)));
}

DUOMOE_FN void convert(float x, float& y) { y = x; }
// Round to nearest, ties to even; a NaN becomes the quiet one, as both frameworks make it.
DUOMOE_FN void convert(float x, BFloat16& y) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  y.bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
DUOMOE_FN void convert(float x, Float16& y) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  // Below 2^-14 the addition of 0.5 rounds at the right place; above, the mantissa is rounded in
  // the integer.
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal =
      (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;  // 0xc8000000 = -112 << 23
  uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // rounds to 65536 or more
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  y.bits = static_cast<uint16_t>(sign | result);
}

template <typename T>
DUOMOE_FN T from_float(float x) {
  T y;
  convert(x, y);
  return y;
}

}  // namespace duomoe::math
