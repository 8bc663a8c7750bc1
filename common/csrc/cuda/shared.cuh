// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory by address, which stays in a register.
#pragma once

#include <cstdint>

namespace duomoe::cuda {

__device__ inline uint32_t shared_address(const void* data) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(data));
  asm volatile("" : "+r"(address));
  return address;
}
__device__ inline void store_shared(uint32_t address, uint64_t x) {
  asm volatile("st.shared.u64 [%0], %1;" : : "r"(address), "l"(x) : "memory");
}
__device__ inline uint64_t load_shared(uint32_t address) {
  uint64_t x;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  return x;
}
__device__ inline ulonglong2 load_shared_pair(uint32_t address) {
  ulonglong2 x;
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(x.x), "=l"(x.y) : "r"(address) : "memory");
  return x;
}

}  // namespace duomoe::cuda
