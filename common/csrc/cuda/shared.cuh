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

// A barrier in shared memory, each phase of which ends with so many arrivals. What was written
// before them is seen after the wait.
__device__ inline void init_barrier(uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
__device__ inline void arrive_at_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
}
// Until the phase of this parity has ended, which is the current one or the one before.
__device__ inline void wait_for_barrier(uint64_t* barrier, unsigned parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DUOMOE_WAIT "try_wait"  // sleeps for a while
#else
#define DUOMOE_WAIT "test_wait"
#endif
  const uint32_t address = shared_address(barrier);
  for (uint32_t open = 0; !open;) {
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier." DUOMOE_WAIT
                 ".parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(open)
                 : "r"(address), "r"(parity)
                 : "memory");
  }
#undef DUOMOE_WAIT
}

}  // namespace duomoe::cuda
