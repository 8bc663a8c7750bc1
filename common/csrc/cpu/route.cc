// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <memory>

#include "parallel.h"
#include "route_row.h"
#include "select.h"

namespace duomoe::cpu {
namespace {

using math::Counts;
using math::kStreams;

// A run of tokens of one sequence whose statistics are summed by one task.
struct Chunk {
  int64_t sequence, begin, end;
};

std::vector<Chunk> cut_into_chunks(const TokenRange& range, int64_t tokens) {
  std::vector<Chunk> chunks;
  const int64_t last = std::min(tokens, range.total - range.first);
  if (last <= 0) return chunks;
  const int64_t length = math::chunk_length(range.sequence_length);
  int64_t begin = 0;
  while (begin < last) {
    const int64_t sequence = range.sequence(begin);
    const int64_t sequence_end =
        std::min(last, (sequence + 1) * range.sequence_length - range.first);
    for (; begin < sequence_end; begin += length) {
      chunks.push_back({sequence, begin, std::min(sequence_end, begin + length)});
    }
    begin = sequence_end;
  }
  return chunks;
}

// What one chunk adds to its sequence's statistics.
struct Partial {
  std::unique_ptr<float[]> score_sums;     // [E]
  std::unique_ptr<int32_t[]> counts;       // [E] slots used
  std::unique_ptr<int32_t[]> loss_counts;  // [E] what the loss counts; null where it is `counts`
  float logsumexp_sq = 0;
  int32_t tokens = 0;
};

class Router {
 public:
  explicit Router(const Call& call)
      : call_(call),
        options_(call),
        range_(call),
        tokens_(call.axis('T')),
        experts_(call.axis('E')),
        top_k_(call.axis('K')),
        on_logit_(call.choice<math::SelectOn>("select_on") == math::SelectOn::kLogit),
        logits_(call.in("logits"), experts_),
        dtype_(call.in("logits").dtype),
        bias_(call.in("bias").as<const float>()),
        given_(call.in("given_indices").as<const int32_t>()),
        has_given_(call.in("given_indices").present()),
        mask_(call.in("token_mask").as<const uint8_t>()),
        has_mask_(call.in("token_mask").present()),
        indices_(call.out("indices").as<int32_t>()),
        weights_(call.out("weights").as<float>()) {
    const bool plain = !has_given_ && !call.in("bias").present() &&
                       (call.integer("num_groups") == 1 ||
                        call.integer("group_top_k") == call.integer("num_groups"));
    separate_loss_counts_ = call.choice<Counts>("counts") == Counts::kUnbiased && !plain;
  }

  void run() {
    fill_unused(std::max<int64_t>(0, std::min(tokens_, range_.total - range_.first)), tokens_);
    const std::vector<Chunk> chunks = cut_into_chunks(range_, tokens_);
    std::vector<Partial> partials(chunks.size());
    parallel_blocks(call_, static_cast<int64_t>(chunks.size()), 1,
                    [&](int64_t i, int64_t) { partials[i] = route_chunk(chunks[i]); });
    reduce(chunks, partials);
  }

 private:
  void fill_unused(int64_t begin, int64_t end) {
    std::fill(indices_ + begin * top_k_, indices_ + end * top_k_, -1);
    std::fill(weights_ + begin * top_k_, weights_ + end * top_k_, 0.0f);
  }

  Partial route_chunk(const Chunk& chunk) {
    Partial part;
    part.score_sums = std::make_unique<float[]>(experts_);
    part.counts = std::make_unique<int32_t[]>(experts_);
    if (separate_loss_counts_) part.loss_counts = std::make_unique<int32_t[]>(experts_);
    std::vector<float> streams(kStreams * experts_);
    float stream_logsumexp_sq[kStreams] = {};

    RouteRow row(options_.score, experts_);
    std::vector<float> values(experts_);
    std::vector<uint32_t> keys(experts_);
    std::vector<int32_t> plain(separate_loss_counts_ ? top_k_ : 0);
    Selector selector(experts_, top_k_, call_.integer("num_groups"), call_.integer("group_top_k"),
                      call_.integer("group_score_k"));
    Selector plain_selector(experts_, top_k_, 1, 1, 1);

    for (int64_t t = chunk.begin; t < chunk.end; ++t) {
      if (has_mask_ && !mask_[t]) {
        fill_unused(t, t + 1);
        continue;
      }
      row.compute(options_.score, dtype_, logits_[t]);
      int32_t* ids = indices_ + t * top_k_;
      float* weights = weights_ + t * top_k_;
      const float* chosen_on = on_logit_ ? row.z.data() : row.scores;
      if (has_given_) {
        for (int64_t k = 0; k < top_k_; ++k) {
          const int32_t e = given_[t * top_k_ + k];
          ids[k] = e >= 0 && e < experts_ ? e : -1;
        }
      } else {
        simd().selection(row.z.data(), chosen_on, bias_, experts_, values.data(), keys.data());
        selector.select(values.data(), keys.data(), ids);
      }
      row_weights(options_, row, ids, top_k_, weights);
      for (int64_t k = 0; k < top_k_; ++k) {
        weights[k] *= options_.scale;
        if (ids[k] >= 0) ++part.counts[ids[k]];
      }
      if (separate_loss_counts_) {
        simd().selection(row.z.data(), chosen_on, nullptr, experts_, values.data(), keys.data());
        plain_selector.select(values.data(), keys.data(), plain.data());
        for (int32_t e : plain) ++part.loss_counts[e];
      }
      const int64_t stream = (t - chunk.begin) % kStreams;
      simd().accumulate(row.probabilities.data(), experts_, streams.data() + stream * experts_);
      stream_logsumexp_sq[stream] += row.row.logsumexp * row.row.logsumexp;
      ++part.tokens;
    }
    for (int j = 0; j < kStreams; ++j) {
      simd().accumulate(streams.data() + j * experts_, experts_, part.score_sums.get());
      part.logsumexp_sq += stream_logsumexp_sq[j];
    }
    return part;
  }

