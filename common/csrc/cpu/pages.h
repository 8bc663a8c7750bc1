// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "../tensor_view.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace duomoe::cpu {

// Asks the kernel for huge pages under large outputs, whole pages of them alone. Frameworks take
// such memory anew for every call, and faulting it in by pages of 4 KiB takes longer than filling
// it. A hint, from the size on where NumPy gives it too; it does nothing where
// /sys/kernel/mm/transparent_hugepage/enabled says never.
inline void advise_huge_pages(std::span<const TensorView> outputs) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21, kLarge = uintptr_t{1} << 22;
  for (const TensorView& out : outputs) {
    if (!out.present()) continue;
    const uintptr_t bytes = static_cast<uintptr_t>(out.size()) * item_size(out.dtype);
    if (bytes < kLarge) continue;
    const auto begin = reinterpret_cast<uintptr_t>(out.data);
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    const uintptr_t last = (begin + bytes) / kPage * kPage;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace duomoe::cpu
