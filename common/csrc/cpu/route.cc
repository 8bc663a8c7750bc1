// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "parallel.h"
#include "route_row.h"
#include "select.h"

namespace duomoe::cpu {
namespace {

using math::Counts;
using math::kStrands;
using math::kStreams;

// Tokens that a task has at least, if there are as many.
constexpr int64_t kTaskTokens = 64;

// A run of tokens of one sequence whose statistics are summed by one task; chunk `index` of the
// sequence's local tokens.
struct Chunk {
  int64_t sequence, index, begin, end;
  bool last;
};

// Cuts the local tokens into chunks, in order.
class ChunkCutter {
 public:
  ChunkCutter(const TokenRange& range, int64_t tokens)
      : range_(range), tokens_(range.clip(tokens)), length_(math::chunk_length(tokens)) {}

  // The next chunks, `limit` at most; false if there are none.
  bool next(int64_t limit, std::vector<Chunk>& chunks) {
    chunks.clear();
    while (begin_ < tokens_ && static_cast<int64_t>(chunks.size()) < limit) {
      const int64_t sequence = range_.sequence(begin_);
      const int64_t sequence_end = (sequence + 1) * range_.sequence_length - range_.first;
      const int64_t end = std::min({tokens_, sequence_end, begin_ + length_});
      const bool last = end == sequence_end || end == tokens_;
      chunks.push_back({sequence, index_, begin_, end, last});
      index_ = last ? 0 : index_ + 1;
      begin_ = end;
    }
    return !chunks.empty();
  }

  // An upper bound of how many there are.
  int64_t most_chunks() const {
    if (tokens_ == 0) return 0;
    return std::min(tokens_, tokens_ / length_ + tokens_ / range_.sequence_length + 2);
  }

  // Short chunks share a task.
  int64_t per_task() const {
    const int64_t longest = std::clamp<int64_t>(range_.sequence_length, 1, length_);
    return std::max<int64_t>(1, kTaskTokens / longest);
  }

 private:
  TokenRange range_;
  int64_t tokens_, length_;
  int64_t begin_ = 0, index_ = 0;  // of the next chunk
};

// The strands of one sequence at a time: sums of its chunks' statistics.
class Strands {
 public:
  explicit Strands(int64_t experts)
      : experts_(experts),
        arena_(1, kStrands * experts),
        score_sums_(arena_.take<float>(kStrands * experts)) {
    std::fill_n(score_sums_, kStrands * experts_, 0.0f);
  }

  void add(int64_t chunk, const float* score_sums, float logsumexp_sq) {
    const int64_t strand = chunk % kStrands;
    simd().accumulate(score_sums, experts_, score_sums_ + strand * experts_);
    logsumexp_sq_[strand] += logsumexp_sq;
    used_ = std::max(used_, strand + 1);
  }

  // Adds the strands, in order, to a sequence's sums, which are +0 so far, and clears them.
  void join(float* score_sums, float& logsumexp_sq) {
    for (int64_t i = 0; i < used_; ++i) {
      simd().accumulate(score_sums_ + i * experts_, experts_, score_sums);
      logsumexp_sq += logsumexp_sq_[i];
    }
    std::fill_n(score_sums_, used_ * experts_, 0.0f);
    std::fill_n(logsumexp_sq_, used_, 0.0f);
    used_ = 0;
  }

 private:
  int64_t experts_;
  Arena arena_;
  float* score_sums_;  // [kStrands, E]
  float logsumexp_sq_[kStrands] = {};
  int64_t used_ = 0;  // strands from here on have no chunk
};

// What the chunks of a wave add to their sequences' statistics. The chunks of a wave run in
// parallel, then they are added to their strands in order; waves bound the memory.
struct Wave {
  int64_t capacity;
  Arena arena;
  std::vector<Chunk> chunks;
  float* score_sums;     // [capacity, E]
  int32_t* counts;       // [capacity, E] slots used
  int32_t* loss_counts;  // [capacity, E] what the loss counts; null where it is `counts`
  float* logsumexp_sq;   // [capacity]
  int32_t* tokens;       // [capacity]

  Wave(int64_t most_chunks, int64_t experts, bool separate_loss_counts)
      : capacity(std::min(most_chunks, std::max<int64_t>(kLeast, kElements / experts))),
        arena(3, capacity * (experts + 2) + 2 * math::kLanes),
        score_sums(arena.take<float>(capacity * experts)),
        counts(arena.take<int32_t>(capacity * experts)),
        loss_counts(separate_loss_counts ? arena.take<int32_t>(capacity * experts) : nullptr),
        logsumexp_sq(arena.take<float>(capacity)),
        tokens(arena.take<int32_t>(capacity)) {}

