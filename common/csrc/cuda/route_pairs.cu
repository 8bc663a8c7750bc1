// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "route_pairs.cuh"

namespace duomoe::cuda {
namespace {

template <DType kDType, bool kGrouped>
void launch_dtype(Queue& queue, const Route& a, int64_t chunks, int group_shift) {
  const size_t bytes = sizeof(float) * (4 * kStreams + 2) * a.experts;
  const auto launch = [&](auto softmax, auto sigmoid) {
    const auto kernel = a.options.score == Score::kSoftmax ? softmax : sigmoid;
    queue.allow_shared(kernel, bytes);
    queue.launch(kernel, chunks, kStreams * kLanes, bytes, a, group_shift);
  };
  switch (a.experts / kColumns) {
    case 1:
      return launch(route_pairs<1, Score::kSoftmax, kDType, kGrouped>,
                    route_pairs<1, Score::kSigmoid, kDType, kGrouped>);
    case 2:
      return launch(route_pairs<2, Score::kSoftmax, kDType, kGrouped>,
                    route_pairs<2, Score::kSigmoid, kDType, kGrouped>);
    default:
      return launch(route_pairs<3, Score::kSoftmax, kDType, kGrouped>,
                    route_pairs<3, Score::kSigmoid, kDType, kGrouped>);
  }
}

}  // namespace

void launch_route_pairs(Queue& queue, const Route& a, int64_t chunks, int group_shift) {
  const bool grouped = !a.groups.all_stay();
  if (a.dtype == DType::kFloat32) {
    grouped ? launch_dtype<DType::kFloat32, true>(queue, a, chunks, group_shift)
            : launch_dtype<DType::kFloat32, false>(queue, a, chunks, group_shift);
  } else {
    grouped ? launch_dtype<DType::kBFloat16, true>(queue, a, chunks, group_shift)
            : launch_dtype<DType::kBFloat16, false>(queue, a, chunks, group_shift);
  }
}

}  // namespace duomoe::cuda
