// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <cstdint>
#include <memory>
#include <new>

namespace duomoe::cpu {

// Scratch arrays of 4-byte elements from one allocation, each at the start of a cache line. They
// are not initialised.
class Arena {
 public:
  // Room for `arrays` arrays of `length` elements.
  Arena(int64_t arrays, int64_t length)
      : size_(static_cast<size_t>(arrays) * bytes(length)),
        data_(static_cast<char*>(::operator new(size_, kLine))) {}

  template <typename T>
  T* take(int64_t length) {
    static_assert(sizeof(T) == 4);
    T* array = reinterpret_cast<T*>(data_.get() + used_);
    used_ += bytes(length);
    assert(used_ <= size_);
    return array;
  }

 private:
  static constexpr std::align_val_t kLine{64};
  static size_t bytes(int64_t length) { return (static_cast<size_t>(length) * 4 + 63) / 64 * 64; }

  struct Delete {
    void operator()(char* data) const { ::operator delete(data, kLine); }
  };
  size_t size_;
  std::unique_ptr<char, Delete> data_;
  size_t used_ = 0;
};

}  // namespace duomoe::cpu