 private:
  static constexpr int64_t kElements = 1 << 15, kLeast = 16;
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
        groups_(call.integer("num_groups")),
        group_top_k_(call.integer("group_top_k")),
        group_score_k_(call.integer("group_score_k")),
        indices_(call.out("indices").as<int32_t>()),
        weights_(call.out("weights").as<float>()),
        expert_counts_(call.out("expert_counts").as<int32_t>()),
        sequence_counts_(call.out("sequence_counts").as<int32_t>()),
        score_sums_(call.out("score_sums").as<float>()),
        logsumexp_sq_(call.out("logsumexp_sq").as<float>()),
        num_tokens_(call.out("num_tokens").as<int32_t>()) {
    const bool plain =
        !has_given_ && !call.in("bias").present() && (groups_ == 1 || group_top_k_ == groups_);
    separate_loss_counts_ = call.choice<Counts>("counts") == Counts::kUnbiased && !plain;
  }

  void run() {
    clear_statistics();
    fill_unused(range_.clip(tokens_), tokens_);
    ChunkCutter cutter(range_, tokens_);
    Wave wave(cutter.most_chunks(), experts_, separate_loss_counts_);
    Strands strands(experts_);
    while (cutter.next(wave.capacity, wave.chunks)) {
      parallel_blocks(call_, static_cast<int64_t>(wave.chunks.size()), cutter.per_task(),
                      [&](int64_t begin, int64_t end) { route_chunks(wave, begin, end); });
      add_up(wave, strands);
    }
  }

 private:
  void fill_unused(int64_t begin, int64_t end) {
    std::fill(indices_ + begin * top_k_, indices_ + end * top_k_, -1);
    std::fill(weights_ + begin * top_k_, weights_ + end * top_k_, 0.0f);
  }

  void clear_statistics() {
    const int64_t sequences = call_.axis('S');
    std::fill_n(expert_counts_, experts_, 0);
    std::fill_n(sequence_counts_, sequences * experts_, 0);
    std::fill_n(score_sums_, sequences * experts_, 0.0f);
    std::fill_n(logsumexp_sq_, sequences, 0.0f);
    std::fill_n(num_tokens_, sequences, 0);
  }

  // Routes the tokens of wave.chunks[begin, end).
  void route_chunks(Wave& wave, int64_t begin, int64_t end) {
    const int64_t n = padded(experts_);
    Arena arena(RowArrays::kArrays + 2 * Selector::kArrays + kStreams + 3,
                Selector::array_length(experts_));
    RowArrays row(options_.score, experts_, /*with_slopes=*/false, arena);
    float* bias = nullptr;
    if (bias_) {
      bias = arena.take<float>(n);
      std::fill(std::copy_n(bias_, experts_, bias), bias + n, 0.0f);
    }
    uint32_t* keys = arena.take<uint32_t>(Selector::array_length(experts_));
    int32_t* loss_ids = arena.take<int32_t>(top_k_);
    float* streams = arena.take<float>(kStreams * n);
    Selector selector(experts_, top_k_, groups_, group_top_k_, group_score_k_, arena);
    Selector loss_selector(experts_, top_k_, 1, 1, 1, arena);
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = wave.chunks[i];
      const int64_t used = std::min<int64_t>(kStreams, chunk.end - chunk.begin);
      int32_t* counts = wave.counts + i * experts_;
      int32_t* loss_counts = wave.loss_counts ? wave.loss_counts + i * experts_ : nullptr;
      float stream_logsumexp_sq[kStreams] = {};
      std::fill_n(streams, used * n, 0.0f);
      std::fill_n(counts, experts_, 0);
      if (loss_counts) std::fill_n(loss_counts, experts_, 0);
      wave.tokens[i] = 0;

      for (int64_t t = chunk.begin; t < chunk.end; ++t) {
        if (has_mask_ && !mask_[t]) {
          fill_unused(t, t + 1);
          continue;
        }
        simd().row_scores(dtype_, logits_[t], row);
        const float* chosen_on = on_logit_ ? row.z : row.scores;
        const int64_t stream = (t - chunk.begin) % kStreams;
        simd().add_shares(row.shares, row.share, n, streams + stream * n);
        stream_logsumexp_sq[stream] =
            math::fma(row.logsumexp, row.logsumexp, stream_logsumexp_sq[stream]);
        ++wave.tokens[i];

        int32_t* ids = indices_ + t * top_k_;
        float* weights = weights_ + t * top_k_;
        if (has_given_) {
          for (int64_t k = 0; k < top_k_; ++k) {
            const int32_t e = given_[t * top_k_ + k];
            ids[k] = row.has(e) ? e : -1;
          }
        } else {
          simd().selection_keys(row.z, chosen_on, bias, experts_, keys);
          selector.select(keys, ids);
        }
        simd().row_weights(row, options_, ids, top_k_, weights);
        for (int64_t k = 0; k < top_k_; ++k) {
          weights[k] = ids[k] >= 0 ? weights[k] * options_.scale : 0.0f;
          if (ids[k] >= 0) ++counts[ids[k]];
        }
        if (loss_counts) {
          simd().selection_keys(row.z, chosen_on, nullptr, experts_, keys);
          loss_selector.select(keys, loss_ids);
          for (int64_t k = 0; k < top_k_; ++k) ++loss_counts[loss_ids[k]];
        }
      }
      float* sums = wave.score_sums + i * experts_;
      float logsumexp_sq = 0.0f;
      std::fill_n(sums, experts_, 0.0f);
      for (int64_t j = 0; j < used; ++j) {
        simd().accumulate(streams + j * n, experts_, sums);
        logsumexp_sq += stream_logsumexp_sq[j];
      }
      wave.logsumexp_sq[i] = logsumexp_sq;
    }
  }

