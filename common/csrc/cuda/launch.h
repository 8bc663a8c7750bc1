// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// What all CUDA kernels share: work queued on the caller's stream, with its errors; elements of any
// float type. Nothing here waits for the device or allocates, so that every op can be captured in a
// CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "../math/scalar.h"
#include "../registry.h"

namespace duomoe::cuda {

inline int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

// Blocks for a kernel that strides over the grid, and so takes any number of them.
inline int64_t grid_for(int64_t items, int64_t per_block) {
  return std::min<int64_t>(ceil_div(items, per_block), 1 << 20);
}

// Whether every architecture of the build has clusters of blocks.
constexpr bool built_for_clusters() {
#ifdef __CUDA_ARCH_LIST__
  for (int arch : {__CUDA_ARCH_LIST__}) {
    if (arch < 900) return false;
  }
  return true;
#else
  return false;
#endif
}

// The work of one call, in stream order; one per call, for it hands out the workspace. The first
// error stays; what comes after it is skipped.
class Queue {
 public:
  explicit Queue(const Call& call)
      : stream_(static_cast<cudaStream_t>(call.executor.stream)), workspace_(call.workspace) {}

  // No blocks, no launch.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
              const Arguments&... arguments) {
    if (!status_.ok() || blocks <= 0) return;
    if (blocks > std::numeric_limits<int32_t>::max()) {
      status_ = {"needs a grid of " + std::to_string(blocks) + " blocks, more than CUDA has"};
      return;
    }
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream_>>>(arguments...);
    check(cudaGetLastError());
  }

  // Launches one cluster of blocks, of which there may be more than the portable 8; false, and
  // nothing is launched, where the device cannot. A kernel always has the same blocks and threads.
  template <typename... Parameters, typename... Arguments>
  bool launch_cluster(void (*kernel)(Parameters...), int blocks, int threads,
                      const Arguments&... arguments) {
    if (!built_for_clusters() || !status_.ok()) return false;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream_;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (!cluster_fits(reinterpret_cast<const void*>(kernel), config)) return false;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
    return true;
  }

  // Sets every byte.
  void fill(void* data, int byte, int64_t bytes) {
    if (status_.ok() && bytes > 0)
      check(cudaMemsetAsync(data, byte, static_cast<size_t>(bytes), stream_));
  }
  void fill(const TensorView& view, int byte) {
    fill(view.data, byte, view.size() * static_cast<int64_t>(item_size(view.dtype)));
  }

  // A piece of the call's workspace. nullptr for no elements, and after an error.
  template <typename T>
  T* scratch(int64_t count) {
    if (!status_.ok() || count <= 0) return nullptr;
    T* piece = workspace_.take<T>(count);
    if (!piece) {
      status_ = {"takes more scratch memory than the " + std::to_string(workspace_.bytes()) +
                 " bytes of its DUOMOE_WORKSPACE"};
    }
    return piece;
  }

  // The most shared memory that a block of this device may ask for; 0 after an error.
  size_t shared_limit() {
    int device = 0, bytes = 0;
    if (status_.ok()) check(cudaGetDevice(&device));
    if (status_.ok())
      check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return status_.ok() ? static_cast<size_t>(bytes) : 0;
  }

  int64_t multiprocessors() {
    int device = 0, count = 1;
    if (status_.ok()) check(cudaGetDevice(&device));
    if (status_.ok()) check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }

  // Lets a kernel be launched with up to `bytes` of dynamic shared memory; 48 KB need no leave. The
  // runtime is asked once per kernel and device.
  template <typename... Parameters>
  void allow_shared(void (*kernel)(Parameters...), size_t bytes) {
    struct Allowed {
      const void* kernel;
      int device;
      size_t bytes;
    };
    static std::mutex mutex;
    static std::vector<Allowed> allowed;
    int device = 0;
    if (status_.ok()) check(cudaGetDevice(&device));
    if (!status_.ok()) return;
    const void* function = reinterpret_cast<const void*>(kernel);
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Allowed& a : allowed) {
      if (a.kernel == function && a.device == device && a.bytes >= bytes) return;
    }
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)));
    if (status_.ok()) allowed.push_back({function, device, bytes});
  }

  const Status& status() const { return status_; }

 private:
  // Whether the device can hold the cluster; the runtime is asked once per kernel and device.
  bool cluster_fits(const void* kernel, const cudaLaunchConfig_t& config) {
    struct Answer {
      const void* kernel;
      int device;
      bool fits;
    };
    static std::mutex mutex;
    static std::vector<Answer> answers;
    int device = 0;
    check(cudaGetDevice(&device));
    if (!status_.ok()) return false;
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Answer& a : answers) {
      if (a.kernel == kernel && a.device == device) return a.fits;
    }
    int clusters = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      clusters = 0;
      cudaGetLastError();  // the failure is no error of the call
    }
    answers.push_back({kernel, device, clusters > 0});
    return clusters > 0;
  }

  void check(cudaError_t error) {
    if (error != cudaSuccess) status_ = {std::string("CUDA error: ") + cudaGetErrorString(error)};
  }

  cudaStream_t stream_;
  Workspace workspace_;
  Status status_;
};

// f(T{}) with the C++ type of a float dtype.
template <typename F>
auto with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(math::BFloat16{});
    case DType::kFloat16:
      return f(math::Float16{});
    default:
      return f(float{});
  }
}

__host__ __device__ inline int64_t item_bytes(DType float_dtype) {
  return float_dtype == DType::kFloat32 ? 4 : 2;
}

__device__ inline float load(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return math::to_float(static_cast<const math::BFloat16*>(data)[i]);
    case DType::kFloat16:
      return math::to_float(static_cast<const math::Float16*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

__device__ inline void store(DType dtype, float x, void* data, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return math::convert(x, static_cast<math::BFloat16*>(data)[i]);
    case DType::kFloat16:
      return math::convert(x, static_cast<math::Float16*>(data)[i]);
    default:
      return math::convert(x, static_cast<float*>(data)[i]);
  }
}

// Rounds to a 16-bit type and back; leaves float32 alone.
__device__ inline float round_to(DType dtype, float x) {
  switch (dtype) {
    case DType::kBFloat16:
      return math::to_float(math::from_float<math::BFloat16>(x));
    case DType::kFloat16:
      return math::to_float(math::from_float<math::Float16>(x));
    default:
      return x;
  }
}

}  // namespace duomoe::cuda
