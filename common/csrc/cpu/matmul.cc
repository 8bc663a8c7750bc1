// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#include "matmul.h"

#include <cstring>
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

// packed[tile][k][within tile] from element (k, i) of a matrix with strides along depth and along the tile
// axis; past `extent` it is 0. `line` is scratch for one contiguous run.
void pack(const Matrix& m, int64_t depth_stride, int64_t tile_stride, int64_t depth, int64_t extent, int64_t tile,
          DType operand_dtype, std::vector<float>& line, float* packed) {
  const SimdLoops& loops = simd();
  const auto size = static_cast<int64_t>(item_size(m.dtype));
  const int64_t padded = round_up(extent, tile);
  if (padded != extent) {
    std::memset(packed + (padded - tile) * depth, 0, sizeof(float) * tile * depth);
  }
  auto load = [&](int64_t offset, int64_t n) {
    loops.load(m.dtype, m.data + offset * size, line.data(), n);
    loops.round_to(operand_dtype, line.data(), n);
  };
  if (tile_stride == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      load(k * depth_stride, extent);
      for (int64_t i = 0; i < extent; i += tile) {
        std::memcpy(packed + i * depth + k * tile, line.data() + i, sizeof(float) * std::min(tile, extent - i));
      }
    }
    return;
  }
  for (int64_t i = 0; i < extent; ++i) {  // depth_stride == 1
    load(i * tile_stride, depth);
    float* to = packed + i / tile * tile * depth + i % tile;
    for (int64_t k = 0; k < depth; ++k) to[k * tile] = line[k];
  }
}

void product_block(const Product& p, int64_t i0, int64_t j0, DType operand_dtype) {
  const SimdLoops& loops = simd();
  const int64_t tile_rows = loops.tile_rows;
  const int64_t rows = std::min(block_rows(), p.rows - i0), columns = std::min(kBlockColumns, p.columns - j0);
  const int64_t padded_rows = round_up(rows, tile_rows), padded_columns = round_up(columns, kTileColumns);
  std::vector<float> c(padded_rows * padded_columns, 0.0f);
  std::vector<float> a(padded_rows * kTileDepth), b(padded_columns * kTileDepth);
  std::vector<float> line(std::max<int64_t>({kTileDepth, padded_rows, padded_columns}));
  const auto at = [](const Matrix& m, int64_t i, int64_t j) {
    Matrix moved = m;
    moved.data += (i * m.row_stride + j * m.column_stride) * static_cast<int64_t>(item_size(m.dtype));
    return moved;
  };
  for (int64_t k0 = 0; k0 < p.depth; k0 += kTileDepth) {
    const int64_t depth = std::min<int64_t>(kTileDepth, p.depth - k0);
    pack(at(p.a, i0, k0), p.a.column_stride, p.a.row_stride, depth, rows, tile_rows, operand_dtype, line, a.data());
    pack(at(p.b, k0, j0), p.b.row_stride, p.b.column_stride, depth, columns, kTileColumns, operand_dtype, line,
         b.data());
    for (int64_t j = 0; j < padded_columns; j += kTileColumns) {
      for (int64_t i = 0; i < padded_rows; i += tile_rows) {
        loops.product_tile(depth, a.data() + i * depth, b.data() + j * depth, c.data() + i * padded_columns + j,
                           padded_columns);
      }
    }
  }
  if (p.bias) {
    loops.load(p.bias_dtype, static_cast<const char*>(p.bias) + j0 * static_cast<int64_t>(item_size(p.bias_dtype)),
               line.data(), columns);
    for (int64_t i = 0; i < rows; ++i) loops.accumulate(line.data(), columns, c.data() + i * padded_columns);
  }
  for (int64_t i = 0; i < rows; ++i) {
    loops.store(p.c.dtype, c.data() + i * padded_columns, at(p.c, i0 + i, j0).data, columns);
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