  void add_up(const Wave& wave, Strands& strands) {
    const ScopedFpMode mode;
    const int32_t* loss_counts = wave.loss_counts ? wave.loss_counts : wave.counts;
    for (size_t i = 0; i < wave.chunks.size(); ++i) {
      const Chunk& chunk = wave.chunks[i];
      const int64_t s = chunk.sequence, row = static_cast<int64_t>(i) * experts_;
      for (int64_t e = 0; e < experts_; ++e) {
        expert_counts_[e] += wave.counts[row + e];
        sequence_counts_[s * experts_ + e] += loss_counts[row + e];
      }
      strands.add(chunk.index, wave.score_sums + row, wave.logsumexp_sq[i]);
      if (chunk.last) strands.join(score_sums_ + s * experts_, logsumexp_sq_[s]);
      num_tokens_[s] += wave.tokens[i];
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
  int64_t groups_, group_top_k_, group_score_k_;
  int32_t* indices_;
  float* weights_;
  int32_t* expert_counts_;
  int32_t* sequence_counts_;
  float* score_sums_;
  float* logsumexp_sq_;
  int32_t* num_tokens_;
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

  // Whether a row of the output can be written without conversion and padding.
  const bool in_place = dtype == DType::kFloat32 && experts == padded(experts);

  parallel_blocks(call, tokens, rows_per_task(experts), [&](int64_t begin, int64_t end) {
    const int64_t n = padded(experts);
    Arena arena(RowArrays::kArrays + 4, n);
    RowArrays row(options.score, experts, /*with_slopes=*/true, arena);
    // Of the slots, then 0, which leaves the sum over them as it is.
    const int64_t slots = padded(top_k);
    float *weights = arena.take<float>(slots), *cotangents = arena.take<float>(slots);
    std::fill_n(weights, slots, 0.0f);
    std::fill_n(cotangents, slots, 0.0f);
    float *grad_shares = arena.take<float>(n), *grad_row = arena.take<float>(n);
    int64_t sequence_of_grad_shares = -1;
    for (int64_t t = begin; t < end; ++t) {
      if (!range.inside(t) || (has_mask && !mask[t])) {
        std::memset(grad_logits[t], 0, grad_logits.bytes);
        continue;
      }
      const int64_t s = range.sequence(t);
      if (s != sequence_of_grad_shares) {
        std::fill(std::copy_n(grad_score_sums + s * experts, experts, grad_shares), grad_shares + n,
                  0.0f);
        sequence_of_grad_shares = s;
      }
      simd().row_scores(dtype, logits[t], row);
      const int32_t* ids = indices + t * top_k;
      const math::Divisor divisor = simd().row_weights(row, options, ids, top_k, weights);
      for (int64_t k = 0; k < top_k; ++k) {
        cotangents[k] = row.has(ids[k]) ? grad_weights[t * top_k + k] * options.scale : 0.0f;
      }
      const float common = simd().lane_dot(weights, cotangents, slots);
      const float softmax_factor = math::square_slope(row.logsumexp, grad_logsumexp_sq[s]);
      const float rest = options.score == math::Score::kSoftmax ? divisor.rest * common : 0.0f;
      float* grad = in_place ? reinterpret_cast<float*>(grad_logits[t]) : grad_row;
      simd().row_gradient(row, grad_shares, softmax_factor, rest, grad);
      for (int64_t k = 0; k < top_k; ++k) {
        const int32_t e = ids[k];
        if (!row.has(e)) continue;
        const float own = weights[k] * (cotangents[k] - divisor.own * common);
        grad[e] += row.slopes ? own * row.slopes[e] : own;
      }
      if (!in_place) simd().store(dtype, grad, grad_logits[t], experts);
    }
  });
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
