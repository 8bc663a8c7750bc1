// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The types that cross the border between a binding and the core: tensors as pointers with a shape,
// the status of a call, and the executor that lends the caller's threads, stream and
// workspace.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#if defined(__GNUC__)
#define DUOMOE_EXPORT __attribute__((visibility("default")))
#else
#define DUOMOE_EXPORT
#endif

namespace duomoe {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kInt32, kBool, kUInt8 };

constexpr size_t item_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kBool:
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

constexpr int kMaxRank = 4;

// A dense row-major tensor. An absent optional input has no data and rank -1.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = -1;
  std::array<int64_t, kMaxRank> shape{};

  bool present() const { return rank >= 0; }
  int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

struct Status {
  std::string message;
  bool ok() const { return message.empty(); }
};

// What the caller lends for one call. The core starts no thread, and keeps no
// memory but the products' scratch of each CPU thread (cpu/matmul.cc).
class Executor {
 public:
  virtual ~Executor() = default;
  // Runs task(0) .. task(count - 1), in any order, on the caller's threads; returns when all are
  // done.
  virtual void parallel_for(int64_t count, const std::function<void(int64_t)>& task) {
    for (int64_t i = 0; i < count; ++i) task(i);
  }
  // Device memory that lives until the call's work on `stream` is done, asked for once a call at
  // most; nullptr if there is none.
  virtual void* workspace([[maybe_unused]] int64_t bytes) { return nullptr; }
  void* stream = nullptr;
};

}  // namespace duomoe
