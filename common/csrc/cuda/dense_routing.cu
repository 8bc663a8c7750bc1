// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Routing as [T, E] matrices, and the loss over a matrix of scores, with the CPU kernels' order of
// every sum.
#include "../math/losses.h"
#include "route_row.cuh"

namespace duomoe::cuda {
namespace {

using math::from_float;
using math::to_float;

constexpr int kThreads = 256;

template <typename F>
__global__ void for_each(int64_t n, const F f) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    f(i);
  }
}

// f(i) for i < n.
template <typename F>
void launch_each(Queue& queue, int64_t n, const F& f) {
  queue.launch(for_each<F>, grid_for(n, kThreads), kThreads, 0, n, f);
}

// The slots of T tokens by K; an id outside [0, experts) is an unused slot.
struct Slots {
  const int32_t* expert_of_slot;
  int64_t top_k, experts;

  // f(slot, expert) for the used slots of a token, in order.
  template <typename F>
  __device__ void for_token(int64_t t, F f) const {
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
      const int32_t e = expert_of_slot[slot];
      if (e >= 0 && e < experts) f(slot, e);
    }
  }
};

Slots slots_of(const Call& call, int64_t experts) {
  return {.expert_of_slot = call.in("indices").as<const int32_t>(),
          .top_k = call.axis('K'),
          .experts = experts};
}

template <typename T>
struct ScatterWeights {
  Slots slots;
  const float* weights;
  T* probs;

  __device__ void operator()(int64_t i) const {
    const int64_t column = i % slots.experts;
    float sum = 0.0f;
    slots.for_token(i / slots.experts, [&](int64_t slot, int32_t e) {
      if (e == column) sum += weights[slot];
    });
    probs[i] = from_float<T>(sum);
  }
};

DUOMOE_KERNEL(kCuda, scatter_weights) {
  const TensorView& probs = call.out("probs");
  Queue queue(call);
  with_type(probs.dtype, [&]<typename T>(T) {
    launch_each(queue, probs.size(),
                ScatterWeights<T>{.slots = slots_of(call, call.axis('E')),
                                  .weights = call.in("weights").as<const float>(),
                                  .probs = probs.as<T>()});
  });
  return queue.status();
}

template <typename T>
struct GatherGradients {
  Slots slots;
  const T* grad_probs;
  float* grad_weights;

  __device__ void operator()(int64_t slot) const {
    const int32_t e = slots.expert_of_slot[slot];
    grad_weights[slot] = e >= 0 && e < slots.experts
                             ? to_float(grad_probs[slot / slots.top_k * slots.experts + e])
                             : 0.0f;
  }
};

DUOMOE_KERNEL(kCuda, scatter_weights_bwd) {
  const TensorView &grad_probs = call.in("grad_probs"), &grad_weights = call.out("grad_weights");
  Queue queue(call);
  with_type(grad_probs.dtype, [&]<typename T>(T) {
    launch_each(queue, grad_weights.size(),
                GatherGradients<T>{.slots = slots_of(call, call.axis('E')),
                                   .grad_probs = grad_probs.as<const T>(),
                                   .grad_weights = grad_weights.as<float>()});
  });
  return queue.status();
}

struct MarkExperts {
  Slots slots;
  uint8_t* map;

  __device__ void operator()(int64_t i) const {
    const int64_t column = i % slots.experts;
    uint8_t mark = 0;
    slots.for_token(i / slots.experts, [&](int64_t, int32_t e) {
      if (e == column) mark = 1;
    });
    map[i] = mark;
  }
};

DUOMOE_KERNEL(kCuda, mark_experts) {
  const TensorView& map = call.out("routing_map");
  Queue queue(call);
  launch_each(queue, map.size(),
              MarkExperts{.slots = slots_of(call, call.axis('E')), .map = map.as<uint8_t>()});
  return queue.status();
}

struct MarkExpertBits {
  Slots slots;
  int64_t num_bytes;  // of a token
  uint8_t* map;

