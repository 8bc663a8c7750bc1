// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "../data_checks.h"

namespace duomoe::cuda {
namespace {

Status fetch(Executor& executor, const TensorView& view, void* host) {
  auto stream = static_cast<cudaStream_t>(executor.stream);
  const size_t bytes = view.size() * item_size(view.dtype);
  cudaError_t error = cudaMemcpyAsync(host, view.data, bytes, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  return error == cudaSuccess ? Status{} : Status{cudaGetErrorString(error)};
}

const bool registered = register_fetch(Backend::kCuda, fetch);

}  // namespace
}  // namespace duomoe::cuda
