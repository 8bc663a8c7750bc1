// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs the inner loops of every instruction set on the same random data and compares their bits.
// Prints what differs; exits with 1 if anything does.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/simd.h"

using duomoe::DType;
using duomoe::cpu::kTileColumns;
using duomoe::cpu::kTileDepth;
using duomoe::cpu::padded;
using duomoe::cpu::RouteRow;
using duomoe::cpu::SimdLoops;
using duomoe::math::Activation;
using duomoe::math::EpsMode;
using duomoe::math::GluOptions;
using duomoe::math::kLanes;
using duomoe::math::Score;

using Floats = std::vector<float>;

void append(Floats& all, const Floats& part) { all.insert(all.end(), part.begin(), part.end()); }

// What the router's loops make of a row of logits z, cotangents g and biases b.
Floats route_results(const SimdLoops& loops, Score score, const Floats& z, const Floats& g,
                     const Floats& b) {
  const auto n = static_cast<int64_t>(z.size()), size = padded(n) + kLanes;
  std::vector<Floats> arrays(8, Floats(size));
  Floats &grad_shares = arrays[5], &bias = arrays[6], &grad = arrays[7];
  std::copy(g.begin(), g.end(), grad_shares.begin());
  std::copy(b.begin(), b.end(), bias.begin());
  RouteRow row{};
  row.score = score;
  row.experts = n;
  row.converted = arrays[0].data();
  row.exponentials = arrays[1].data();
  row.scores = arrays[2].data();
  row.rescued = arrays[3].data();
  row.slopes = score == Score::kSoftmax ? nullptr : arrays[4].data();
  loops.row_scores(DType::kFloat32, z.data(), row);
  Floats all = {row.peak, row.inverse, row.logsumexp, row.share};
  Floats sums(size);
  loops.add_shares(row.shares, row.share, padded(n), sums.data());
  loops.row_gradient(row, grad_shares.data(), 0.3f, 0.1f, grad.data());
  for (Floats* part : {&arrays[1], &arrays[2], &arrays[4], &sums, &grad}) {
    part->resize(n);
    append(all, *part);
  }

  std::vector<uint32_t> keys(size), kept_keys(size), scratch(2 * size);
  std::vector<int32_t> ids(n), kept_ids(size);
  loops.selection_keys(row.z, row.scores, bias.data(), n, keys.data());
  for (int64_t k : {1, 3, 8, 9, 16, 17, 32}) {
    if (k > n) break;
    auto* positions = reinterpret_cast<int32_t*>(scratch.data());
    all.push_back(loops.top(keys.data(), n, k, positions, ids.data()));
    if (!all.back()) continue;
    all.insert(all.end(), ids.begin(), ids.begin() + k);
    for (bool normalize : {false, true}) {
      Floats weights(k);
      const auto divisor =
          loops.row_weights(row, {normalize, EpsMode::kAdd, 1e-20f}, ids.data(), k, weights.data());
      append(all, weights);
      append(all, {divisor.value, divisor.own, divisor.rest});
    }
  }
  for (int64_t groups : {2, 3, 4, 8, 32}) {
    if (n % groups) continue;
    const int64_t group = n / groups, kept = (groups + 1) / 2;
    for (int64_t best = 1; best <= std::min<int64_t>(2, group); ++best) {
      loops.keep_groups(keys.data(), groups, group, best, kept, scratch.data(), kept_keys.data(),
                        kept_ids.data());
      all.insert(all.end(), kept_ids.begin(), kept_ids.begin() + kept * group);
    }
  }
  return all;
}

// Everything that one set of loops makes of the three rows.
Floats results(const SimdLoops& loops, Score score, const Floats& z, const Floats& g,
               const Floats& b) {
  const auto n = static_cast<int64_t>(z.size());
  Floats all = route_results(loops, score, z, g, b), floats(n);
  append(all, {loops.lane_dot(z.data(), g.data(), n)});
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<char> x(n * 4), y(n * 4), first(n * 4), second(n * 4);
    loops.store(dtype, z.data(), x.data(), n);
    loops.store(dtype, g.data(), y.data(), n);
    append(all, {loops.dot(dtype, x.data(), y.data(), n)});
    auto take = [&](const std::vector<char>& from) {
      loops.load(dtype, from.data(), floats.data(), n);
      append(all, floats);
    };
    for (Activation f : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                         Activation::kRelu, Activation::kReluSquared}) {
      for (float alpha : {1.0f, 1.702f}) {
        loops.activate(f, alpha, dtype, x.data(), n, first.data());
        take(first);
        loops.activate_bwd(f, alpha, dtype, y.data(), x.data(), n, first.data());
        take(first);
        for (const GluOptions& glu : {GluOptions{alpha, 0, 0}, GluOptions{alpha, 7, 1}}) {
          loops.glu(f, glu, dtype, x.data(), y.data(), n, first.data());
          take(first);
          loops.glu_bwd(f, glu, dtype, y.data(), x.data(), y.data(), n, first.data(),
                        second.data());
          take(first);
          take(second);
        }
      }
    }
    loops.scale(dtype, 0.7f, x.data(), n, first.data());
    take(first);
    Floats sum = b;
    loops.accumulate_scaled(dtype, 0.7f, x.data(), n, sum.data());
    append(all, sum);
  }
  return all;
}