  __device__ void operator()(int64_t i) const {
    const int64_t byte = i % num_bytes;
    unsigned marks = 0;
    slots.for_token(i / num_bytes, [&](int64_t, int32_t e) {
      if (e / 8 == byte) marks |= 1u << (e % 8);
    });
    map[i] = static_cast<uint8_t>(marks);
  }
};

DUOMOE_KERNEL(kCuda, mark_expert_bits) {
  const TensorView& map = call.out("routing_map");
  Queue queue(call);
  launch_each(queue, map.size(),
              MarkExpertBits{.slots = slots_of(call, call.integer("num_experts")),
                             .num_bytes = call.axis('B'),
                             .map = map.as<uint8_t>()});
  return queue.status();
}

struct NormalizeScores {
  Score score;
  int64_t tokens;
  int experts;
  DType dtype;
  const char* logits;
  const float* grad_scores = nullptr;  // of the backward
  void* result;                        // scores or grad_logits

  __device__ Row row(int64_t t, float* s) const {
    return {.score = score,
            .experts = experts,
            .z = {dtype, logits + t * experts * item_bytes(dtype)},
            .s = s};
  }
};

// One warp per token.
__global__ void __launch_bounds__(kMaxWarps* kLanes) normalize_rows(const NormalizeScores a) {
  extern __shared__ float shared_memory[];
  const int64_t t = grid_warp();
  if (t >= a.tokens) return;
  Row row = a.row(t, shared_memory + warp_id() * a.experts);
  row.compute();
  float* scores = static_cast<float*>(a.result) + t * a.experts;
  for (int e = lane_id(); e < a.experts; e += kLanes) scores[e] = row.probability(e);
}

__global__ void __launch_bounds__(kMaxWarps* kLanes) normalize_rows_bwd(const NormalizeScores a) {
  extern __shared__ float shared_memory[];
  const int64_t t = grid_warp();
  if (t >= a.tokens) return;
  float* mine = shared_memory + warp_id() * (2 * a.experts);
  Row row = a.row(t, mine);
  float* grad = mine + a.experts;
  row.compute();
  row.probability_gradient(a.grad_scores + t * a.experts, grad);
  for (int e = lane_id(); e < a.experts; e += kLanes)
    store(a.dtype, grad[e], a.result, t * a.experts + e);
}

DUOMOE_KERNEL(kCuda, normalize_scores) {
  const int64_t experts = call.axis('E');
  const NormalizeScores a{.score = call.choice<Score>("score"),
                          .tokens = call.axis('T'),
                          .experts = static_cast<int>(experts),
                          .dtype = call.in("logits").dtype,
                          .logits = call.in("logits").as<const char>(),
                          .result = call.out("scores").data};
  Queue queue(call);
  return launch_tokens(queue, normalize_rows, a.tokens, experts, experts, a);
}

DUOMOE_KERNEL(kCuda, normalize_scores_bwd) {
  const int64_t experts = call.axis('E');
  const NormalizeScores a{.score = call.choice<Score>("score"),
                          .tokens = call.axis('T'),
                          .experts = static_cast<int>(experts),
                          .dtype = call.in("logits").dtype,
                          .logits = call.in("logits").as<const char>(),
                          .grad_scores = call.in("grad_scores").as<const float>(),
                          .result = call.out("grad_logits").data};
  Queue queue(call);
  return launch_tokens(queue, normalize_rows_bwd, a.tokens, experts, 2 * experts, a);
}

// What both directions of the loss multiply its sum with: coeff * E / (K n^2).
struct LossScale {
  const float* live_tokens;  // null: num_tokens
  int64_t num_tokens, experts, top_k;
  double coeff;

  __device__ double factor() const {
    const float tokens = live_tokens ? *live_tokens : static_cast<float>(num_tokens);
    return math::aux_loss_factor(tokens, experts, top_k);
  }
};

LossScale scale_of(const Call& call) {
  const TensorView& live = call.in("live_tokens");
  return {.live_tokens = live.present() ? live.as<const float>() : nullptr,
          .num_tokens = call.integer("num_tokens"),
          .experts = call.integer("num_experts"),
          .top_k = call.integer("top_k"),
          .coeff = call.real("coeff")};
}

