// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The one declaration of every op. From it derive the checks of shapes and dtypes, the torch
// schemas, fake kernels and autograd, the JAX abstract values, gradients and sharding rules, and
// the op reference.
//
// Axis letters: T tokens, E experts, K experts per token, D model width, N width of a product,
// F expert hidden width, R permuted rows, S sequences, B bins or bytes, C chunks,
// W = 2 E + 1 columns of a row map.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensor_view.h"

namespace duomoe {

// `axes` is a list of axis letters ("T E", "E+1", "" for a scalar).
// `dtype` is a fixed type ("float32", "int32", "bool", "uint8"), a variable that is any float type
// and the same wherever it stands in one op ("<x>"), or the value of a dtype attribute
// ("@gate_dtype").
struct TensorSpec {
  std::string name;
  std::string axes;
  std::string dtype;
  bool optional = false;
};

enum class AttributeKind { kInt, kFloat, kChoice };

// A static option. A choice is passed by its name and reaches a kernel as its position in
// `choices`.
struct AttributeSpec {
  std::string name;
  AttributeKind kind;
  std::vector<std::string> choices = {};
  int64_t minimum = 0;        // of an int
  std::string axis = "";      // the axis letter whose length this attribute gives
  std::string dtype_of = "";  // a backward op's dtype: that of the forward input of this name
};

// The gradient of an op is the union of its backward ops' outputs. A backward op's tensors are
// matched by name: `grad_y` is the cotangent of output y or the gradient of input y, any other name
// is an input or output of the forward op, kept for the backward pass; attributes are the forward
// op's of the same name. A gradient that lacks the leading axes of its input is the same along them
// and is broadcast.
struct OpSpec {
  std::string name;
  std::string summary;
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  std::vector<AttributeSpec> attributes;
  std::vector<std::string> backward = {};
  // Axes along which the op may be sharded: slices are independent, and an output without the axis
  // is the sum over them. All other axes are needed whole.
  std::string shard_axes = "";
};

DUOMOE_EXPORT const std::vector<OpSpec>& op_table();
DUOMOE_EXPORT int op_index(std::string_view name);  // -1 if there is none

// The dtype names of dtype attributes, in the order of DType.
const std::vector<std::string>& float_dtypes();

std::string op_table_json();

}  // namespace duomoe
