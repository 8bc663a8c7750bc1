// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// For a build with sanitizers and DUOMOE_GUARDED_ARENA: runs the CPU kernels that index rows by
// hand on rows of many sizes. Prints what is wrong and how many calls there were; 1 if anything is.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cpu/simd.h"
#include "registry.h"

using duomoe::DType;
using duomoe::TensorView;

const duomoe::cpu::SimdLoops* loops = &duomoe::cpu::simd_base();
// In place of cpu/simd.cc, which takes the machine's best set.
const duomoe::cpu::SimdLoops& duomoe::cpu::simd() { return *loops; }

std::mt19937 generator(1);
int draw(int low, int high) { return std::uniform_int_distribution(low, high)(generator); }
float one_of(const std::vector<float>& values) { return values[draw(0, values.size() - 1)]; }

struct SerialExecutor : duomoe::Executor {
  void parallel_for(int64_t count, const std::function<void(int64_t)>& task) override {
    while (count > 0) task(--count);
  }
} executor;

// What the ops of one case share, by name. A tensor's memory ends with its last element.
std::map<std::string, TensorView> tensors;
std::map<std::string, std::vector<char>> memory;
std::map<std::string, int> options;
std::map<char, int> axes;
int calls = 0, faults = 0;

TensorView allocate(const std::string& name, TensorView view) {
  memory[name] = std::vector<char>(view.size() * item_size(view.dtype), '\xa5');
  view.data = memory[name].data();
  return tensors[name] = view;
}

float draw_logit(int kind) {
  const float x = draw(-4000, 4000) / 500.0f;
  if (kind == 0) return draw(-1, 1);   // ties
  if (kind == 1) return 20 * x - 110;  // scores that underflow
  if (kind == 2) return one_of({x, x, x, INFINITY, -INFINITY, NAN, -0.0f});
  return kind == 3 ? one_of({-INFINITY, NAN}) : x;
}

void draw_tensor(const duomoe::TensorSpec& spec) {
  TensorView view{.dtype = static_cast<DType>(options["probs_dtype"]), .rank = 0};
  for (char c : spec.axes) {
    if (c >= 'A') view.shape[view.rank++] = axes[c];
    if (c == '+') ++view.shape[view.rank - 1];  // "E+1"
  }
  if (spec.dtype == "float32") view.dtype = DType::kFloat32;
  if (spec.dtype == "int32") view.dtype = DType::kInt32;
  if (spec.dtype == "bool") view.dtype = DType::kBool;
  view = allocate(spec.name, view);
  const int kind = draw(0, 5);
  for (int64_t i = 0; i < view.size(); ++i) {
    if (view.dtype == DType::kInt32) view.as<int32_t>()[i] = draw(-3, axes['E'] + 3);
    if (view.dtype == DType::kBool) view.as<bool>()[i] = draw(0, 3) > 0;
    if (view.dtype > DType::kFloat16) continue;
    const float x = spec.name == "logits" ? draw_logit(kind) : 0.1f * kind * draw(-9, 9);
    loops->store(view.dtype, &x, view.as<char>() + i * item_size(view.dtype), 1);
  }
}

// Runs an op on what there is of its inputs and attributes, and draws the rest.
void run_op(const char* name) {
  const int op = duomoe::op_index(name);
  const duomoe::OpSpec& spec = duomoe::op_table()[op];
  std::vector<TensorView> inputs, outputs(spec.outputs.size());
  std::vector<duomoe::AttributeValue> values;
  for (const auto& input : spec.inputs) {
    const TensorView& tensor = tensors[input.name];
    if (!tensor.present() && (!input.optional || draw(0, 2) == 0)) draw_tensor(input);
    inputs.push_back(tensor);
  }
  for (const auto& [key, kind, choices, minimum, axis, dtype_of] : spec.attributes) {
    const int drawn = choices.empty() ? draw(1, 4) : draw(0, choices.size() - 1);
    values.push_back({options.contains(key) ? options[key] : drawn, 0.5 * draw(0, 2)});
  }
  duomoe::Status status = infer_outputs(op, inputs, values, outputs);
  for (size_t i = 0; auto& output : outputs) output = allocate(spec.outputs[i++].name, output);
  if (status.ok()) status = run(op, duomoe::Backend::kCpu, inputs, outputs, values, executor);
  if (!status.ok()) std::puts(status.message.c_str());
  faults += !status.ok();
  ++calls;
}

