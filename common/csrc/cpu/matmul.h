// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// C = A B in float32 for operands of any float type and any strides, in tasks of one block of C
// each.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace duomoe::cpu {

// Element (i, j) of a matrix lies at data[i * row_stride + j * column_stride].
struct Matrix {
  char* data;
  DType dtype;
  int64_t row_stride, column_stride;

  Matrix(const TensorView& view, int64_t offset, int64_t rows, int64_t columns)
      : data(view.as<char>() + offset * static_cast<int64_t>(item_size(view.dtype))),
        dtype(view.dtype),
        row_stride(rows),
        column_stride(columns) {}
};

// One product C[rows, columns] = A[rows, depth] B[depth, columns] of a batch.
struct Product {
  Matrix a, b, c;
  int64_t rows, columns, depth;
  const void* bias = nullptr;  // [columns], added in float32 before the result is rounded
  DType bias_dtype = DType::kFloat32;
  const uint8_t* keep = nullptr;  // [depth]; where it is 0, that depth of A and B counts as zero
};

// Runs the products. Operands are first rounded to `operand_dtype`. A sum over depth is taken in
// blocks of kTileDepth, each in order from 0, which are then added in order: the same bits for any
// number of threads.
void run_products(const Call& call, const std::vector<Product>& products, DType operand_dtype);

}  // namespace duomoe::cpu
