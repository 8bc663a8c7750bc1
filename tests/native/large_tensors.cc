// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs the CPU kernels on tensors of more than 2^32 elements, in little time and memory: a tensor
// is address space without pages until they are touched, and of a kernel's tasks only the first,
// some in the middle and the last run (those of products all do). Results near both ends and in the
// middle are compared with sums over their sources, of small integers, which every dtype holds
// exactly. A product of row and width in 32 bits, signed or not, leaves the tensor or reads
// elsewhere in it. Prints what is wrong and the number of comparisons; 1 if anything is.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "math/scalar.h"
#include "registry.h"

using duomoe::DType;
using duomoe::TensorView;
using Options = std::map<std::string, double>;
using Tensors = std::map<std::string, TensorView>;

constexpr int64_t kMany = int64_t{1} << 32;
constexpr double kUnwritten = 0.625;  // of a sum of integers, never a result

// The first tasks, the last, and those around the middle if there are enough of them.
struct EndsExecutor : duomoe::Executor {
  bool long_tasks = false;  // then the first and the last alone
  void parallel_for(int64_t count, const std::function<void(int64_t)>& task) override {
    const int64_t ends = long_tasks ? 1 : 16, around = count > 1000 ? 60 : 3;
    for (int64_t i = 0; i < count; ++i) {
      const bool middle = !long_tasks && count > 16 && std::abs(i - count / 2) <= around;
      if (i < ends || i >= count - ends || middle) task(i);
    }
  }
} executor;

int64_t checks = 0, faults = 0;