// The last row of a product tile, which must not depend on how many rows the tile has.
Floats product_row(const SimdLoops& loops, int rows, const Floats& a, const Floats& b) {
  Floats packed, c(rows * kTileColumns, NAN);
  for (float x : a) packed.insert(packed.end(), loops.tile_rows, x);
  for (bool add : {false, true}) {
    loops.product_tile(kTileDepth, rows, packed.data(), b.data(), kTileColumns, c.data(),
                       kTileColumns, add);
  }
  return Floats(c.end() - kTileColumns, c.end());
}

// The elements of a matrix after it was packed, in an order that does not depend on the tiles.
Floats packed(const SimdLoops& loops, bool rows, DType dtype, bool depth_first, int64_t depth,
              int64_t extent, const Floats& values) {
  std::vector<char> from(values.size() * item_size(dtype));
  loops.store(dtype, values.data(), from.data(), values.size());
  const int64_t tile = rows ? loops.tile_rows : kTileColumns;
  Floats line(duomoe::cpu::kPackLine), out((extent + tile - 1) / tile * tile * depth, NAN), result;
  (rows ? loops.pack_rows : loops.pack_columns)(
      dtype, DType::kFloat32, from.data(), depth_first ? 1 : extent + 3,
      depth_first ? depth + 5 : 1, depth, extent, nullptr, line.data(), out.data());
  for (int64_t i = 0; i < extent; ++i) {
    for (int64_t k = 0; k < depth; ++k) {
      result.push_back(out[i / tile * tile * depth + k * tile + i % tile]);
    }
  }
  return result;
}

int main() {
  const SimdLoops* sets[] = {&duomoe::cpu::simd_base(), &duomoe::cpu::simd_avx2(),
                             &duomoe::cpu::simd_avx512()};
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 8);
  auto draw = [&](size_t n, float shift) {
    Floats values(n);
    for (float& x : values) x = normal(random) + shift;
    return values;
  };
  int different = 0;
  auto compare = [&](const Floats& a, const Floats& b, const char* what, size_t n) {
    if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) return;
    std::printf("%s differs for rows of %zu\n", what, n);
    ++different;
  };
  for (size_t n : {1, 7, 31, 32, 33, 64, 100, 256, 301}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      Floats z = draw(n, repeat % 5 ? 0.0f : -110.0f), b = draw(n, 0);
      const Floats g = draw(n, 0);
      if (repeat % 5 == 1) {  // ties
        for (float& x : z) x = std::nearbyint(x / 8);
        for (float& x : b) x = std::nearbyint(x / 16);
      }
      for (Score score : {Score::kSoftmax, Score::kSigmoid, Score::kSqrtSoftplus}) {
        const Floats base = results(*sets[0], score, z, g, b);
        for (int i : {1, 2})
          compare(base, results(*sets[i], score, z, g, b), i == 1 ? "avx2" : "avx512", n);
      }
    }
  }
  const Floats a = draw(kTileDepth, 0), b = draw(kTileDepth * kTileColumns, 0);
  for (const SimdLoops* set : sets) {
    for (int rows = 1; rows <= set->tile_rows; ++rows) {
      compare(product_row(*sets[0], 1, a, b), product_row(*set, rows, a, b), "product", rows);
    }
  }
  for (int64_t extent : {1, 3, 7, 8, 11, 12, 13, 24, 31, 32, 96, 101}) {
    for (int64_t depth : {1, 7, 8, 30, 64}) {
      const Floats values = draw((extent + 5) * (depth + 5), 0);
      for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        for (bool depth_first : {false, true}) {
          const Floats base = packed(*sets[0], true, dtype, depth_first, depth, extent, values);
          for (const SimdLoops* set : sets) {
            for (bool rows : {false, true}) {
              compare(base, packed(*set, rows, dtype, depth_first, depth, extent, values),
                      "packing", extent);
            }
          }
        }
      }
    }
  }
  std::printf("%d different\n", different);
  return different != 0;
}
