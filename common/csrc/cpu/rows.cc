// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving rows between token order and expert order: permute, combine and their gradients; and
// scaling rows. Row and slot numbers outside their range count as unused, so that a plan of other
// origin cannot read out of bounds.
#include <cstring>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "stream.h"

namespace duomoe::cpu {
namespace {

// sum over k, in slot order and float32, of weights[t, k] * rows[row_of_slot[t, k]], rounded once.
void gather_sum(const Call& call, const TensorView& source, const float* weights,
                const TensorView& target) {
  const int64_t tokens = call.axis('T'), top_k = call.axis('K'), width = call.axis('D');
  const int64_t num_rows = call.axis('R');
  const int32_t* row_of_slot = call.in("row_of_slot").as<const int32_t>();
  const Rows rows(source, width), y(target, width);
  parallel_blocks(call, tokens, rows_per_task(width * top_k), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    auto used = [&](int64_t slot) {
      return row_of_slot[slot] >= 0 && row_of_slot[slot] < num_rows;
    };
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
        if (slot + 1 < end * top_k && used(slot + 1)) {
          prefetch(rows[row_of_slot[slot + 1]], rows.bytes);
        }
        if (!used(slot)) continue;
        simd().accumulate_scaled(source.dtype, weights ? weights[slot] : 1.0f,
                                 rows[row_of_slot[slot]], width, sum.data());
      }
      simd().store(target.dtype, sum.data(), y[t], width);
    }
  });
}

// Writes the rows of one buffer, past the caches if they are too many for them. To be made by each
// task.
class RowWriter {
 public:
  RowWriter(const Rows& rows, DType dtype, int64_t count)
      : rows_(rows), dtype_(dtype), stream_(rows.bytes * count >= kStreamedBytes) {
    if (stream_) line_.resize(rows.bytes);
  }
  ~RowWriter() {
    if (stream_) fence_streams();
  }

  void clear(int64_t row) {
    if (rows_.bytes > 0) std::memset(rows_[row], 0, rows_.bytes);
  }
  void copy(const char* from, int64_t row) {
    if (stream_) return copy_stream(from, rows_.bytes, rows_[row]);
    if (rows_.bytes > 0) std::memcpy(rows_[row], from, rows_.bytes);
  }
  void scale(float factor, const char* from, int64_t row) {
    char* to = stream_ ? line_.data() : rows_[row];
    simd().scale(dtype_, factor, from, rows_.bytes / static_cast<int64_t>(item_size(dtype_)), to);
    if (stream_) copy_stream(to, rows_.bytes, rows_[row]);
  }

 private:
  const Rows rows_;
  const DType dtype_;
  const bool stream_;
  std::vector<char> line_;
};

// dots[t, k] = dot(x[t], rows[row_of_slot[t, k]]), 0 for a slot without a row.
void dot_slots(const Call& call, const TensorView& tokens, const TensorView& source,
               const TensorView& target) {
  const int64_t top_k = call.axis('K'), width = call.axis('D'), num_rows = call.axis('R');
  const int32_t* row_of_slot = call.in("row_of_slot").as<const int32_t>();
  const Rows x(tokens, width), rows(source, width);
  float* dots = target.as<float>();
  auto has_row = [&](int64_t slot) {
    return row_of_slot[slot] >= 0 && row_of_slot[slot] < num_rows;
  };
  parallel_blocks(call, call.axis('T') * top_k, rows_per_task(width),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t slot = begin; slot < end; ++slot) {
                      if (slot + 1 < end && has_row(slot + 1)) {
                        prefetch(rows[row_of_slot[slot + 1]], rows.bytes);
                      }
                      dots[slot] = has_row(slot) ? simd().dot(source.dtype, x[slot / top_k],
                                                              rows[row_of_slot[slot]], width)
                                                 : 0.0f;
                    }
                  });
}

const float* weights_of(const Call& call) { return call.in("weights").as<const float>(); }

