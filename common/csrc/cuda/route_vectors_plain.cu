// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "route_vectors.cuh"

namespace duomoe::cuda {

void launch_plain_vectors(Queue& queue, const Route& a, int64_t chunks) {
  if (a.dtype == DType::kFloat32) {
    launch_vectors<VectorMode::kPlainFloat32, Score::kSoftmax, Score::kSigmoid>(queue, a, chunks,
                                                                                kNoGroups);
  } else {
    launch_vectors<VectorMode::kPlainBFloat16, Score::kSoftmax, Score::kSigmoid>(queue, a, chunks,
                                                                                 kNoGroups);
  }
}

}  // namespace duomoe::cuda
