// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The device memory that a kernel needs beside its tensors. Its size is declared ahead of the call
// (DUOMOE_WORKSPACE in registry.h), from what is known of a call before it has data, so that a
// front end can lend it as one more result: a program that records calls to replay them keeps it
// alive.
#pragma once

#include <cstdint>

namespace duomoe {

constexpr int64_t kPieceAlignment = 256;

// What a piece of `count` elements takes of a workspace.
template <typename T>
constexpr int64_t piece_bytes(int64_t count) {
  if (count <= 0) return 0;
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

// Hands out what was lent, piece after piece.
class Workspace {
 public:
  Workspace() = default;
  Workspace(void* data, int64_t bytes) : data_(static_cast<char*>(data)), bytes_(bytes) {}

  // nullptr for no elements, and where fewer are left.
  template <typename T>
  T* take(int64_t count) {
    const int64_t bytes = piece_bytes<T>(count);
    if (bytes == 0 || bytes > bytes_ - taken_) return nullptr;
    taken_ += bytes;
    return reinterpret_cast<T*>(data_ + taken_ - bytes);
  }
  bool lent() const { return data_ != nullptr; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0, taken_ = 0;
};

}  // namespace duomoe
