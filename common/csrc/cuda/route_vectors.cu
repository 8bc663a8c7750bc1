// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "route_pairs.cuh"

namespace duomoe::cuda {
namespace {

template <Score kScore>
auto kernel_of(int vectors) {
  static_assert(kMaxVectors == 3);
  return vectors == 1   ? route_vectors<1, kScore>
         : vectors == 2 ? route_vectors<2, kScore>
                        : route_vectors<3, kScore>;
}

void launch_vectors(Queue& queue, const Route& a, int64_t chunks, int group_shift) {
  const int padded = static_cast<int>(ceil_div(a.experts, kAdjacent)) * kAdjacent;
  const int vectors = static_cast<int>(ceil_div(a.experts, kColumns));
  const auto kernel = a.options.score == Score::kSoftmax ? kernel_of<Score::kSoftmax>(vectors)
                      : a.options.score == Score::kSigmoid
                          ? kernel_of<Score::kSigmoid>(vectors)
                          : kernel_of<Score::kSqrtSoftplus>(vectors);
  const size_t bytes = sizeof(float) * ((kStreams + 1) * padded + a.count_words());
  queue.launch(kernel, chunks, kStreams * kLanes, bytes, a, group_shift);
}

}  // namespace

bool launch_route_vectors(Queue& queue, const Route& a, int64_t chunks) {
  const int lanes = std::min(kLanes, static_cast<int>(ceil_div(a.experts, kAdjacent)));
  if (a.experts > kMaxVectors * kColumns || a.top_k > std::min(lanes, kMaxVectorSlots))
    return false;
  int group_shift = kNoGroups;
  if (!a.groups.all_stay()) {
    const int size = a.experts / a.groups.count;
    for (group_shift = 0; 1 << group_shift < size;) ++group_shift;
    if (size % kAdjacent != 0 || 1 << group_shift != size || size > kColumns ||
        a.groups.count > kLanes || a.groups.score_k > 2)
      return false;
  }
  const bool common = a.experts % kColumns == 0 && a.whole_vectors && !a.mask && !a.given &&
                      !a.on_logit && !a.separate_loss_counts && a.groups.count <= kHalf &&
                      a.options.score != Score::kSqrtSoftplus && a.options.eps <= 1.0f &&
                      a.dtype != DType::kFloat16;
  if (common) {
    launch_route_pairs(queue, a, chunks, group_shift);
  } else {
    launch_vectors(queue, a, chunks, group_shift);
  }
  return true;
}

}  // namespace duomoe::cuda
