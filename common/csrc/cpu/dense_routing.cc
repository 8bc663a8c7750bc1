// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Routing as [T, E] matrices, and the loss over a matrix of scores.
#include <cstring>
#include <vector>

#include "../math/losses.h"
#include "parallel.h"
#include "route_row.h"

namespace duomoe::cpu {
namespace {

DUOMOE_KERNEL(kCpu, scatter_weights) {
  const int64_t experts = call.axis('E'), top_k = call.axis('K');
  const Rows probs(call.out("probs"), experts);
  const DType dtype = call.out("probs").dtype;
  const int32_t* indices = call.in("indices").as<const int32_t>();
  const float* weights = call.in("weights").as<const float>();
  parallel_blocks(call, call.axis('T'), rows_per_task(experts), [&](int64_t begin, int64_t end) {
    std::vector<float> row(experts);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(row.begin(), row.end(), 0.0f);
      for (int64_t k = t * top_k; k < (t + 1) * top_k; ++k) {
        if (indices[k] >= 0 && indices[k] < experts) row[indices[k]] += weights[k];
      }
      simd().store(dtype, row.data(), probs[t], experts);
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, scatter_weights_bwd) {
  const int64_t experts = call.axis('E'), top_k = call.axis('K');
  const Rows grad_probs(call.in("grad_probs"), experts);
  const DType dtype = call.in("grad_probs").dtype;
  const auto size = static_cast<int64_t>(item_size(dtype));
  const int32_t* indices = call.in("indices").as<const int32_t>();
  float* grad_weights = call.out("grad_weights").as<float>();
  parallel_blocks(call, call.axis('T'), rows_per_task(top_k), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t k = t * top_k; k < (t + 1) * top_k; ++k) {
        const int32_t e = indices[k];
        grad_weights[k] = 0.0f;
        if (e >= 0 && e < experts) {
          simd().load(dtype, grad_probs[t] + e * size, grad_weights + k, 1);
        }
      }
    }
  });
  return {};
}

// mark(row, e) for every expert e of a token, on rows of `width` bytes that start as 0.
template <typename Mark>
void mark_rows(const Call& call, int64_t width, int64_t experts, Mark mark) {
  const int64_t top_k = call.axis('K');
  const int32_t* indices = call.in("indices").as<const int32_t>();
  uint8_t* map = call.out("routing_map").as<uint8_t>();
  parallel_blocks(call, call.axis('T'), rows_per_task(width), [&](int64_t begin, int64_t end) {
    std::memset(map + begin * width, 0, (end - begin) * width);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t k = t * top_k; k < (t + 1) * top_k; ++k) {
        if (indices[k] >= 0 && indices[k] < experts) mark(map + t * width, indices[k]);
      }
    }
  });
}

DUOMOE_KERNEL(kCpu, mark_experts) {
  const int64_t experts = call.axis('E');
  mark_rows(call, experts, experts, [](uint8_t* row, int32_t e) { row[e] = 1; });
  return {};
}

DUOMOE_KERNEL(kCpu, mark_expert_bits) {
  mark_rows(call, call.axis('B'), call.integer("num_experts"),
            [](uint8_t* row, int32_t e) { row[e / 8] |= static_cast<uint8_t>(1u << (e % 8)); });
  return {};
}

