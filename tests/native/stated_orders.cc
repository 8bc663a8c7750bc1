// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The router's rows and statistics, element by element in the orders and by the cases that
// math/router.h states, against the loops of every instruction set and the op; and the steps of a
// GPU's division. Prints what differs and the number of comparisons; 1 if anything does.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cpu/simd.h"
#include "registry.h"

using namespace duomoe::math;
using duomoe::DType;
using duomoe::TensorView;
using duomoe::cpu::padded;
using duomoe::cpu::RouteRow;
using duomoe::cpu::SimdLoops;
using Floats = std::vector<float>;

int64_t comparisons = 0, different = 0;
void compare(const char* what, size_t n, float got, float want) {
  ++comparisons;
  if (bits_of(got) == bits_of(want) || (std::isnan(got) && std::isnan(want))) return;
  if (++different < 20) std::printf("%s of %zu: %.9g, not %.9g\n", what, n, got, want);
}

// The sum over a row; add(e, column) adds element e.
template <typename Add>
float row_sum(size_t n, Add add) {
  float column[kColumns] = {}, lane[kLanes];
  for (size_t e = 0; e < n; ++e) column[e % kColumns] = add(e, column[e % kColumns]);
  for (int l = 0; l < kLanes; ++l) {
    const float* c = column + kAdjacent * l;
    lane[l] = (c[0] + c[1]) + (c[2] + c[3]);
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}
float row_sum(const Floats& x) {
  return row_sum(x.size(), [&](size_t e, float sum) { return sum + x[e]; });
}

struct Row {
  bool moderate = true;
  Floats exponentials, scores, slopes, shares;
  float inverse, logsumexp, share;

  Row(Score score, const Floats& z) : exponentials(z), scores(z), slopes(z) {
    float peak = -infinity();
    for (float x : z) {
      moderate = moderate && absolute(x) <= moderate_limit(score);
      peak = x > peak ? x : peak;
    }
    const size_t n = z.size();
    for (size_t e = 0; e < n; ++e) {
      exponentials[e] = moderate ? exp_moderate(z[e]) : exp_nonpositive(z[e] - peak);
      slopes[e] = log_score_slope(score, z[e]);
      if (score != Score::kSoftmax) scores[e] = elementwise_score(score, z[e]);
      if (score != Score::kSigmoid || !moderate) continue;
      const SigmoidPair pair = moderate_sigmoid(z[e], exponentials[e]);
      scores[e] = pair.value;
      slopes[e] = pair.complement;
    }
    const float sum = row_sum(exponentials);
    inverse = 1.0f / sum;
    logsumexp = moderate ? log(sum) : peak + log(sum);
    if (score == Score::kSoftmax) {
      for (size_t e = 0; e < n; ++e) scores[e] = exponentials[e] * inverse;
      shares = exponentials;
      share = inverse;
      return;
    }
    shares = scores;
    const float top = log_scale(score, peak, peak);
    for (size_t e = 0; e < n && !moderate && may_underflow(top); ++e) {
      shares[e] = exp(log_scale(score, z[e], peak) - top) * score_factor(score, z[e]);
    }
    share = moderate ? 1.0f / row_sum(shares) : share_factor(row_sum(shares), peak);
  }

  Floats gradient(Score score, const Floats& g, float softmax_factor, float rest) const {
    const float dot =
        row_sum(g.size(), [&](size_t e, float sum) { return fma(shares[e], g[e], sum); });
    const float mean = share * dot, factor = inverse * softmax_factor;
    const bool unasked =
        mean != mean && std::all_of(g.begin(), g.end(), [](float x) { return x == 0.0f; });
    Floats grad(g.size());
    for (size_t e = 0; e < g.size(); ++e) {
      grad[e] = (shares[e] * share) * (g[e] - mean);
      if (score != Score::kSoftmax) grad[e] *= slopes[e];
      if (unasked) grad[e] = 0.0f;
      if (softmax_factor != 0.0f) grad[e] = fma(exponentials[e], factor, grad[e]);
      if (rest != 0.0f) grad[e] = fma(-(exponentials[e] * inverse), rest, grad[e]);
    }
    return grad;
  }
};

void compare_row(const SimdLoops& loops, Score score, const Floats& z, const Floats& g) {
  const size_t n = z.size();
  const auto size = static_cast<size_t>(padded(static_cast<int64_t>(n)));
  std::vector<Floats> arrays(7, Floats(size, NAN));
  Floats &grad_shares = arrays[5], &grad = arrays[6], sums(size, 0.25f);
  std::fill(std::copy(g.begin(), g.end(), grad_shares.begin()), grad_shares.end(), 0.0f);
  RouteRow row{};
  row.score = score;
  row.experts = static_cast<int64_t>(n);
  row.converted = arrays[0].data();
  row.exponentials = arrays[1].data();
  row.scores = arrays[2].data();
  row.rescued = arrays[3].data();
  row.slopes = score == Score::kSoftmax ? nullptr : arrays[4].data();
  loops.row_scores(DType::kFloat32, z.data(), row);
  const Row want(score, z);
  compare("moderate", n, row.moderate, want.moderate);
  compare("1 / sum", n, row.inverse, want.inverse);
  compare("logsumexp", n, row.logsumexp, want.logsumexp);
  compare("share", n, row.share, want.share);
  loops.add_shares(row.shares, row.share, static_cast<int64_t>(size), sums.data());
  for (size_t e = 0; e < n; ++e) {
    compare("exponential", n, row.exponentials[e], want.exponentials[e]);
    compare("score", n, row.scores[e], want.scores[e]);
    if (row.slopes) compare("slope", n, row.slopes[e], want.slopes[e]);
    compare("share", n, row.shares[e], want.shares[e]);
    compare("sum of shares", n, sums[e], fma(want.shares[e], want.share, 0.25f));
  }
  for (float factor : {0.0f, 0.3f}) {
    for (float rest : {0.0f, 0.1f}) {
      if (score != Score::kSoftmax) rest = 0.0f;
      loops.row_gradient(row, grad_shares.data(), factor, rest, grad.data());
      const Floats gradient = want.gradient(score, g, factor, rest);
      for (size_t e = 0; e < n; ++e) compare("gradient", n, grad[e], gradient[e]);
    }
  }
}

// --- statistics ----------------------------------------------------------------------------------

struct SerialExecutor : duomoe::Executor {
  void parallel_for(int64_t count, const std::function<void(int64_t)>& task) override {
    while (count > 0) task(--count);
  }
} executor;

// Adds up one sequence's local tokens [begin, end); value(t) is a token's addend for `fma`.
template <typename Add>
float token_sum(int64_t begin, int64_t end, int64_t length, Add add) {
  float strand[kStrands] = {}, sum = 0.0f;
  for (int64_t chunk = 0; begin + chunk * length < end; ++chunk) {
    const int64_t first = begin + chunk * length, last = std::min(end, first + length);
    float stream[kStreams] = {}, joined = 0.0f;
    for (int64_t t = first; t < last; ++t) {
      stream[(t - first) % kStreams] = add(t, stream[(t - first) % kStreams]);
    }
    for (float x : stream) joined += x;
    strand[chunk % kStrands] += joined;
  }
  for (float x : strand) sum += x;
  return sum;
}

void compare_statistics(Score score, int64_t tokens, int64_t sequences, int64_t experts,
                        int32_t first_token, int64_t total, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 9);
  Floats logits(tokens * experts);
  for (float& x : logits) x = normal(random);
  std::vector<uint8_t> live(tokens);
  for (auto& x : live) x = random() % 8 != 0;
  std::map<std::string, TensorView> given = {
      {"logits", {logits.data(), DType::kFloat32, 2, {tokens, experts}}},
      {"token_mask", {live.data(), DType::kBool, 1, {tokens}}},
      {"first_token", {&first_token, DType::kInt32, 0, {}}}};
  const std::map<std::string, duomoe::AttributeValue> options = {
      {"top_k", {.integer = 1}},
      {"score", {.integer = static_cast<int>(score)}},
      {"num_groups", {.integer = 1}},
      {"group_top_k", {.integer = 1}},
      {"group_score_k", {.integer = 1}},
      {"scale", {.real = 1}},
      {"num_sequences", {.integer = sequences}},
      {"total_tokens", {.integer = total}}};
  const int op = duomoe::op_index("route");
  const duomoe::OpSpec& spec = duomoe::op_table()[op];
  std::vector<TensorView> inputs, outputs(spec.outputs.size());
  std::vector<duomoe::AttributeValue> values;
  for (const auto& input : spec.inputs) inputs.push_back(given[input.name]);
  for (const auto& attribute : spec.attributes) {
    const auto found = options.find(attribute.name);
    values.push_back(found == options.end() ? duomoe::AttributeValue{} : found->second);
  }
  duomoe::Status status = infer_outputs(op, inputs, values, outputs);
  std::vector<Floats> memory;
  for (auto& output : outputs) {
    memory.emplace_back(output.size());
    output.data = memory.back().data();
  }
  if (status.ok()) {
    status = run(op, duomoe::Backend::kCpu, inputs, outputs, values, executor);
  }
  if (!status.ok()) {
    std::puts(status.message.c_str());
    ++different;
    return;
  }
  std::vector<Row> rows;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto from = logits.begin() + t * experts;
    rows.emplace_back(score, Floats(from, from + experts));
  }
  const int64_t sequence_length = total / sequences, length = chunk_length(tokens);
  const int64_t inside = std::min(tokens, total - first_token);
  const Floats &score_sums = memory[4], &logsumexp_sq = memory[5];
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t begin = std::max<int64_t>(0, s * sequence_length - first_token);
    const int64_t end = std::min(inside, (s + 1) * sequence_length - first_token);
    for (int64_t e = 0; e < experts; ++e) {
      compare("score sum", tokens, score_sums[s * experts + e],
              token_sum(begin, end, length, [&](int64_t t, float sum) {
                return live[t] ? fma(rows[t].shares[e], rows[t].share, sum) : sum;
              }));
    }
    compare("sum of logsumexp^2", tokens, logsumexp_sq[s],
            token_sum(begin, end, length, [&](int64_t t, float sum) {
              return live[t] ? fma(rows[t].logsumexp, rows[t].logsumexp, sum) : sum;
            }));
  }
}