// Zeros that take no memory before they are written.
std::vector<std::pair<void*, size_t>> mapped;
TensorView allocate(DType dtype, std::vector<int64_t> shape) {
  TensorView view{.dtype = dtype, .rank = static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  const size_t bytes = std::max<int64_t>(1, view.size()) * item_size(dtype);
  view.data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (view.data == MAP_FAILED) {
    std::printf("no address space\n");
    std::exit(77);
  }
  mapped.emplace_back(view.data, bytes);
  return view;
}
// The same, but for its ends and the rows around the middle all on one piece of memory. (The
// resident set counts a page as often as it is mapped.)
bool shared_outputs = false;
void share_pages(const TensorView& view) {
  constexpr size_t kPiece = size_t{1} << 23;
  const size_t bytes = mapped.back().second;
  static const int file = [] {
    const int made = memfd_create("shared", 0);
    return made >= 0 && ftruncate(made, kPiece) == 0 ? made : -1;
  }();
  for (size_t at = kPiece; at + 2 * kPiece < bytes; at += kPiece) {
    if (at + 4 * kPiece > bytes / 2 && at < bytes / 2 + 4 * kPiece) continue;
    mmap(view.as<char>() + at, kPiece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  }
}
void release() {
  for (const auto& [data, bytes] : mapped) munmap(data, bytes);
  mapped.clear();
}

double get(const TensorView& view, int64_t i) {
  switch (view.dtype) {
    case DType::kBFloat16:
      return duomoe::math::to_float(view.as<duomoe::math::BFloat16>()[i]);
    case DType::kFloat32:
      return view.as<float>()[i];
    case DType::kInt32:
      return view.as<int32_t>()[i];
    default:
      return view.as<uint8_t>()[i];
  }
}
void set(const TensorView& view, int64_t i, double x) {
  const auto value = static_cast<float>(x);
  if (view.dtype == DType::kBFloat16)
    duomoe::math::convert(value, view.as<duomoe::math::BFloat16>()[i]);
  if (view.dtype == DType::kFloat32) view.as<float>()[i] = value;
  if (view.dtype == DType::kInt32) view.as<int32_t>()[i] = static_cast<int32_t>(x);
  if (view.dtype >= DType::kBool) view.as<uint8_t>()[i] = static_cast<uint8_t>(x);
}

int64_t width_of(const TensorView& view) {
  int64_t width = 1;
  for (int i = 1; i < view.rank; ++i) width *= view.shape[i];
  return width;
}
// Indices along the first axis whose results are checked.
std::set<int64_t> ends(int64_t n) { return {0, n / 2, std::max<int64_t>(0, n - 2), n - 1}; }

// Small integers that tell one place from another, in the rows at both ends and in the middle.
int salt = 0;
TensorView drawn(std::vector<int64_t> shape, DType dtype = DType::kBFloat16, int64_t beside = 1) {
  const TensorView view = allocate(dtype, shape);
  const int64_t width = width_of(view);
  ++salt;
  for (int64_t middle : ends(shape[0])) {
    for (int64_t i = std::max<int64_t>(0, middle - beside);
         i <= std::min(shape[0] - 1, middle + beside); ++i) {
      for (int64_t j = 0; j < width; ++j) {
        uint64_t h = (static_cast<uint64_t>(i) * 31 + salt) * 0x9e3779b97f4a7c15u + j;
        h = (h ^ (h >> 29)) * 0xbf58476d1ce4e5b9u;
        set(view, i * width + j, static_cast<double>((h >> 40) % 7) - 3);
      }
    }
  }
  return view;
}

// The outputs by name; every option that is not given is 0. Rows that are checked are marked
// as unwritten before.
// `refused` takes the message of an error that is expected.
Tensors run_op(const char* name, const Tensors& given, const Options& options = {},
               std::string* refused = nullptr) {
  const int op = duomoe::op_index(name);
  const duomoe::OpSpec& spec = duomoe::op_table()[op];
  std::vector<TensorView> inputs, outputs(spec.outputs.size());
  std::vector<duomoe::AttributeValue> values;
  for (const auto& input : spec.inputs) {
    inputs.push_back(given.contains(input.name) ? given.at(input.name) : TensorView{});
  }
  for (const auto& attribute : spec.attributes) {
    const double value = options.contains(attribute.name) ? options.at(attribute.name) : 0;
    values.push_back({static_cast<int64_t>(value), value});
  }
  duomoe::Status status = infer_outputs(op, inputs, values, outputs);
  Tensors results;
  for (size_t i = 0; status.ok() && i < outputs.size(); ++i) {
    TensorView& out = outputs[i];
    out = results[spec.outputs[i].name] =
        allocate(out.dtype, {out.shape.begin(), out.shape.begin() + out.rank});
    if (shared_outputs) share_pages(out);
    const int64_t width = width_of(out);
    for (int64_t row : ends(out.rank ? out.shape[0] : 1)) {
      for (int64_t j = 0; row >= 0 && j < width; ++j) set(out, row * width + j, kUnwritten);
    }
  }
  if (status.ok()) status = run(op, duomoe::Backend::kCpu, inputs, outputs, values, executor);
  if (refused) {
    *refused = status.message;
  } else if (!status.ok()) {
    std::printf("%s\n", status.message.c_str());
    ++faults;
  }
  return results;
}

void check(const std::string& label, double got, double want) {
  ++checks;
  if (got == want) return;
  if (++faults < 40) std::printf("%s: %g, not %g\n", label.c_str(), got, want);
}
// want(i, j) for some columns of the rows at both ends and in the middle; elements that no task
// wrote do not count, but every row needs one.
template <typename Want>
void check_rows(const std::string& label, const TensorView& view, Want want) {
  const int64_t width = width_of(view);
  for (int64_t i : ends(view.shape[0])) {
    const std::string row = label + " " + std::to_string(i);
    int written = 0;
    for (int64_t j : std::set<int64_t>{0, 1 % width, width / 2, width - 1}) {
      const double got = get(view, i * width + j);
      if (got == kUnwritten) continue;
      check(row + "," + std::to_string(j), got, want(i, j));
      ++written;
    }
    if (written == 0) check(row + ", elements", 0, 1);
  }
}

// Slots in reverse: the first token has the last rows. The last two rows have no slot.
void move_rows(bool weighted) {
  constexpr int64_t kTokens = (kMany >> 12) / 2 + 3, kTopK = 2, kWidth = 4096;
  constexpr int64_t kSlots = kTokens * kTopK, kRows = kSlots + 1;
  Tensors in = {{"x", drawn({kTokens, kWidth})}, {"grad_y", drawn({kTokens, kWidth})}};
  in["rows"] = drawn({kRows, kWidth}, DType::kBFloat16, 8);
  in["grad_rows"] = drawn({kRows, kWidth}, DType::kBFloat16, 8);
  in["row_of_slot"] = allocate(DType::kInt32, {kTokens, kTopK});
  in["slot_of_row"] = allocate(DType::kInt32, {kRows});
  for (int64_t r = 0; r < kRows; ++r) {
    set(in["slot_of_row"], r, kSlots - 1 - r);  // -1 for the last
    if (r < kSlots) set(in["row_of_slot"], r, kSlots - 1 - r);
  }
  if (weighted) in["weights"] = drawn({kTokens, kTopK}, DType::kFloat32, 8);
  const auto weight = [&](int64_t slot) { return weighted ? get(in["weights"], slot) : 1.0; };
  const auto spread = [&](const char* source) {
    return [&, source](int64_t r, int64_t j) {
      const int64_t slot = kSlots - 1 - r;
      return slot < 0 ? 0.0 : weight(slot) * get(in[source], slot / kTopK * kWidth + j);
    };
  };
  const auto gathered = [&](const char* source) {
    return [&, source](int64_t t, int64_t j) {
      double sum = 0;
      for (int64_t slot = t * kTopK; slot < (t + 1) * kTopK; ++slot)
        sum += weight(slot) * get(in[source], (kSlots - 1 - slot) * kWidth + j);
      return sum;
    };
  };
  const auto dots = [&](const char* tokens, const char* rows) {
    return [&, tokens, rows](int64_t t, int64_t k) {
      double sum = 0;
      for (int64_t j = 0; j < kWidth; ++j)
        sum += get(in[tokens], t * kWidth + j) *
               get(in[rows], (kSlots - 1 - t * kTopK - k) * kWidth + j);
      return sum;
    };
  };
  check_rows("permute", run_op("permute", in)["rows"], spread("x"));
  check_rows("permute_bwd", run_op("permute_bwd", in)["grad_x"], gathered("grad_rows"));
  check_rows("permute_bwd_weights", run_op("permute_bwd_weights", in)["grad_weights"],
             dots("x", "grad_rows"));
  check_rows("combine", run_op("combine", in)["y"], gathered("rows"));
  Tensors grads = run_op("combine_bwd", in);
  check_rows("combine_bwd rows", grads["grad_rows"], spread("grad_y"));
  check_rows("combine_bwd weights", grads["grad_weights"], dots("grad_y", "rows"));
  release();
}

// What works on elements or on rows alone; relu keeps integers whole.
void elementwise() {
  constexpr int64_t kRows = (kMany >> 12) + 3, kWidth = 4096;
  Tensors in;
  for (const char* name : {"a", "b", "gate", "up", "x", "grad_out", "grad_y"})
    in[name] = drawn({kRows, kWidth});
  in["scale"] = drawn({kRows}, DType::kFloat32);
  const auto at = [&](const char* name) {
    return [&, name](int64_t i, int64_t j) { return get(in[name], i * kWidth + j); };
  };
  const auto a = at("a"), b = at("b"), gate = at("gate"), up = at("up"), x = at("x"),
             grad = at("grad_out"), grad_y = at("grad_y");
  const auto scale = [&](int64_t i) { return get(in["scale"], i); };
  const Options relu = {{"activation", 3}};
  using I = int64_t;
  check_rows("cast", run_op("cast", in)["out"], x);
  check_rows("add", run_op("add", in)["out"], [&](I i, I j) { return a(i, j) + b(i, j); });
  check_rows("activate", run_op("activate", in, relu)["out"],
             [&](I i, I j) { return std::max(x(i, j), 0.0); });
  check_rows("activate_bwd", run_op("activate_bwd", in, relu)["grad_x"],
             [&](I i, I j) { return x(i, j) > 0 ? grad(i, j) : 0; });
  check_rows("glu", run_op("glu", in, relu)["out"],
             [&](I i, I j) { return std::max(gate(i, j), 0.0) * up(i, j); });
  Tensors grads = run_op("glu_bwd", in, relu);
  check_rows("glu_bwd gate", grads["grad_gate"],
             [&](I i, I j) { return gate(i, j) > 0 ? grad(i, j) * up(i, j) : 0; });
  check_rows("glu_bwd up", grads["grad_up"],
             [&](I i, I j) { return grad(i, j) * std::max(gate(i, j), 0.0); });
  check_rows("scale_rows", run_op("scale_rows", in)["y"],
             [&](I i, I j) { return scale(i) * x(i, j); });
  grads = run_op("scale_rows_bwd", in);
  check_rows("scale_rows_bwd x", grads["grad_x"],
             [&](I i, I j) { return scale(i) * grad_y(i, j); });
  check_rows("scale_rows_bwd scale", grads["grad_scale"], [&](I i, I) {
    double sum = 0;
    for (I j = 0; j < kWidth; ++j) sum += x(i, j) * grad_y(i, j);
    return sum;
  });
  release();
}

// Experts' products, for experts of few rows at both ends and in the middle; the other rows belong
// to none.
struct Group {
  int64_t expert, begin, rows;
};
void multiply(int64_t experts, int64_t d, int64_t n, int64_t num_rows,
              const std::vector<Group>& groups, const std::set<std::string>& ops) {
  Tensors in = {{"rows", drawn({num_rows, d})}, {"grad_out", drawn({num_rows, n})}};
  in["w"] = drawn({experts, d, n}, DType::kBFloat16, 0);
  in["bias"] = drawn({experts, n});
  in["expert_offsets"] = allocate(DType::kInt32, {experts + 1});
  in["expert_counts"] = allocate(DType::kInt32, {experts});
  for (const auto& [e, begin, rows] : groups) {
    for (int64_t after = e; after <= experts; ++after) set(in["expert_offsets"], after, begin);
    set(in["expert_counts"], e, rows);
  }
  const auto expert_of = [&](int64_t row) {
    for (const auto& [e, begin, rows] : groups)
      if (begin <= row && row < begin + rows) return e;
    return int64_t{-1};
  };
  const auto at = [&](const char* name, int64_t i) { return get(in[name], i); };
  // Sums of few terms are whole in bfloat16, the others in float32.
  const Options dtypes = {
      {"out_dtype", d <= 8}, {"rows_dtype", n <= 8}, {"w_dtype", shared_outputs}};
  if (ops.contains("grouped_matmul")) {
    const TensorView out = run_op("grouped_matmul", in, dtypes)["out"];
    check_rows("grouped_matmul", out, [&](int64_t r, int64_t j) {
      const int64_t e = expert_of(r);
      double sum = e >= 0 ? at("bias", e * n + j) : 0;
      for (int64_t k = 0; e >= 0 && k < d; ++k)
        sum += at("rows", r * d + k) * at("w", (e * d + k) * n + j);
      return sum;
    });
  }
  if (ops.contains("grouped_matmul_bwd_rows")) {
    const TensorView grad_rows = run_op("grouped_matmul_bwd_rows", in, dtypes)["grad_rows"];
    check_rows("grouped_matmul_bwd_rows", grad_rows, [&](int64_t r, int64_t k) {
      const int64_t e = expert_of(r);
      double sum = 0;
      for (int64_t j = 0; e >= 0 && j < n; ++j)
        sum += at("grad_out", r * n + j) * at("w", (e * d + k) * n + j);
      return sum;
    });
  }
  const auto sums = [&](const char* op, const char* name, int64_t side, auto term) {
    if (!ops.contains(op)) return;
    const TensorView grad = run_op(op, in, dtypes)[name];
    for (const auto& [e, begin, rows] : groups) {
      for (int64_t k : {int64_t{0}, side - 1}) {
        double sum = 0;
        for (int64_t r = begin; r < begin + rows; ++r) sum += term(r, k);
        const int64_t i = width_of(grad) == n ? e * n + n - 1 : (e * d + k) * n + n - 1;
        check(std::string(op) + " " + std::to_string(e), get(grad, i), sum);
      }
    }
  };
  const auto last = [&](int64_t r) { return at("grad_out", r * n + n - 1); };
  sums("grouped_matmul_bwd_w", "grad_w", d,
       [&](int64_t r, int64_t k) { return at("rows", r * d + k) * last(r); });
  sums("grouped_matmul_bwd_bias", "grad_bias", 1, [&](int64_t r, int64_t) { return last(r); });
  release();
}

void experts() {
  constexpr int64_t kWide = 4096;
  const auto groups = [](int64_t rows) {
    return std::vector<Group>{
        {0, 0, 70}, {3, rows / 2 - 9, 30}, {5, rows - 90, 40}, {6, rows - 50, 49}};
  };
  // Large operands of small results.
  constexpr int64_t kRows = kMany / kWide + 200;
  multiply(7, kWide, 8, kRows, groups(kRows), {"grouped_matmul", "grouped_matmul_bwd_w"});
  multiply(7, 8, kWide, kRows, groups(kRows),
           {"grouped_matmul_bwd_rows", "grouped_matmul_bwd_w", "grouped_matmul_bwd_bias"});
  // Large results, which are cleared as a whole: all of their pages lie on a few.
  constexpr int64_t kHalf = kMany / 2 / kWide + 200;
  shared_outputs = true;
  multiply(7, 8, kWide, kHalf, groups(kHalf), {"grouped_matmul"});
  multiply(7, kWide, 8, kHalf, groups(kHalf), {"grouped_matmul_bwd_rows"});
  constexpr int64_t kSide = 2048, kFew = kMany / 2 / (kSide * kSide) + 2;
  multiply(kFew, kSide, kSide, 4, {{0, 0, 1}, {kFew / 2, 1, 1}, {kFew - 1, 2, 1}},
           {"grouped_matmul_bwd_w"});
  shared_outputs = false;
  constexpr int64_t kExperts = kMany / (kSide * kSide) + 2;
  multiply(kExperts, kSide, kSide, 4, {{0, 0, 1}, {kExperts / 2, 1, 1}, {kExperts - 1, 2, 1}},
           {"grouped_matmul", "grouped_matmul_bwd_rows"});
}

// One product of many elements.
void gate() {
  constexpr int64_t kWidth = int64_t{1} << 20, kTokens = kMany / 2 / kWidth + 200, kExperts = 8;
  Tensors in = {{"x", drawn({kTokens, kWidth})}, {"router", drawn({kWidth, kExperts})}};
  in["token_mask"] = allocate(DType::kBool, {kTokens});
  std::memset(in["token_mask"].data, 1, kTokens);
  set(in["token_mask"], kTokens / 2, 0);
  check_rows("gate", run_op("gate", in)["logits"], [&](int64_t t, int64_t e) {
    double sum = 0;
    for (int64_t k = 0; t != kTokens / 2 && k < kWidth; ++k)
      sum += get(in["x"], t * kWidth + k) * get(in["router"], k * kExperts + e);
    return sum;
  });
  release();
}

// Matrices of tokens by experts. Every token has expert 0 but those that are checked.
void dense_routing() {
  constexpr int64_t kExperts = 1024, kTokens = kMany / kExperts + 3;
  const Options options = {{"num_experts", kExperts}, {"num_bytes", kExperts / 8}, {"top_k", 1}};
  Tensors in = {{"weights", drawn({kTokens, 1}, DType::kFloat32)}};
  in["indices"] = allocate(DType::kInt32, {kTokens, 1});
  in["grad_probs"] = drawn({kTokens, kExperts}, DType::kFloat32);
  for (int64_t t : ends(kTokens)) set(in["indices"], t, kExperts - 1 - t % 2);
  const auto marked = [&](int64_t t, int64_t e) { return e == kExperts - 1 - t % 2; };
  check_rows("scatter_weights", run_op("scatter_weights", in, options)["probs"],
             [&](int64_t t, int64_t e) { return marked(t, e) ? get(in["weights"], t) : 0; });
  check_rows("scatter_weights_bwd", run_op("scatter_weights_bwd", in, options)["grad_weights"],
             [&](int64_t t, int64_t) {
               return get(in["grad_probs"], t * kExperts + kExperts - 1 - t % 2);
             });
  check_rows("mark_experts", run_op("mark_experts", in, options)["routing_map"], marked);
  check_rows("mark_expert_bits", run_op("mark_expert_bits", in, options)["routing_map"],
             [&](int64_t t, int64_t b) { return b < kExperts / 8 - 1 ? 0
                                                : t % 2              ? 0x40
                                                                     : 0x80; });
  // Equal logits in all rows but these, whose best expert alone has a score.
  in["logits"] = allocate(DType::kBFloat16, {kTokens, kExperts});
  in["grad_scores"] = in["grad_probs"];
  for (int64_t t : ends(kTokens)) set(in["logits"], t * kExperts + kExperts - 1 - t % 2, 512);
  check_rows("normalize_scores", run_op("normalize_scores", in, options)["scores"], marked);
  check_rows("normalize_scores_bwd", run_op("normalize_scores_bwd", in, options)["grad_logits"],
             [](int64_t, int64_t) { return 0; });
  const Options route = {{"top_k", 1},       {"num_sequences", 1}, {"num_groups", 1},
                         {"group_top_k", 1}, {"group_score_k", 1}, {"scale", 2}};
  executor.long_tasks = true;
  const Tensors routed = run_op("route", {{"logits", in["logits"]}}, route);
  executor.long_tasks = false;
  for (int64_t t : {int64_t{0}, kTokens - 1}) {
    check("route " + std::to_string(t), get(routed.at("indices"), t), kExperts - 1 - t % 2);
    check("route weight " + std::to_string(t), get(routed.at("weights"), t), 2);
  }
  release();
}

// Slot numbers are int32.
void refuse_too_many_slots() {
  constexpr int64_t kTokens = int64_t{1} << 28, kTopK = 8;
  const TensorView slots = allocate(DType::kInt32, {kTokens, kTopK});
  const TensorView row = allocate(DType::kInt32, {1}), x = allocate(DType::kBFloat16, {kTokens, 1});
  const Tensors in = {{"indices", slots}, {"row_of_slot", slots}, {"slot_of_row", row}, {"x", x}};
  for (const char* op : {"plan_dispatch", "permute", "scatter_weights_bwd"}) {
    Tensors given = in;
    given["grad_probs"] = x;
    std::string message;
    run_op(op, given, {{"num_experts", 1}, {"num_rows", 1}, {"alignment", 1}, {"probs_dtype", 1}},
           &message);
    check(std::string(op) + " of 2^31 slots: " + message,
          message.find("must stay below 2^31, got 268435456 * 8") != std::string::npos, true);
  }
  release();
}

int main() {
  refuse_too_many_slots();
  for (bool weighted : {false, true}) move_rows(weighted);
  elementwise();
  experts();
  gate();
  dense_routing();
  std::printf("%lld comparisons, %lld faults\n", static_cast<long long>(checks),
              static_cast<long long>(faults));
  return faults != 0;
}
