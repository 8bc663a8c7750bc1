// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "route_pairs.cuh"

namespace duomoe::cuda {

bool launch_route_vectors(Queue& queue, const Route& a, int64_t chunks) {
  const int lanes = std::min(kLanes, static_cast<int>(ceil_div(a.experts, kAdjacent)));
  if (a.experts > 4 * kColumns || a.top_k > lanes) return false;
  const bool grouped = !a.groups.all_stay();
  int group_shift = kNoGroups;
  if (grouped) {
    const int size = a.experts / a.groups.count;
    for (group_shift = 0; 1 << group_shift < size;) ++group_shift;
    if (size % kAdjacent != 0 || 1 << group_shift != size || size > kColumns ||
        a.groups.count > kLanes || a.groups.score_k > 2)
      return false;
  }
  const bool plain = a.experts % kColumns == 0 && a.whole_vectors && !a.mask && !a.given &&
                     !a.on_logit && !a.separate_loss_counts &&
                     a.options.score != Score::kSqrtSoftplus && a.dtype != DType::kFloat16;
  if (plain && a.options.eps <= 1.0f && a.experts <= kMaxPairExperts && a.top_k <= kHalf &&
      a.groups.count <= kHalf) {
    launch_route_pairs(queue, a, chunks, group_shift);
  } else if (plain && !grouped) {
    launch_plain_vectors(queue, a, chunks);
  } else {
    launch_vectors<VectorMode::kAny, Score::kSoftmax, Score::kSigmoid, Score::kSqrtSoftplus>(
        queue, a, chunks, group_shift);
  }
  return true;
}

}  // namespace duomoe::cuda
