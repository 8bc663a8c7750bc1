// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The selection's part of simd_loops.h, whose rules hold here. Keys are padded as simd.h says.
#pragma once

#include "simd_sums.h"

namespace duomoe::cpu {
namespace {

void selection_keys(const float* z, const float* chosen_on, const float* bias, int64_t experts,
                    uint32_t* __restrict keys) {
  const int64_t n = padded(experts);
  if (bias) {
    for_lanes(n, [&](int64_t i, int) {
      keys[i] = order_key(selection_value(z[i], chosen_on[i], bias[i]));
    });
  } else {
    for_lanes(
        n, [&](int64_t i, int) { keys[i] = order_key(selection_value(z[i], chosen_on[i], 0.0f)); });
  }
  for (int64_t i = experts; i < n; ++i) keys[i] = 0;
}

#if defined(__GNUC__) && !defined(__clang__)
// Everything that takes or returns a Block is inlined, so that its calling convention is moot.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

// 16 keys in vectors of whatever width there is; comparisons give -1 or 0 in each.
constexpr int kBlock = 16;
using Block = uint32_t __attribute__((vector_size(4 * kBlock)));
constexpr Block kEach = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

DUOMOE_INLINE Block load_block(const uint32_t* from) {
  Block block;
  __builtin_memcpy(&block, from, sizeof(block));
  return block;
}
DUOMOE_INLINE void store_block(const Block& block, void* to) {
  __builtin_memcpy(to, &block, sizeof(block));
}
DUOMOE_INLINE Block every(uint32_t x) { return x - Block{}; }
// Element i is element at[i] of a and b one after the other; `at` is constant.
DUOMOE_INLINE Block pick(const Block& a, const Block& b, const Block& at) {
#if defined(__clang__)
  Block result;
  for (int i = 0; i < kBlock; ++i) result[i] = at[i] < kBlock ? a[at[i]] : b[at[i] - kBlock];
  return result;
#else
  return __builtin_shuffle(a, b, at);
#endif
}
// ++count[i] where `where` is not 0.
template <typename Mask>
DUOMOE_INLINE void count_where(Block& count, const Mask& where) {
#if defined(__AVX512F__)
  count = where ? count + 1 : count;  // a masked addition
#else
  count -= where;
#endif
}
DUOMOE_INLINE Block larger(const Block& a, const Block& b) { return a > b ? a : b; }
DUOMOE_INLINE Block smaller(const Block& a, const Block& b) { return a < b ? a : b; }

// The k-th largest of the maxima of 16 kBlocks disjoint sets of keys: a lower bound of the k-th
// largest key. n is a multiple of kLanes, k <= 16 kBlocks <= n.
template <int kBlocks>
uint32_t bound_of_kth(const uint32_t* keys, int64_t n, int64_t k) {
  constexpr int kBins = kBlocks * kBlock;
  Block bin[kBlocks];
  for (int b = 0; b < kBlocks; ++b) bin[b] = load_block(keys + b * kBlock);
  for (int64_t i = kBins; i < n; i += kBins) {
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t at = i + b * kBlock;
      if (kBlocks <= 2 || at < n) bin[b] = larger(bin[b], load_block(keys + at));
    }
  }
  uint32_t bins[kBins];
  Block above[kBlocks] = {};
  for (int b = 0; b < kBlocks; ++b) store_block(bin[b], bins + b * kBlock);
  for (int j = 0; j < kBins; ++j) {
    const Block one = every(bins[j]);
    for (int b = 0; b < kBlocks; ++b) count_where(above[b], one > bin[b]);
  }
  const Block wanted = every(static_cast<uint32_t>(k));
  Block bound = ~Block{};
  for (int b = 0; b < kBlocks; ++b) {
    bound = smaller(bound, above[b] < wanted ? bin[b] : ~Block{});
  }
  bound = smaller(bound, pick(bound, bound, kEach ^ 8));
  bound = smaller(bound, pick(bound, bound, kEach ^ 4));
  bound = smaller(bound, pick(bound, bound, kEach ^ 2));
  return bound[0] < bound[1] ? bound[0] : bound[1];
}

// The positions of keys >= bound, ascending; returns how many. `positions` has room for n + kBlock.
int64_t positions_from(const uint32_t* keys, int64_t n, uint32_t bound, int32_t* positions) {
  int64_t count = 0;
#if defined(__AVX512F__)
  Block at = kEach;
  const __m512i least = _mm512_set1_epi32(static_cast<int>(bound));
  for (int64_t i = 0; i < n; i += kBlock, at += kBlock) {
    const __mmask16 mask = _mm512_cmpge_epu32_mask(_mm512_loadu_si512(keys + i), least);
    _mm512_storeu_si512(positions + count,
                        _mm512_maskz_compress_epi32(mask, reinterpret_cast<__m512i>(at)));
    count += __builtin_popcount(mask);
  }
#else
  for (int64_t i = 0; i < n; ++i) {
    positions[count] = static_cast<int32_t>(i);
    count += keys[i] >= bound;
  }
#endif
  return count;
}

// How many rank above each of key[b, b + kBlock) by (key descending, index ascending).
DUOMOE_INLINE Block places(const uint32_t* key, int64_t b, int64_t count) {
  const Block own = load_block(key + b);
  Block place = {};
  for (int64_t j = 0; j < b; ++j) count_where(place, every(key[j]) >= own);
#pragma GCC unroll 16
  for (int j = 0; j < kBlock; ++j) {
    const Block one = every(key[b + j]), later = kEach > every(j);
    count_where(place, (one > own) | ((one == own) & later));
  }
  for (int64_t j = b + kBlock; j < count; ++j) count_where(place, every(key[j]) > own);
  return place;
}

// Sorts count <= kMaxCandidates positions, which ascend, by (key descending, position ascending).
// `positions` and `order` have room for a multiple of kBlock.
void sort_positions(const uint32_t* keys, int64_t count, const int32_t* positions, int32_t* order) {
  uint32_t key[kMaxCandidates], place[kBlock];
  const int64_t n = (count + kBlock - 1) / kBlock * kBlock;
  for (int64_t i = 0; i < count; ++i) key[i] = keys[positions[i]];
  for (int64_t i = count; i < n; ++i) key[i] = 0;
  for (int64_t b = 0; b < n; b += kBlock) {
    store_block(places(key, b, count), place);
    for (int l = 0; l < kBlock; ++l) order[place[l]] = positions[b + l];
  }
}

bool top(const uint32_t* keys, int64_t n, int64_t k, int32_t* scratch, int32_t* ids) {
  int64_t count = n;
  if (n <= kBlock) {
    store_block(kEach, scratch);
  } else {
    const int64_t end = padded(n);
    const uint32_t bound = k <= 8      ? bound_of_kth<1>(keys, end, k)
                           : k <= 16   ? bound_of_kth<2>(keys, end, k)
                           : end <= 64 ? 0
                                       : bound_of_kth<4>(keys, end, k);
    count = positions_from(keys, end, bound, scratch);
    if (count > kMaxCandidates) return false;
  }
  int32_t order[kMaxCandidates];
  sort_positions(keys, count, scratch, order);
  for (int64_t i = 0; i < k; ++i) ids[i] = order[i];
  return true;
}

// The largest and the second largest of two such pairs become the first pair.
DUOMOE_INLINE void merge(Block& first, Block& second, const Block& other_first,
                         const Block& other_second) {
  second = larger(smaller(first, other_first), larger(second, other_second));
  first = larger(first, other_first);
}

// Pairs of neighbours in each of two arrays merged, so that n elements become n / 2. Past the end
// it makes numbers that nobody reads. In place.
void merge_neighbours(uint32_t* first, uint32_t* second, int64_t n) {
  constexpr Block kEven = 2 * kEach, kOdd = kEven + 1;
  for (int64_t i = 0; i < n; i += 2 * kBlock) {
    const Block a = load_block(first + i), b = load_block(first + i + kBlock);
    const Block c = load_block(second + i), d = load_block(second + i + kBlock);
    Block one = pick(a, b, kEven), two = pick(c, d, kEven);
    merge(one, two, pick(a, b, kOdd), pick(c, d, kOdd));
    store_block(one, first + i / 2);
    store_block(two, second + i / 2);
  }
}

void group_keys(const uint32_t* keys, int64_t groups, int64_t size, int64_t best, uint32_t* scratch,
                uint32_t* result) {
  uint32_t *first = scratch, *second = scratch + padded(groups * size) + kLanes;
  // Columns of a group, a power of two, that are merged pairwise in the end.
  int64_t width = kBlock;
  if (size >= kBlock) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint32_t* own = keys + g * size;
      Block one = load_block(own), two = {};
      int64_t i = kBlock;
      for (; i + kBlock <= size; i += kBlock) merge(one, two, load_block(own + i), Block{});
      if (i < size) {
        const Block inside = kEach < every(static_cast<uint32_t>(size - i));
        merge(one, two, load_block(own + i) & inside, Block{});
      }
      store_block(one, first + g * kBlock);
      store_block(two, second + g * kBlock);
    }
  } else {
    while (width > size) width /= 2;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t l = 0; l < width; ++l) {
        const uint32_t a = keys[g * size + l];
        const uint32_t b = width + l < size ? keys[g * size + width + l] : 0;
        first[g * width + l] = a > b ? a : b;
        second[g * width + l] = a > b ? b : a;
      }
    }
  }
  for (; width > 1; width /= 2) merge_neighbours(first, second, groups * width);
  for (int64_t g = 0; g < groups; ++g) {
    result[g] = best == 1 ? first[g] : order_key(value_of_key(first[g]) + value_of_key(second[g]));
  }
}