// Every mantissa of the divisor; numerators at random, and next to those whose quotient lies half
// way between two floats.
void compare_quotients(std::mt19937& random) {
  constexpr uint32_t kOne = 0x3f800000u, kMantissas = 1u << 23;
  for (uint32_t mantissa = 0; mantissa < kMantissas; ++mantissa) {
    const float b = float_of(kOne | mantissa), y = 1.0f / b;
    const float any = float_of(kOne | (random() % kMantissas));
    const double half_way = any + std::ldexp(1.0, -24);
    const float near = static_cast<float>(half_way * b);
    for (float a : {any, near, float_of(bits_of(near) - 1), float_of(bits_of(near) + 1)})
      compare("quotient", mantissa, quotient_by_reciprocal(a, b, y), a / b);
  }
}

int main() {
  std::vector<const SimdLoops*> sets = {&duomoe::cpu::simd_base()};
  if (__builtin_cpu_supports("avx2")) sets.push_back(&duomoe::cpu::simd_avx2());
  if (__builtin_cpu_supports("avx512vl")) sets.push_back(&duomoe::cpu::simd_avx512());
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  constexpr Score kScores[] = {Score::kSoftmax, Score::kSigmoid, Score::kSqrtSoftplus};
  for (size_t n : {1, 2, 7, 31, 32, 33, 64, 65, 96, 100, 127, 128, 129, 160, 256, 301, 384, 520}) {
    for (int repeat = 0; repeat < 48; ++repeat) {
      const float scale = std::vector<float>{1, 8, 40, 0.01f}[repeat % 4];
      Floats z(n), g(n);
      for (float& x : z) x = scale * normal(random) - (repeat % 12 == 2 ? 150.0f : 0.0f);
      for (float& x : g) x = repeat % 16 == 3 ? 0.0f : normal(random);
      for (Score score : kScores) {
        const float limit = moderate_limit(score);
        Floats row = z;
        if (repeat % 3 == 1) {  // at the limit or one step beyond it
          for (float& x : row) x = std::clamp(x, -limit, limit);
          const float beyond = std::nextafter(limit, infinity());
          row[random() % n] = std::vector<float>{limit, -limit, beyond, -beyond}[random() % 4];
        }
        if (repeat % 8 == 7) row[random() % n] = repeat % 16 == 7 ? -infinity() : NAN;
        if (repeat % 16 == 15 && random() % 4 == 0) row.assign(n, -infinity());
        for (const SimdLoops* set : sets) compare_row(*set, score, row, g);
      }
    }
  }
  for (Score score : kScores) {
    for (int64_t tokens : {1, 15, 16, 17, 130, 600, 4097}) {
      compare_statistics(score, tokens, 1, 5, 0, tokens, random);
    }
    compare_statistics(score, 300, 3, 37, 0, 300, random);
    compare_statistics(score, 300, 4, 5, 70, 400, random);   // a slice that starts in a sequence
    compare_statistics(score, 300, 2, 5, 150, 400, random);  // and one with padding at its end
    compare_statistics(score, 9000, 1, 5, 4000, 40000, random);
  }
  compare_quotients(random);
  std::printf("%lld comparisons, %lld different\n", static_cast<long long>(comparisons),
              static_cast<long long>(different));
  return different != 0;
}