  void reduce(const std::vector<Chunk>& chunks, const std::vector<Partial>& partials) {
    const int64_t sequences = call_.axis('S');
    int32_t* expert_counts = call_.out("expert_counts").as<int32_t>();
    int32_t* sequence_counts = call_.out("sequence_counts").as<int32_t>();
    float* score_sums = call_.out("score_sums").as<float>();
    float* logsumexp_sq = call_.out("logsumexp_sq").as<float>();
    int32_t* num_tokens = call_.out("num_tokens").as<int32_t>();
    std::fill(expert_counts, expert_counts + experts_, 0);
    std::fill(sequence_counts, sequence_counts + sequences * experts_, 0);
    std::fill(score_sums, score_sums + sequences * experts_, 0.0f);
    std::fill(logsumexp_sq, logsumexp_sq + sequences, 0.0f);
    std::fill(num_tokens, num_tokens + sequences, 0);
    const ScopedFpMode mode;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Partial& part = partials[i];
      const int64_t s = chunks[i].sequence;
      const int32_t* loss_counts = part.loss_counts ? part.loss_counts.get() : part.counts.get();
      for (int64_t e = 0; e < experts_; ++e) {
        expert_counts[e] += part.counts[e];
        sequence_counts[s * experts_ + e] += loss_counts[e];
      }
      simd().accumulate(part.score_sums.get(), experts_, score_sums + s * experts_);
      logsumexp_sq[s] += part.logsumexp_sq;
      num_tokens[s] += part.tokens;
    }
  }

  const Call& call_;
  RouterOptions options_;
  TokenRange range_;
  int64_t tokens_, experts_, top_k_;
  bool on_logit_;
  Rows logits_;
  DType dtype_;
  const float* bias_;
  const int32_t* given_;
  bool has_given_;
  const uint8_t* mask_;
  bool has_mask_;
  int32_t* indices_;
  float* weights_;
  bool separate_loss_counts_;
};

DUOMOE_KERNEL(kCpu, route) {
  Router(call).run();
  return {};
}

DUOMOE_KERNEL(kCpu, route_bwd) {
  const RouterOptions options(call);
  const TokenRange range(call);
  const int64_t tokens = call.axis('T'), experts = call.axis('E'), top_k = call.axis('K');
  const Rows logits(call.in("logits"), experts), grad_logits(call.out("grad_logits"), experts);
  const DType dtype = call.in("logits").dtype;
  const int32_t* indices = call.in("indices").as<const int32_t>();
  const bool has_mask = call.in("token_mask").present();
  const uint8_t* mask = call.in("token_mask").as<const uint8_t>();
  const float* grad_weights = call.in("grad_weights").as<const float>();
  const float* grad_score_sums = call.in("grad_score_sums").as<const float>();
  const float* grad_logsumexp_sq = call.in("grad_logsumexp_sq").as<const float>();

  parallel_blocks(call, tokens, rows_per_task(experts), [&](int64_t begin, int64_t end) {
    RouteRow row(options.score, experts);
    std::vector<float> weights(top_k), cotangents(top_k), grad(experts);
    for (int64_t t = begin; t < end; ++t) {
      if (!range.inside(t) || (has_mask && !mask[t])) {
        std::memset(grad_logits[t], 0, grad_logits.bytes);
        continue;
      }
      row.compute(options.score, dtype, logits[t]);
      const int32_t* ids = indices + t * top_k;
      const math::Divisor divisor = row_weights(options, row, ids, top_k, weights.data());
      for (int64_t k = 0; k < top_k; ++k) {
        cotangents[k] = row.has(ids[k]) ? grad_weights[t * top_k + k] * options.scale : 0.0f;
      }
      const float common = slot_sum(top_k, [&](int64_t k) { return weights[k] * cotangents[k]; });
      const int64_t s = range.sequence(t);
      const float softmax_factor =
          grad_logsumexp_sq[s] != 0.0f ? 2.0f * row.row.logsumexp * grad_logsumexp_sq[s] : 0.0f;
      const float rest = options.score == math::Score::kSoftmax ? divisor.rest * common : 0.0f;
      simd().row_gradient(options.score, row.z.data(), row.exponentials.data(), row.scores,
                          row.probabilities.data(), grad_score_sums + s * experts, row.row.inverse,
                          softmax_factor, rest, experts, grad.data());
      for (int64_t k = 0; k < top_k; ++k) {
        const int32_t e = ids[k];
        if (!row.has(e)) continue;
        const float own = weights[k] * (cotangents[k] - divisor.own * common);
        grad[e] += own * math::log_score_slope(options.score, row.z[e]);
      }
      simd().store(dtype, grad.data(), grad_logits[t], experts);
    }
  });
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
