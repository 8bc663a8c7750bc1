// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// The experts' products and the gate's, and their gradients: float32 tiles in shared memory, for
// operands of any float type, size and strides. Every element of a result is one thread's sum, in
// the order of the CPU's products.
#include "launch.h"
#include "warp.h"

namespace duomoe::cuda {
namespace {

constexpr int kTile = 64;   // rows and columns of a block's tile of C
constexpr int kSlice = 16;  // depth that is in shared memory at a time
constexpr int kSide = 16;   // a block has kSide x kSide threads
constexpr int kThreads = kSide * kSide;
constexpr int kPerThread = kTile / kSide;
// A sum over depth is taken in blocks, each in order from 0 with fma, which are then added in
// order.
constexpr int kDepthBlock = 256;
static_assert(kDepthBlock % kSlice == 0 && kTile * kSlice % kThreads == 0);

// Element (i, j) of a matrix lies at data[i * row_stride + j * column_stride].
struct Matrix {
  char* data;
  DType dtype;
  int64_t row_stride, column_stride;

  Matrix(const TensorView& view, int64_t rows, int64_t columns)
      : data(view.as<char>()), dtype(view.dtype), row_stride(rows), column_stride(columns) {}
  // The part that starts at element (i, j).
  __device__ Matrix from(int64_t i, int64_t j) const {
    Matrix part = *this;
    part.data += (i * row_stride + j * column_stride) * static_cast<int64_t>(item_size(dtype));
    return part;
  }
};

// C[rows, columns] = A[rows, depth] B[depth, columns], with operands first rounded to
// `operand_dtype`.
struct Product {
  Matrix a, b, c;
  int64_t rows, columns, depth;
  DType operand_dtype;
  const void* bias;  // [columns], added in float32 before the result is rounded; may be null
  DType bias_dtype;
  const uint8_t* keep_rows = nullptr;  // [rows]; where it is 0, that row of C is zero
  const uint8_t* keep_depth =
      nullptr;  // [depth]; where it is 0, that depth of A and B counts as zero
};

using Slice = float[kSlice][kTile + 4];

// slice[k][i] from element (k, i) of a matrix whose depth axis has `depth_stride`; 0 past its ends.
__device__ void load_slice(Slice& slice, const Matrix& m, int64_t depth_stride, int64_t tile_stride,
                           int64_t depth, int64_t extent, const uint8_t* keep,
                           DType operand_dtype) {
  for (int n = threadIdx.x; n < kTile * kSlice; n += kThreads) {
    // Neighbouring threads read neighbouring elements.
    const int k = depth_stride == 1 ? n % kSlice : n / kTile,
              i = depth_stride == 1 ? n / kSlice : n % kTile;
    const bool inside = k < depth && i < extent && (!keep || keep[k]);
    slice[k][i] =
        inside ? round_to(operand_dtype, load(m.dtype, m.data, k * depth_stride + i * tile_stride))
               : 0.0f;
  }
}

// The tile of C that starts at (i0, j0), by one block.
__device__ void product_tile(const Product& p, int64_t i0, int64_t j0) {
  __shared__ Slice a, b;
  const int row = static_cast<int>(threadIdx.x) / kSide,
            column = static_cast<int>(threadIdx.x) % kSide;
  float total[kPerThread][kPerThread] = {}, sum[kPerThread][kPerThread] = {};
  for (int64_t k0 = 0; k0 < p.depth; k0 += kSlice) {
    const uint8_t* keep = p.keep_depth ? p.keep_depth + k0 : nullptr;
    load_slice(a, p.a.from(i0, k0), p.a.column_stride, p.a.row_stride, p.depth - k0, p.rows - i0,
               keep, p.operand_dtype);
    load_slice(b, p.b.from(k0, j0), p.b.row_stride, p.b.column_stride, p.depth - k0, p.columns - j0,
               keep, p.operand_dtype);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSlice; ++k) {
      float x[kPerThread], y[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) x[i] = a[k][row + i * kSide];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) y[j] = b[k][column + j * kSide];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) sum[i][j] = math::fma(x[i], y[j], sum[i][j]);
      }
    }
    __syncthreads();
    if ((k0 + kSlice) % kDepthBlock == 0 || k0 + kSlice >= p.depth) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
          total[i][j] += sum[i][j];
          sum[i][j] = 0.0f;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t r = i0 + row + i * kSide, c = j0 + column + j * kSide;
      if (r >= p.rows || c >= p.columns) continue;
      const float x = p.bias ? total[i][j] + load(p.bias_dtype, p.bias, c) : total[i][j];
      const bool kept = !p.keep_rows || p.keep_rows[r];
      store(p.c.dtype, kept ? x : 0.0f, p.c.data, r * p.c.row_stride + c * p.c.column_stride);
    }
  }
}