bool keep_groups(const uint32_t* keys, int64_t groups, int64_t size, int64_t best, int64_t kept,
                 uint32_t* scratch, uint32_t* kept_keys, int32_t* kept_ids) {
  if (groups > kMaxCandidates || best > 2) return false;
  uint32_t key[kMaxCandidates] = {}, place[kMaxCandidates];
  group_keys(keys, groups, size, best, scratch, key);
  for (int64_t b = 0; b < groups; b += kBlock) store_block(places(key, b, groups), place + b);
  uint32_t best_groups[kMaxCandidates + 1];
  int64_t found = 0;  // without a branch, which nothing could predict
  for (int64_t g = 0; g < groups; ++g) {
    best_groups[found] = static_cast<uint32_t>(g);
    found += static_cast<int64_t>(place[g]) < kept;
  }
  for (int64_t k = 0; k < kept; ++k) {
    for (int64_t i = 0; i < size; i += kBlock) {
      const uint32_t from = best_groups[k] * static_cast<uint32_t>(size) + static_cast<uint32_t>(i);
      store_block(load_block(keys + from), kept_keys + k * size + i);
      store_block(kEach + from, kept_ids + k * size + i);
    }
  }
  const int64_t count = kept * size;
  for (int64_t i = count; i < padded(count); ++i) kept_keys[i] = 0;
  return true;
}

}  // namespace
}  // namespace duomoe::cpu
