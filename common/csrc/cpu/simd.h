// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of the CPU kernels, compiled once per instruction set from simd_loops.h and
// chosen at the first use. Every version gives the same bits: sums have a fixed order and
// `fma` is explicit.
#pragma once

#include <cstdint>

#include "../math/activation.h"
#include "../math/dot.h"
#include "../math/router.h"
#include "../tensor_view.h"

namespace duomoe::cpu {

// The arrays of a row of the router are padded to a multiple of kLanes elements, so that its loops
// have no tails: a padding logit is -inf, whose exponential and score are +0 and leave every sum as
// it is, and a padding key is 0, which loses against every expert.
constexpr int64_t padded(int64_t n) { return (n + math::kLanes - 1) / math::kLanes * math::kLanes; }

// One row of logits and what `row_scores` makes of it.
struct RouteRow {
  math::Score score;
  int64_t experts;
  // Padded arrays, lent by the caller.
  float* converted;     // the logits, if they are not taken from where they are
  float* exponentials;  // exp(z), or exp(z - peak) where the row is not moderate
  float* scores;        // s
  float* slopes;        // d ln s / dz for sigmoid and sqrtsoftplus; null where it is not wanted
  float* rescued;       // scratch

  const float* z;   // the logits
  bool moderate;    // as in math/router.h
  float peak;       // the largest of them; unset in a moderate row
  float inverse;    // 1 / sum of the exponentials
  float logsumexp;  // log(sum of exp(z))
  // The normalised scores, P = softmax(z) or s / sum of s, are shares[e] * share.
  const float* shares;
  float share;
};

struct WeightOptions {
  bool normalize;
  math::EpsMode eps_mode;
  float eps;
};

// What `top` finds at most between a bound of the k-th largest key and the largest.
constexpr int64_t kMaxCandidates = 64;
constexpr int64_t kMaxTop = 32;

// Columns of a product that one call of `product_tile` makes, and the depth that it sums before it
// adds to C.
constexpr int kTileColumns = 32;
constexpr int kTileDepth = 256;
constexpr int kMostTileRows = 12;
constexpr int64_t kPackLine = kTileColumns * kTileDepth;

struct SimdLoops {
  int tile_rows;  // rows of a product that one call of `product_tile` makes

  void (*load)(DType dtype, const void* from, float* to, int64_t n);
  void (*store)(DType dtype, const float* from, void* to, int64_t n);

  void (*row_scores)(DType dtype, const void* logits, RouteRow& row);
  void (*add_shares)(const float* shares, float share, int64_t n, float* sums);  // sums += P
  // The part of a row's gradient that every expert gets:
  // grad[e] = P_e (gP_e - sum P gP) slope_e + softmax_e * softmax_factor - s_e * rest, the last for
  // softmax alone.
  void (*row_gradient)(const RouteRow& row, const float* grad_shares, float softmax_factor,
                       float rest, float* grad);

  // keys[e] = order_key(selection value). bias may be null.
  void (*selection_keys)(const float* z, const float* chosen_on, const float* bias, int64_t experts,
                         uint32_t* keys);
  // The keys and ids of the `kept` best groups, their ids ascending; a group's value is the sum of
  // its `best` largest ones. False, and nothing written, for best > 2 or very many groups. `keys`
  // and the results have room for padded(experts) + kLanes elements, scratch for twice as many.
  bool (*keep_groups)(const uint32_t* keys, int64_t groups, int64_t size, int64_t best,
                      int64_t kept, uint32_t* scratch, uint32_t* kept_keys, int32_t* kept_ids);
  // ids[k] of the k <= kMaxTop largest of n >= k keys, by (key descending, id ascending). False,
  // and no id written, where too many keys are equal. scratch holds padded(n) + kLanes elements.
  bool (*top)(const uint32_t* keys, int64_t n, int64_t k, int32_t* scratch, int32_t* ids);

  // The weights of a token's slots before `scale`; slots of an id outside [0, E) get 0.
  math::Divisor (*row_weights)(const RouteRow& row, const WeightOptions& options,
                               const int32_t* ids, int64_t top_k, float* weights);

  void (*accumulate)(const float* x, int64_t n, float* sum);  // sum += x
  void (*accumulate_scaled)(DType dtype, float factor, const void* x, int64_t n,
                            float* sum);                                        // sum += factor x
  void (*scale)(DType dtype, float factor, const void* x, int64_t n, void* y);  // y = factor x
  // sum of x y: in the order of math/dot.h; and in the lanes of math/router.h, products rounded.
  float (*dot)(DType dtype, const void* x, const void* y, int64_t n);
  float (*lane_dot)(const float* x, const float* y, int64_t n);
  void (*add)(DType dtype, const void* a, const void* b, int64_t n, void* out);
  void (*activate)(math::Activation activation, float alpha, DType dtype, const void* x, int64_t n,
                   void* out);
  void (*activate_bwd)(math::Activation activation, float alpha, DType dtype, const void* grad,
                       const void* x, int64_t n, void* grad_x);
  void (*glu)(math::Activation activation, const math::GluOptions& options, DType dtype,
              const void* gate, const void* up, int64_t n, void* out);
  void (*glu_bwd)(math::Activation activation, const math::GluOptions& options, DType dtype,
                  const void* grad, const void* gate, const void* up, int64_t n, void* grad_gate,
                  void* grad_up);

  // Packs a matrix for product_tile: packed[tile][k][i in tile] from element (k, i) at from[k *
  // depth_stride + i * tile_stride], one of the strides being 1. The last tile is filled with
  // zeros. Values are rounded to `operand_dtype`. `line` is scratch for kPackLine floats; depth and
  // extent are at most kTileDepth.
  void (*pack_rows)(DType dtype, DType operand_dtype, const void* from, int64_t depth_stride,
                    int64_t tile_stride, int64_t depth, int64_t extent, const uint8_t* keep,
                    float* line,
                    float* packed);  // in tiles of tile_rows
  void (*pack_columns)(DType dtype, DType operand_dtype, const void* from, int64_t depth_stride,
                       int64_t tile_stride, int64_t depth, int64_t extent, const uint8_t* keep,
                       float* line,
                       float* packed);  // in tiles of kTileColumns
  // c[i][j] = c[i][j] (or 0, without `add`) + sum over k, in order and with fma from 0, of a[k][i]
  // * b[k][j] for i < rows <= tile_rows, j < kTileColumns. a is packed; b and c have row strides.
  void (*product_tile)(int64_t depth, int rows, const float* a, const float* b, int64_t b_stride,
                       float* c, int64_t c_stride, bool add);
};

const SimdLoops& simd();

// One per instruction set that the build compiled.
const SimdLoops& simd_base();
const SimdLoops& simd_avx2();
const SimdLoops& simd_avx512();

}  // namespace duomoe::cpu
