// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "matmul.h"

#include <algorithm>
#include <vector>

namespace duomoe::cpu {
namespace {

constexpr int64_t kBlockColumns = 8 * kTileColumns;
constexpr int64_t kBlockRowsAbout = 96;

int64_t block_rows() {
  const int64_t tile = simd().tile_rows;
  return kBlockRowsAbout / tile * tile;
}

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The packed operands and the sums of one block, kept by each thread from one block to the next:
// allocating them anew costs more than a small product.
struct Scratch {
  std::vector<float> a, b, c, line;

  Scratch()
      : a(block_rows() * kTileDepth),
        b(kBlockColumns * kTileDepth),
        c(block_rows() * kBlockColumns),
        line(std::max<int64_t>({kTileDepth, block_rows(), kBlockColumns})) {}
};

void product_block(const Product& p, int64_t i0, int64_t j0, DType operand_dtype) {
  const SimdLoops& loops = simd();
  const int64_t tile_rows = loops.tile_rows;
  const int64_t rows = std::min(block_rows(), p.rows - i0),
                columns = std::min(kBlockColumns, p.columns - j0);
  const int64_t padded_rows = round_up(rows, tile_rows),
                padded_columns = round_up(columns, kTileColumns);
  thread_local Scratch scratch;
  float *a = scratch.a.data(), *b = scratch.b.data(), *c = scratch.c.data(),
        *line = scratch.line.data();
  std::fill(c, c + padded_rows * padded_columns, 0.0f);
  const auto at = [](const Matrix& m, int64_t i, int64_t j) {
    Matrix moved = m;
    moved.data +=
        (i * m.row_stride + j * m.column_stride) * static_cast<int64_t>(item_size(m.dtype));
    return moved;
  };
  for (int64_t k0 = 0; k0 < p.depth; k0 += kTileDepth) {
    const int64_t depth = std::min<int64_t>(kTileDepth, p.depth - k0);
    const Matrix ma = at(p.a, i0, k0), mb = at(p.b, k0, j0);
    const uint8_t* keep = p.keep ? p.keep + k0 : nullptr;
    loops.pack_rows(ma.dtype, operand_dtype, ma.data, ma.column_stride, ma.row_stride, depth, rows,
                    keep, line, a);
    loops.pack_columns(mb.dtype, operand_dtype, mb.data, mb.row_stride, mb.column_stride, depth,
                       columns, keep, line, b);
    for (int64_t j = 0; j < padded_columns; j += kTileColumns) {
      for (int64_t i = 0; i < padded_rows; i += tile_rows) {
        loops.product_tile(depth, a + i * depth, b + j * depth, c + i * padded_columns + j,
                           padded_columns);
      }
    }
  }
  if (p.bias) {
    loops.load(
        p.bias_dtype,
        static_cast<const char*>(p.bias) + j0 * static_cast<int64_t>(item_size(p.bias_dtype)), line,
        columns);
    for (int64_t i = 0; i < rows; ++i) loops.accumulate(line, columns, c + i * padded_columns);
  }
  for (int64_t i = 0; i < rows; ++i) {
    loops.store(p.c.dtype, c + i * padded_columns, at(p.c, i0 + i, j0).data, columns);
  }
}

}  // namespace

void run_products(const Call& call, const std::vector<Product>& products, DType operand_dtype) {
  struct Block {
    const Product* product;
    int64_t i, j;
  };
  std::vector<Block> blocks;
  for (const Product& p : products) {
    for (int64_t i = 0; i < p.rows; i += block_rows()) {
      for (int64_t j = 0; j < p.columns; j += kBlockColumns) blocks.push_back({&p, i, j});
    }
  }
  parallel_blocks(call, static_cast<int64_t>(blocks.size()), 1, [&](int64_t n, int64_t) {
    product_block(*blocks[n].product, blocks[n].i, blocks[n].j, operand_dtype);
  });
}

}  // namespace duomoe::cpu