// A live token's ids are distinct and in range.
void check_indices() {
  const TensorView mask = tensors["token_mask"], first = tensors["first_token"];
  int live = axes['T'], top_k = axes['K'], total = options["total_tokens"];
  if (first.present()) live = std::min(live, total - std::max(0, *first.as<int32_t>()));
  for (int t = 0; t < live; ++t) {
    if (mask.present() && !mask.as<bool>()[t]) continue;
    const int32_t* row = tensors["indices"].as<int32_t>() + t * top_k;
    const std::set<int32_t> own(row, row + top_k);
    if (std::ssize(own) == top_k && *own.begin() >= 0 && *own.rbegin() < axes['E']) continue;
    std::printf("wrong ids for E=%d K=%d\n", axes['E'], top_k);
    ++faults;
  }
}

void run_case(int experts, int top_k) {
  tensors.clear();
  const int sequences = draw(0, 7) ? draw(1, 3) : 40;
  const int tokens = sequences * (sequences < 3 && draw(0, 7) == 0 ? 70 : draw(0, 7));
  int groups = draw(1, experts);
  while (experts % groups) --groups;
  const int kept = draw((top_k * groups + experts - 1) / experts, groups);
  axes = {{'T', tokens}, {'E', experts}, {'K', top_k}, {'S', sequences}, {'N', experts}};
  options = {{"top_k", top_k}, {"num_experts", experts}, {"num_sequences", sequences}};
  options.insert({{"total_tokens", sequences * draw(0, 20)}, {"num_bytes", (experts + 7) / 8}});
  options.insert({{"num_groups", groups}, {"group_top_k", kept}, {"probs_dtype", draw(0, 2)}});
  run_op("route");
  if (!tensors["given_indices"].present()) check_indices();
  if (draw(0, 1)) tensors.erase("indices");  // others, some out of range, are drawn
  for (const char* op :
       {"route_bwd", "normalize_scores", "normalize_scores_bwd", "scatter_weights",
        "scatter_weights_bwd", "mark_experts", "mark_expert_bits", "aux_loss", "aux_loss_bwd"}) {
    run_op(op);
  }
  if (top_k < experts) run_op("count_quantile_bins");
}

// Dispatch and the experts' products, on the plan of what `route` left or, now and then, on numbers
// drawn at random.
void run_experts() {
  const int slots = axes['T'] * axes['K'];
  axes['D'] = draw(1, 3) * draw(1, 90);
  axes['N'] = draw(1, 3) * draw(1, 90);
  axes['F'] = draw(1, 70);
  axes['R'] = options["num_rows"] = slots + draw(-slots, 40);
  options["alignment"] = draw(1, 9);
  options["capacity"] = draw(-1, 20);
  for (const char* stale : {"row_of_slot", "slot_of_row", "expert_counts", "expert_offsets"}) {
    tensors.erase(stale);
  }
  if (draw(0, 4)) run_op("plan_dispatch");
  run_op("count_mismatches");
  for (const char* op :
       {"permute", "permute_bwd", "permute_bwd_weights", "combine", "combine_bwd", "grouped_matmul",
        "grouped_matmul_bwd_rows", "grouped_matmul_bwd_w", "grouped_matmul_bwd_bias", "activate",
        "activate_bwd", "glu", "glu_bwd", "scale_rows", "scale_rows_bwd", "cast", "add"}) {
    for (const char* stale : {"x", "rows", "grad_rows", "grad_y", "w", "grad_out", "bias", "gate",
                              "up", "out", "scale", "a", "b"}) {
      tensors.erase(stale);
    }
    run_op(op);
  }
}

// Row maps, some of them of numbers drawn at random.
void run_maps() {
  axes['W'] = options["map_width"] = 2 * axes['E'] + 1;
  axes['C'] = draw(0, 9);
  options["num_tokens"] = axes['T'];
  options["limit"] = draw(-1, 20);
  for (const char* op :
       {"plan_mask", "read_row_map", "invert_rows", "sort_slots", "place_chunks"}) {
    for (const char* stale : {"routing_map", "row_of_slot", "slot_of_row", "pad_offsets"}) {
      tensors.erase(stale);
    }
    if (draw(0, 1)) tensors.erase("row_id_map");
    run_op(op);
  }
}

int main() {
  std::vector sets = {loops};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) sets.push_back(&duomoe::cpu::simd_avx2());
  if (__builtin_cpu_supports("avx512vl")) sets.push_back(&duomoe::cpu::simd_avx512());
#endif
  for (const auto* set : sets) {
    loops = set;
    for (int e = 1; e <= 1000; e += e == 300 ? 700 : 1) {
      for (int top_k : {1, draw(1, std::min(e, 34)), draw(1, e), e}) {
        run_case(e, top_k);
        if (e < 30) run_experts();
        if (e < 30) run_maps();
      }
    }
  }
  std::printf("%d calls with %zu instruction sets, %d faults\n", calls, sets.size(), faults);
  return faults != 0;
}