// partials[chunk][c] = the chunk's streams of math/router.h, joined in order.
template <typename T>
struct SumChunks {
  const T* probs;
  int64_t tokens, columns, chunk_length;
  float* partials;

  __device__ void operator()(int64_t i) const {
    const int64_t c = i % columns, begin = i / columns * chunk_length;
    const int64_t end = begin + chunk_length < tokens ? begin + chunk_length : tokens;
    float streams[kStreams] = {};
    for (int64_t first = begin; first < end; first += kStreams) {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        if (first + j < end) streams[j] += to_float(probs[(first + j) * columns + c]);
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) sum += streams[j];
    partials[i] = sum;
  }
};

// sums[c] = the chunks' partials, in the strands of math/router.h.
struct JoinChunks {
  const float* partials;
  int64_t chunks, columns;
  float* sums;

  __device__ void operator()(int64_t c) const {
    float strands[math::kStrands] = {};
    for (int64_t first = 0; first < chunks; first += math::kStrands) {
#pragma unroll
      for (int i = 0; i < math::kStrands; ++i) {
        if (first + i < chunks) strands[i] += partials[(first + i) * columns + c];
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < math::kStrands; ++i) sum += strands[i];
    sums[c] = sum;
  }
};

// One warp.
__global__ void sum_aux_loss(LossScale scale, int64_t columns, const float* loads,
                             const float* sums, float* loss) {
  const double sum = lane_sum(columns, [=](int64_t c) {
    return static_cast<double>(loads[c]) * static_cast<double>(sums[c]);
  });
  if (lane_id() == 0) *loss = math::scaled_aux_loss(scale.coeff, scale.factor(), sum);
}

DUOMOE_WORKSPACE(kCuda, aux_loss) {
  const int64_t tokens = call.axis('T'), columns = call.axis('N');
  const int64_t chunks = ceil_div(tokens, math::chunk_length(tokens));
  return piece_bytes<float>(chunks * columns) + piece_bytes<float>(columns);
}

DUOMOE_KERNEL(kCuda, aux_loss) {
  const int64_t tokens = call.axis('T'), columns = call.axis('N');
  const int64_t length = math::chunk_length(tokens), chunks = ceil_div(tokens, length);
  const TensorView& probs = call.in("probs");
  Queue queue(call);
  float* partials = queue.scratch<float>(chunks * columns);
  float* sums = queue.scratch<float>(columns);
  with_type(probs.dtype, [&]<typename T>(T) {
    launch_each(queue, chunks * columns,
                SumChunks<T>{.probs = probs.as<const T>(),
                             .tokens = tokens,
                             .columns = columns,
                             .chunk_length = length,
                             .partials = partials});
  });
  launch_each(queue, columns,
              JoinChunks{.partials = partials, .chunks = chunks, .columns = columns, .sums = sums});
  queue.launch(sum_aux_loss, 1, kLanes, 0, scale_of(call), columns,
               call.in("expert_loads").as<const float>(), sums, call.out("loss").as<float>());
  return queue.status();
}

struct SpreadAuxLoss {
  LossScale scale;
  const float* loads;
  const float* grad_loss;
  DType dtype;
  void* grad_probs;

  __device__ void operator()(int64_t c) const {
    const double factor = static_cast<double>(*grad_loss) * scale.coeff * scale.factor();
    store(dtype, math::aux_loss_gradient(factor, loads[c]), grad_probs, c);
  }
};

DUOMOE_KERNEL(kCuda, aux_loss_bwd) {
  const TensorView& grad_probs = call.out("grad_probs");
  Queue queue(call);
  launch_each(queue, call.axis('N'),
              SpreadAuxLoss{.scale = scale_of(call),
                            .loads = call.in("expert_loads").as<const float>(),
                            .grad_loss = call.in("grad_loss").as<const float>(),
                            .dtype = grad_probs.dtype,
                            .grad_probs = grad_probs.data});
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