__global__ void __launch_bounds__(kThreads) multiply(const Product p) {
  const int64_t columns = (p.columns + kTile - 1) / kTile,
                tiles = (p.rows + kTile - 1) / kTile * columns;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    product_tile(p, tile / columns * kTile, tile % columns * kTile);
  }
}

Status run_product(const Call& call, const Product& p) {
  Queue queue(call);
  queue.launch(multiply, grid_for(ceil_div(p.rows, kTile) * ceil_div(p.columns, kTile), 1),
               kThreads, 0, p);
  return queue.status();
}

// --- sums of rows ------------------------------------------------------------------------------

// result[j] = sum over the rows [begin, end) of x[i][j], in blocks as a product sums them. A block
// takes the 32 columns from `first_column` on; each of its warps sums one block of rows, then these
// are added in order.
constexpr int kColumnSumWarps = 32;

struct ColumnSum {
  int64_t columns;
  const uint8_t* keep;  // [rows]; where it is 0, that row counts as zero; may be null
  DType dtype;
  const void* x;
  DType result_dtype;
  void* result;
};

__device__ void sum_columns(const ColumnSum& s, int64_t begin, int64_t end, int64_t first_column,
                            int64_t result_offset) {
  __shared__ float sums[kColumnSumWarps][kLanes];
  const int64_t column = first_column + lane_id();
  float total = 0.0f;
  for (int64_t first = begin; first < end; first += kColumnSumWarps * kDepthBlock) {
    const int64_t mine = first + warp_id() * kDepthBlock;
    float sum = 0.0f;
    for (int64_t r = mine; r < mine + kDepthBlock && r < end && column < s.columns; ++r) {
      if (!s.keep || s.keep[r]) {
        sum = math::fma(1.0f, load(s.dtype, s.x, r * s.columns + column), sum);
      }
    }
    sums[warp_id()][lane_id()] = sum;
    __syncthreads();
    for (int w = 0; w < kColumnSumWarps && first + w * kDepthBlock < end; ++w)
      total += sums[w][lane_id()];
    __syncthreads();
  }
  if (warp_id() == 0 && column < s.columns)
    store(s.result_dtype, total, s.result, result_offset + column);
}

__global__ void __launch_bounds__(kColumnSumWarps* kLanes)
    sum_all_rows(const ColumnSum s, int64_t rows) {
  sum_columns(s, 0, rows, static_cast<int64_t>(blockIdx.x) * kLanes, 0);
}

// --- the gate ----------------------------------------------------------------------------------

DUOMOE_KERNEL(kCuda, gate) {
  const int64_t t = call.axis('T'), d = call.axis('D'), e = call.axis('E');
  const TensorView &logits = call.out("logits"), &bias = call.in("router_bias");
  return run_product(call, {.a = {call.in("x"), d, 1},
                            .b = {call.in("router"), e, 1},
                            .c = {logits, e, 1},
                            .rows = t,
                            .columns = e,
                            .depth = d,
                            .operand_dtype = logits.dtype,
                            .bias = bias.present() ? bias.data : nullptr,
                            .bias_dtype = bias.dtype,
                            .keep_rows = call.in("token_mask").as<const uint8_t>()});
}

DUOMOE_KERNEL(kCuda, gate_bwd_x) {
  const int64_t t = call.axis('T'), d = call.axis('D'), e = call.axis('E');
  const TensorView& grad = call.in("grad_logits");
  return run_product(call, {.a = {grad, e, 1},
                            .b = {call.in("router"), 1, e},
                            .c = {call.out("grad_x"), d, 1},
                            .rows = t,
                            .columns = d,
                            .depth = e,
                            .operand_dtype = grad.dtype,
                            .bias = nullptr,
                            .bias_dtype = DType::kFloat32,
                            .keep_rows = call.in("token_mask").as<const uint8_t>()});
}

DUOMOE_KERNEL(kCuda, gate_bwd_params) {
  const int64_t t = call.axis('T'), d = call.axis('D'), e = call.axis('E');
  const TensorView &grad = call.in("grad_logits"), &bias = call.out("grad_router_bias");
  const uint8_t* keep = call.in("token_mask").as<const uint8_t>();
  const Status product = run_product(call, {.a = {call.in("x"), 1, d},
                                            .b = {grad, e, 1},
                                            .c = {call.out("grad_router"), e, 1},
                                            .rows = d,
                                            .columns = e,
                                            .depth = t,
                                            .operand_dtype = grad.dtype,
                                            .bias = nullptr,
                                            .bias_dtype = DType::kFloat32,
                                            .keep_depth = keep});
  if (!product.ok()) return product;
  Queue queue(call);
  queue.launch(sum_all_rows, ceil_div(e, kLanes), kColumnSumWarps * kLanes, 0,
               ColumnSum{e, keep, grad.dtype, grad.data, bias.dtype, bias.data}, t);
  return queue.status();
}

