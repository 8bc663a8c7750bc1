// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Linked to the core without its CUDA kernels, in whose place it registers one that takes pieces of
// a workspace. Prints what is wrong; 1 if anything is.
#include "workspace.h"

#include <cstdint>
#include <cstdio>
#include <vector>

#include "registry.h"

namespace duomoe {
namespace {

int faults = 0;
void expect(bool holds, const char* what) {
  if (!holds) std::printf("%s\n", what), ++faults;
}

int64_t more = 0;  // bytes that the kernel takes beyond what it declared
struct Pieces {
  char *a, *none, *b, *beyond;
} seen;

DUOMOE_WORKSPACE(kCuda, scale_rows) {
  return piece_bytes<double>(call.axis('T')) + piece_bytes<int32_t>(call.axis('D'));
}

DUOMOE_KERNEL(kCuda, scale_rows) {
  Workspace workspace = call.workspace;
  seen.a = reinterpret_cast<char*>(workspace.take<double>(call.axis('T')));
  seen.none = reinterpret_cast<char*>(workspace.take<double>(0));
  seen.b = reinterpret_cast<char*>(workspace.take<int32_t>(call.axis('D')));
  seen.beyond = workspace.take<char>(more);
  return {};
}

struct Lender : Executor {
  std::vector<char> memory;
  std::vector<int64_t> asked;
  bool lends = true;
  void* workspace(int64_t bytes) override {
    asked.push_back(bytes);
    memory.resize(bytes);
    return lends ? memory.data() : nullptr;
  }
};

int check() {
  constexpr int64_t kTokens = 33, kWidth = 70;
  std::vector<float> x(kTokens * kWidth), scale(kTokens), y(kTokens * kWidth);
  std::vector<TensorView> inputs{{.data = x.data(), .rank = 2, .shape = {kTokens, kWidth}},
                                 {.data = scale.data(), .rank = 1, .shape = {kTokens}}};
  const std::vector<TensorView> outputs{{.data = y.data(), .rank = 2, .shape = {kTokens, kWidth}}};
  const int op = op_index("scale_rows");
  const auto run = [&](Backend backend, Lender& lender) {
    return duomoe::run(op, backend, inputs, outputs, {}, lender);
  };

  static_assert(piece_bytes<float>(0) == 0 && piece_bytes<float>(1) == 256);
  static_assert(piece_bytes<float>(64) == 256 && piece_bytes<float>(65) == 512);
  static_assert(piece_bytes<double>(int64_t{1} << 40) == int64_t{1} << 43);

  Lender lender;
  more = 1;
  expect(run(Backend::kCuda, lender).ok(), "a call with a workspace");
  const int64_t declared = 512 + 512;
  expect(lender.asked == std::vector<int64_t>{declared}, "asked once for what was declared");
  expect(seen.a == lender.memory.data() && seen.b == seen.a + 512, "pieces in order, apart");
  expect(!seen.none && !seen.beyond, "nothing for no elements, nor beyond what was declared");

  Lender poor;
  poor.lends = false;
  expect(run(Backend::kCuda, poor).message == "scale_rows: could not get a workspace of 1024 bytes",
         "an error without memory");
  Lender cpu;
  expect(run(Backend::kCpu, cpu).ok() && cpu.asked.empty(), "the CPU kernel takes none");

  for (TensorView& view : inputs) view.data = nullptr;
  int64_t bytes = -1;
  expect(workspace_bytes(op, Backend::kCuda, inputs, {}, bytes).ok() && bytes == declared,
         "the size without data");
  expect(workspace_bytes(op, Backend::kCpu, inputs, {}, bytes).ok() && bytes == 0,
         "no size for the CPU kernel");
  inputs[1].shape[0] = kTokens + 1;
  expect(!workspace_bytes(op, Backend::kCuda, inputs, {}, bytes).ok(), "shapes are checked");
  std::printf("%d faults\n", faults);
  return faults ? 1 : 0;
}

}  // namespace
}  // namespace duomoe

int main() { return duomoe::check(); }
