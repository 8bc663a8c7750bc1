// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "matmul.h"

#include <algorithm>
#include <vector>

namespace duomoe::cpu {
namespace {

// A task makes a block of C of up to kBlockRowsAbout rows: it packs B once per depth block, and A
// in panels of kPanelRowsAbout rows. Packed B and a panel of A stay in a second-level cache.
constexpr int64_t kBlockColumns = 8 * kTileColumns;
constexpr int64_t kBlockRowsAbout = 768;
constexpr int64_t kPanelRowsAbout = 96;
// Blocks of fewer rows where there would be fewer tasks than this.
constexpr int64_t kTasksWanted = 64;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The packed operands and, where C is not float32, the sums of one block, kept by each thread from
// one block to the next: allocating them anew costs more than a small product.
struct Scratch {
  std::vector<float> a, b, c, line;

  Scratch()
      : a(round_up(kPanelRowsAbout, simd().tile_rows) * kTileDepth),
        b(kBlockColumns * kTileDepth),
        line(kPackLine) {}
};

struct Block {
  const Product* product;
  int64_t i, rows, j, columns;
};

Matrix at(const Matrix& m, int64_t i, int64_t j) {
  Matrix moved = m;
  moved.data += (i * m.row_stride + j * m.column_stride) * static_cast<int64_t>(item_size(m.dtype));
  return moved;
}

// c (+)= a b for packed operands of at most a panel of rows.
void product_panel(int64_t depth, int64_t rows, int64_t columns, const float* a, const float* b,
                   float* c, int64_t c_stride, bool add) {
  const SimdLoops& loops = simd();
  for (int64_t j = 0; j < columns; j += kTileColumns) {
    const int64_t width = std::min<int64_t>(kTileColumns, columns - j);
    for (int64_t i = 0; i < rows; i += loops.tile_rows) {
      const int height = static_cast<int>(std::min<int64_t>(loops.tile_rows, rows - i));
      float* to = c + i * c_stride + j;
      if (width == kTileColumns) {
        loops.product_tile(depth, height, a + i * depth, b + j * depth, kTileColumns, to, c_stride,
                           add);
        continue;
      }
      float tile[kMostTileRows * kTileColumns];
      loops.product_tile(depth, height, a + i * depth, b + j * depth, kTileColumns, tile,
                         kTileColumns, false);
      for (int64_t row = 0; row < height; ++row, to += c_stride) {
        const float* from = tile + row * kTileColumns;
        if (add) {
          loops.accumulate(from, width, to);
        } else {
          std::copy(from, from + width, to);
        }
      }
    }
  }
}

void product_block(const Block& block, DType operand_dtype) {
  const SimdLoops& loops = simd();
  const auto& [product, i0, rows, j0, columns] = block;
  const Product& p = *product;
  thread_local Scratch scratch;
  float *a = scratch.a.data(), *b = scratch.b.data(), *line = scratch.line.data();
  // The sums: in C itself if it is float32.
  const bool direct = p.c.dtype == DType::kFloat32;
  const int64_t c_stride = direct ? p.c.row_stride : columns;
  if (!direct && static_cast<int64_t>(scratch.c.size()) < rows * columns) {
    scratch.c.resize(rows * columns);
  }
  float* c = direct ? reinterpret_cast<float*>(at(p.c, i0, j0).data) : scratch.c.data();
  const int64_t panel_rows = kPanelRowsAbout / loops.tile_rows * loops.tile_rows;
  auto finish = [&](int64_t begin, int64_t end) {
    if (p.bias) {
      const auto offset = j0 * static_cast<int64_t>(item_size(p.bias_dtype));
      loops.load(p.bias_dtype, static_cast<const char*>(p.bias) + offset, line, columns);
      for (int64_t i = begin; i < end; ++i) loops.accumulate(line, columns, c + i * c_stride);
    }
    for (int64_t i = begin; i < end && !direct; ++i) {
      loops.store(p.c.dtype, c + i * c_stride, at(p.c, i0 + i, j0).data, columns);
    }
  };
  for (int64_t k0 = 0; k0 < p.depth; k0 += kTileDepth) {
    const int64_t depth = std::min<int64_t>(kTileDepth, p.depth - k0);
    const uint8_t* keep = p.keep ? p.keep + k0 : nullptr;
    const Matrix mb = at(p.b, k0, j0);
    loops.pack_columns(mb.dtype, operand_dtype, mb.data, mb.row_stride, mb.column_stride, depth,
                       columns, keep, line, b);
    for (int64_t i = 0; i < rows; i += panel_rows) {
      const int64_t height = std::min(panel_rows, rows - i);
      const Matrix ma = at(p.a, i0 + i, k0);
      loops.pack_rows(ma.dtype, operand_dtype, ma.data, ma.column_stride, ma.row_stride, depth,
                      height, keep, line, a);
      product_panel(depth, height, columns, a, b, c + i * c_stride, c_stride, k0 > 0);
      if (k0 + depth == p.depth) finish(i, i + height);
    }
  }
  if (p.depth == 0) {
    for (int64_t i = 0; i < rows; ++i) std::fill_n(c + i * c_stride, columns, 0.0f);
    finish(0, rows);
  }
}

std::vector<Block> blocks_of(const std::vector<Product>& products, int64_t most_rows) {
  const int64_t tile = simd().tile_rows;
  std::vector<Block> blocks;
  for (const Product& p : products) {
    if (p.rows == 0) continue;
    // Of equal size, so that none has few rows.
    const int64_t count = (p.rows + most_rows - 1) / most_rows;
    const int64_t height = round_up((p.rows + count - 1) / count, tile);
    for (int64_t i = 0; i < p.rows; i += height) {
      for (int64_t j = 0; j < p.columns; j += kBlockColumns) {
        blocks.push_back(
            {&p, i, std::min(height, p.rows - i), j, std::min(kBlockColumns, p.columns - j)});
      }
    }
  }
  return blocks;
}

}  // namespace

void run_products(const Call& call, const std::vector<Product>& products, DType operand_dtype) {
  int64_t most_rows = kBlockRowsAbout;
  std::vector<Block> blocks = blocks_of(products, most_rows);
  while (std::ssize(blocks) < kTasksWanted && most_rows > kPanelRowsAbout) {
    blocks = blocks_of(products, most_rows /= 2);
  }
  parallel_tasks(call, std::ssize(blocks),
                 [&](int64_t n) { product_block(blocks[n], operand_dtype); });
}

}  // namespace duomoe::cpu