// --- the experts -------------------------------------------------------------------------------

// The rows of an expert, clipped to the rows that exist (offsets may come from a caller's own
// plan), and the number of row tiles of all experts before it.
struct Group {
  int64_t begin, rows, tiles_before;
};

// One warp.
__global__ void find_groups(const int32_t* offsets, const int32_t* counts, int64_t experts,
                            int64_t num_rows, Group* groups) {
  int64_t end = 0, tiles = 0;
  for (int64_t first = 0; first < experts; first += kLanes) {
    const int64_t mine = first + lane_id();
    const int64_t offset = mine < experts ? offsets[mine] : 0,
                  count = mine < experts ? counts[mine] : 0;
    for (int l = 0; l < kLanes && first + l < experts; ++l) {
      int64_t begin = __shfl_sync(kAllLanes, offset, l);
      begin = begin < end ? end : begin < num_rows ? begin : num_rows;
      int64_t rows = __shfl_sync(kAllLanes, count, l);
      rows = rows < 0 ? 0 : rows < num_rows - begin ? rows : num_rows - begin;
      if (lane_id() == l) groups[mine] = {begin, rows, tiles};
      end = begin + rows;
      tiles += (rows + kTile - 1) / kTile;
    }
  }
}

// C's rows are those of all experts, each with its own B and bias: the experts' B lie `b_stride`
// elements apart. Tiles are numbered expert by expert; the grid is for as many as R rows in E
// groups can have.
__global__ void __launch_bounds__(kThreads)
    multiply_rows(const Product p, int64_t b_stride, const Group* groups, int64_t experts,
                  int64_t row_tiles) {
  const int64_t columns = (p.columns + kTile - 1) / kTile;
  for (int64_t tile = blockIdx.x; tile < row_tiles * columns; tile += gridDim.x) {
    const int64_t row_tile = tile / columns;
    int64_t e = 0;  // the last expert with tiles_before <= row_tile
    for (int64_t after = experts; after - e > 1;) {
      const int64_t middle = (e + after) / 2;
      (groups[middle].tiles_before <= row_tile ? e : after) = middle;
    }
    const Group group = groups[e];
    const int64_t i0 = (row_tile - group.tiles_before) * kTile;
    if (i0 >= group.rows) continue;
    Product part = p;
    part.a = p.a.from(group.begin, 0);
    part.b.data += e * b_stride * static_cast<int64_t>(item_size(p.b.dtype));
    if (p.bias) {
      part.bias = static_cast<const char*>(p.bias) +
                  e * p.columns * static_cast<int64_t>(item_size(p.bias_dtype));
    }
    part.c = p.c.from(group.begin, 0);
    part.rows = group.rows;
    product_tile(part, i0, tile % columns * kTile);
  }
}

// Each expert has a C of its own, `c_stride` elements from the next, and sums over its rows of A^T
// and B.
__global__ void __launch_bounds__(kThreads)
    multiply_over_rows(const Product p, int64_t c_stride, const Group* groups, int64_t experts) {
  const int64_t columns = (p.columns + kTile - 1) / kTile,
                tiles = (p.rows + kTile - 1) / kTile * columns;
  for (int64_t tile = blockIdx.x; tile < experts * tiles; tile += gridDim.x) {
    const int64_t e = tile / tiles, within = tile % tiles;
    Product part = p;
    part.a = p.a.from(0, groups[e].begin);
    part.b = p.b.from(groups[e].begin, 0);
    part.c.data += e * c_stride * static_cast<int64_t>(item_size(p.c.dtype));
    part.depth = groups[e].rows;
    product_tile(part, within / columns * kTile, within % columns * kTile);
  }
}

int64_t group_bytes(const Call& call) { return piece_bytes<Group>(call.axis('E')); }

Group* groups_of(const Call& call, Queue& queue) {
  Group* groups = queue.scratch<Group>(call.axis('E'));
  queue.launch(
      find_groups, call.axis('E') > 0, kLanes, 0, call.in("expert_offsets").as<const int32_t>(),
      call.in("expert_counts").as<const int32_t>(), call.axis('E'), call.axis('R'), groups);
  return groups;
}

