// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace duomoe::cpu {

// Scratch arrays of 4-byte elements from one allocation, each at the start of a cache line. They
// are not initialised. With DUOMOE_GUARDED_ARENA each is an allocation of its exact size instead,
// so that a sanitizer sees an index past its end, and every bit of it is set: NaN, -1 or the
// largest key.
class Arena {
 public:
  // Room for `arrays` arrays of `length` elements; asking for more aborts.
  Arena(int64_t arrays, int64_t length) : size_(static_cast<size_t>(arrays) * bytes(length)) {}

  template <typename T>
  T* take(int64_t length) {
    static_assert(sizeof(T) == 4);
    [[maybe_unused]] const size_t start = used_;
    used_ += bytes(length);
    assert(used_ <= size_);
#if defined(DUOMOE_GUARDED_ARENA)
    const size_t exact = static_cast<size_t>(length) * sizeof(T);
    arrays_.push_back(allocate(exact));
    return static_cast<T*>(std::memset(arrays_.back().get(), 0xff, exact));
#else
    return reinterpret_cast<T*>(data_.get() + start);
#endif
  }

 private:
  static constexpr std::align_val_t kLine{64};
  static size_t bytes(int64_t length) { return (static_cast<size_t>(length) * 4 + 63) / 64 * 64; }

  struct Delete {
    void operator()(char* data) const { ::operator delete(data, kLine); }
  };
  using Memory = std::unique_ptr<char, Delete>;
  static Memory allocate(size_t size) {
    return Memory(static_cast<char*>(::operator new(size, kLine)));
  }

  size_t size_, used_ = 0;
#if defined(DUOMOE_GUARDED_ARENA)
  std::vector<Memory> arrays_;
#else
  Memory data_ = allocate(size_);
#endif
};

}  // namespace duomoe::cpu