DUOMOE_KERNEL(kCpu, normalize_scores) {
  const int64_t experts = call.axis('E');
  const auto score = call.choice<math::Score>("score");
  const Rows logits(call.in("logits"), experts), scores(call.out("scores"), experts);
  const DType dtype = call.in("logits").dtype;
  parallel_blocks(call, call.axis('T'), rows_per_task(experts), [&](int64_t begin, int64_t end) {
    const int64_t n = padded(experts);
    Arena arena(RowArrays::kArrays + 1, n);
    RowArrays row(score, experts, /*with_slopes=*/false, arena);
    float* line = arena.take<float>(n);
    for (int64_t t = begin; t < end; ++t) {
      simd().row_scores(dtype, logits[t], row);
      std::fill_n(line, n, 0.0f);
      simd().add_shares(row.shares, row.share, n, line);
      std::memcpy(scores[t], line, scores.bytes);
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, normalize_scores_bwd) {
  const int64_t experts = call.axis('E');
  const auto score = call.choice<math::Score>("score");
  const Rows logits(call.in("logits"), experts), grad_scores(call.in("grad_scores"), experts),
      grad_logits(call.out("grad_logits"), experts);
  const DType dtype = call.in("logits").dtype;
  parallel_blocks(call, call.axis('T'), rows_per_task(experts), [&](int64_t begin, int64_t end) {
    const int64_t n = padded(experts);
    Arena arena(RowArrays::kArrays + 2, n);
    RowArrays row(score, experts, /*with_slopes=*/true, arena);
    float *grad_shares = arena.take<float>(n), *grad = arena.take<float>(n);
    std::fill_n(grad_shares, n, 0.0f);
    for (int64_t t = begin; t < end; ++t) {
      simd().row_scores(dtype, logits[t], row);
      std::memcpy(grad_shares, grad_scores[t], grad_scores.bytes);
      simd().row_gradient(row, grad_shares, /*softmax_factor=*/0.0f, /*rest=*/0.0f, grad);
      simd().store(dtype, grad, grad_logits[t], experts);
    }
  });
  return {};
}

// n of the loss: an array where the count is known on the device only.
float loss_tokens(const Call& call) {
  const TensorView& live = call.in("live_tokens");
  return live.present() ? *live.as<const float>() : static_cast<float>(call.integer("num_tokens"));
}

DUOMOE_KERNEL(kCpu, aux_loss) {
  constexpr int64_t kColumns = 64;  // of a task
  const int64_t tokens = call.axis('T'), columns = call.axis('N');
  const Rows probs(call.in("probs"), columns);
  const DType dtype = call.in("probs").dtype;
  const auto size = static_cast<int64_t>(item_size(dtype));
  const int64_t length = math::chunk_length(tokens);
  std::vector<float> sums(columns);
  // In the order of math/router.h, the tokens of the call being one sequence.
  parallel_blocks(call, columns, kColumns, [&](int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    float streams[math::kStreams][kColumns], strands[math::kStrands][kColumns] = {};
    float part[kColumns], line[kColumns];
    for (int64_t first = 0; first < tokens; first += length) {
      std::memset(streams, 0, sizeof streams);
      std::memset(part, 0, sizeof part);
      for (int64_t t = first; t < std::min(tokens, first + length); ++t) {
        simd().load(dtype, probs[t] + begin * size, line, n);
        simd().accumulate(line, n, streams[(t - first) % math::kStreams]);
      }
      for (const auto& stream : streams) simd().accumulate(stream, n, part);
      simd().accumulate(part, n, strands[first / length % math::kStrands]);
    }
    for (const auto& strand : strands) simd().accumulate(strand, n, sums.data() + begin);
  });
  const ScopedFpMode mode;
  *call.out("loss").as<float>() = math::aux_loss(
      call.in("expert_loads").as<const float>(), sums.data(), columns, loss_tokens(call),
      call.integer("num_experts"), call.integer("top_k"), call.real("coeff"));
  return {};
}

DUOMOE_KERNEL(kCpu, aux_loss_bwd) {
  const ScopedFpMode mode;
  const int64_t columns = call.axis('N');
  const float* loads = call.in("expert_loads").as<const float>();
  const float upstream = *call.in("grad_loss").as<const float>();
  const double factor =
      static_cast<double>(upstream) * call.real("coeff") *
      math::aux_loss_factor(loss_tokens(call), call.integer("num_experts"), call.integer("top_k"));
  std::vector<float> grad(columns);
  for (int64_t c = 0; c < columns; ++c) grad[c] = math::aux_loss_gradient(factor, loads[c]);
  simd().store(call.out("grad_probs").dtype, grad.data(), call.out("grad_probs").data, columns);
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