// Rows outside of any group stay zero.
Status run_on_rows(const Call& call, const TensorView& result, const Product& p, int64_t b_stride) {
  const int64_t experts = call.axis('E');
  Queue queue(call);
  queue.fill(result, 0);
  const int64_t row_tiles = p.rows > 0 && experts > 0 ? ceil_div(p.rows, kTile) + experts : 0;
  const int64_t grid = grid_for(row_tiles * ceil_div(p.columns, kTile), 1);
  if (grid == 0) return queue.status();
  const Group* groups = groups_of(call, queue);
  queue.launch(multiply_rows, grid, kThreads, 0, p, b_stride, groups, experts, row_tiles);
  return queue.status();
}

DUOMOE_WORKSPACE(kCuda, grouped_matmul) { return group_bytes(call); }

DUOMOE_KERNEL(kCuda, grouped_matmul) {
  const int64_t d = call.axis('D'), n = call.axis('N');
  const TensorView &out = call.out("out"), &bias = call.in("bias");
  return run_on_rows(call, out,
                     {.a = {call.in("rows"), d, 1},
                      .b = {call.in("w"), n, 1},
                      .c = {out, n, 1},
                      .rows = call.axis('R'),
                      .columns = n,
                      .depth = d,
                      .operand_dtype = DType::kFloat32,
                      .bias = bias.present() ? bias.data : nullptr,
                      .bias_dtype = bias.dtype},
                     d * n);
}

DUOMOE_WORKSPACE(kCuda, grouped_matmul_bwd_rows) { return group_bytes(call); }

DUOMOE_KERNEL(kCuda, grouped_matmul_bwd_rows) {
  const int64_t d = call.axis('D'), n = call.axis('N');
  const TensorView& grad_rows = call.out("grad_rows");
  return run_on_rows(call, grad_rows,
                     {.a = {call.in("grad_out"), n, 1},
                      .b = {call.in("w"), 1, n},
                      .c = {grad_rows, d, 1},
                      .rows = call.axis('R'),
                      .columns = d,
                      .depth = n,
                      .operand_dtype = DType::kFloat32,
                      .bias = nullptr,
                      .bias_dtype = DType::kFloat32},
                     d * n);
}

DUOMOE_WORKSPACE(kCuda, grouped_matmul_bwd_w) { return group_bytes(call); }

DUOMOE_KERNEL(kCuda, grouped_matmul_bwd_w) {
  const int64_t d = call.axis('D'), n = call.axis('N'), experts = call.axis('E');
  const Product p{.a = {call.in("rows"), 1, d},
                  .b = {call.in("grad_out"), n, 1},
                  .c = {call.out("grad_w"), n, 1},
                  .rows = d,
                  .columns = n,
                  .depth = call.axis('R'),
                  .operand_dtype = DType::kFloat32,
                  .bias = nullptr,
                  .bias_dtype = DType::kFloat32};
  const int64_t grid = grid_for(experts * ceil_div(d, kTile) * ceil_div(n, kTile), 1);
  Queue queue(call);
  if (grid == 0) return queue.status();
  const Group* groups = groups_of(call, queue);
  queue.launch(multiply_over_rows, grid, kThreads, 0, p, d * n, groups, experts);
  return queue.status();
}

__global__ void __launch_bounds__(kColumnSumWarps* kLanes)
    sum_group_rows(const ColumnSum s, const Group* groups, int64_t experts) {
  const int64_t parts = (s.columns + kLanes - 1) / kLanes;
  for (int64_t item = blockIdx.x; item < experts * parts; item += gridDim.x) {
    const int64_t e = item / parts;
    sum_columns(s, groups[e].begin, groups[e].begin + groups[e].rows, item % parts * kLanes,
                e * s.columns);
  }
}

DUOMOE_WORKSPACE(kCuda, grouped_matmul_bwd_bias) { return group_bytes(call); }

DUOMOE_KERNEL(kCuda, grouped_matmul_bwd_bias) {
  const int64_t n = call.axis('N'), experts = call.axis('E');
  const TensorView &grad = call.in("grad_out"), &bias = call.out("grad_bias");
  const int64_t grid = grid_for(experts * ceil_div(n, kLanes), 1);
  Queue queue(call);
  if (grid == 0) return queue.status();
  const Group* groups = groups_of(call, queue);
  queue.launch(sum_group_rows, grid, kColumnSumWarps * kLanes, 0,
               ColumnSum{n, nullptr, grad.dtype, grad.data, bias.dtype, bias.data}, groups,
               experts);
  return queue.status();
}

}  // namespace
}  // namespace duomoe::cuda