DUOMOE_KERNEL(kCpu, permute) {
  const int64_t top_k = call.axis('K'), width = call.axis('D'), slots = call.axis('T') * top_k;
  const int64_t num_rows = call.axis('R');
  const int32_t* slot_of_row = call.in("slot_of_row").as<const int32_t>();
  const float* weights = weights_of(call);
  const TensorView& out = call.out("rows");
  const Rows x(call.in("x"), width), rows(out, width);
  parallel_blocks(call, num_rows, rows_per_task(width), [&](int64_t begin, int64_t end) {
    RowWriter writer(rows, out.dtype, num_rows);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = slot_of_row[r];
      if (slot < 0 || slot >= slots) {
        writer.clear(r);
      } else if (weights) {
        writer.scale(weights[slot], x[slot / top_k], r);
      } else {
        writer.copy(x[slot / top_k], r);
      }
    }
  });
  return {};
}

DUOMOE_KERNEL(kCpu, permute_bwd) {
  gather_sum(call, call.in("grad_rows"), weights_of(call), call.out("grad_x"));
  return {};
}

DUOMOE_KERNEL(kCpu, permute_bwd_weights) {
  dot_slots(call, call.in("x"), call.in("grad_rows"), call.out("grad_weights"));
  return {};
}

DUOMOE_KERNEL(kCpu, combine) {
  gather_sum(call, call.in("rows"), weights_of(call), call.out("y"));
  return {};
}

DUOMOE_KERNEL(kCpu, combine_bwd) {
  const int64_t top_k = call.axis('K'), width = call.axis('D'), num_rows = call.axis('R');
  const int64_t tokens = call.axis('T'), slots = tokens * top_k;
  const int32_t* row_of_slot = call.in("row_of_slot").as<const int32_t>();
  const int32_t* slot_of_row = call.in("slot_of_row").as<const int32_t>();
  const float* weights = call.in("weights").as<const float>();
  float* grad_weights = call.out("grad_weights").as<float>();
  const DType dtype = call.in("rows").dtype;
  const Rows grad_y(call.in("grad_y"), width), rows(call.in("rows"), width),
      grad_rows(call.out("grad_rows"), width);
  auto has_row = [&](int64_t slot) {
    return row_of_slot[slot] >= 0 && row_of_slot[slot] < num_rows;
  };
  // By tokens, so that a row of grad_y is read once.
  parallel_blocks(call, tokens, rows_per_task(width * top_k), [&](int64_t begin, int64_t end) {
    RowWriter writer(grad_rows, dtype, num_rows);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
        if (slot + 1 < end * top_k && has_row(slot + 1)) {
          prefetch(rows[row_of_slot[slot + 1]], rows.bytes);
        }
        grad_weights[slot] = 0.0f;
        if (!has_row(slot)) continue;
        const int64_t row = row_of_slot[slot];
        grad_weights[slot] = simd().dot(dtype, grad_y[t], rows[row], width);
        if (slot_of_row[row] == slot) writer.scale(weights ? weights[slot] : 1.0f, grad_y[t], row);
      }
    }
  });
  // The rows that are left: without a slot, or, in a plan of other origin, with one that has
  // another row.
  parallel_blocks(call, num_rows, kGrain, [&](int64_t begin, int64_t end) {
    RowWriter writer(grad_rows, dtype, num_rows);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = slot_of_row[r];
      if (slot < 0 || slot >= slots) {
        writer.clear(r);
      } else if (row_of_slot[slot] != r) {
        writer.scale(weights ? weights[slot] : 1.0f, grad_y[slot / top_k], r);
      }
    }
  });
  return {};
}

// target[t] = scale[t] * source[t]
void scale_tokens(const Call& call, const TensorView& source, const TensorView& target) {
  const int64_t width = call.axis('D');
  const float* scale = call.in("scale").as<const float>();
  const Rows from(source, width), to(target, width);
  parallel_blocks(call, call.axis('T'), rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      simd().scale(source.dtype, scale[t], from[t], width, to[t]);
    }
  });
}

DUOMOE_KERNEL(kCpu, scale_rows) {
  scale_tokens(call, call.in("x"), call.out("y"));
  return {};
}

DUOMOE_KERNEL(kCpu, scale_rows_bwd) {
  scale_tokens(call, call.in("grad_y"), call.out("grad_x"));
  const int64_t width = call.axis('D');
  const TensorView& view = call.in("x");
  const Rows x(view, width), grad_y(call.in("grad_y"), width);
  float* grad_scale = call.out("grad_scale").as<float>();
  parallel_blocks(call, call.axis('T'), rows_per_task(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      grad_scale[t] = simd().dot(view.dtype, x[t], grad_y[t], width);
    }
  });
  return {};
}

}  // namespace
}  // namespace duomoe::cpu
