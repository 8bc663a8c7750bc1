// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs the inner loops of every instruction set on the same random data and compares their bits.
// Prints what differs; exits with 1 if anything does.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/simd.h"

using duomoe::DType;
using duomoe::cpu::kTileColumns;
using duomoe::cpu::kTileDepth;
using duomoe::cpu::SimdLoops;
using duomoe::math::Score;

using Floats = std::vector<float>;

void append(Floats& all, const Floats& part) { all.insert(all.end(), part.begin(), part.end()); }

// Everything that one set of loops makes of a row of logits z, cotangents g and biases b.
Floats results(const SimdLoops& loops, Score score, const Floats& z, const Floats& g,
               const Floats& b) {
  const auto n = static_cast<int64_t>(z.size());
  Floats all, exponentials(n), scores(n), probabilities(n), grad(n), values(n), floats(n);
  std::vector<uint32_t> keys(n);
  const auto row =
      loops.row_scores(score, z.data(), n, exponentials.data(), scores.data(),
                       score == Score::kSoftmax ? scores.data() : probabilities.data());
  if (score == Score::kSoftmax) probabilities = scores;
  loops.selection(z.data(), scores.data(), b.data(), n, values.data(), keys.data());
  loops.row_gradient(score, z.data(), exponentials.data(), scores.data(), probabilities.data(),
                     g.data(), row.inverse, 0.3f, 0.1f, n, grad.data());
  for (const Floats& part : {exponentials, scores, probabilities, grad, values}) append(all, part);
  append(all, {row.peak, row.inverse, row.logsumexp});
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<char> x(n * 4), y(n * 4), first(n * 4), second(n * 4);
    loops.store(dtype, z.data(), x.data(), n);
    loops.store(dtype, g.data(), y.data(), n);
    append(all, {loops.dot(dtype, x.data(), y.data(), n)});
    auto take = [&](const std::vector<char>& from) {
      loops.load(dtype, from.data(), floats.data(), n);
      append(all, floats);
    };
    loops.swiglu(dtype, x.data(), y.data(), n, first.data());
    take(first);
    loops.swiglu_bwd(dtype, y.data(), x.data(), y.data(), n, first.data(), second.data());
    take(first);
    take(second);
    loops.scale(dtype, 0.7f, x.data(), n, first.data());
    take(first);
    Floats sum = b;
    loops.accumulate_scaled(dtype, 0.7f, x.data(), n, sum.data());
    append(all, sum);
  }
  return all;
}

// One row of a product tile, which must not depend on how many rows a tile has.
Floats product_row(const SimdLoops& loops, const Floats& a, const Floats& b) {
  Floats packed, c(loops.tile_rows * kTileColumns, 0.0f);
  for (float x : a) packed.insert(packed.end(), loops.tile_rows, x);
  loops.product_tile(kTileDepth, packed.data(), b.data(), c.data(), kTileColumns);
  return Floats(c.end() - kTileColumns, c.end());
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
      const Floats z = draw(n, repeat % 5 ? 0.0f : -110.0f), g = draw(n, 0), b = draw(n, 0);
      for (Score score : {Score::kSoftmax, Score::kSigmoid, Score::kSqrtSoftplus}) {
        const Floats base = results(*sets[0], score, z, g, b);
        for (int i : {1, 2})
          compare(base, results(*sets[i], score, z, g, b), i == 1 ? "avx2" : "avx512", n);
      }
    }
  }
  const Floats a = draw(kTileDepth, 0), b = draw(kTileDepth * kTileColumns, 0);
  for (int i : {1, 2})
    compare(product_row(*sets[0], a, b), product_row(*sets[i], a, b), "product", kTileDepth);
  std::printf("%d different\n", different);
  return different != 0;
}
