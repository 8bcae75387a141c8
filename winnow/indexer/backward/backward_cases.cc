// The entry of indexer::backward in the list of operations: its cases against the oracle.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "winnow/indexer/backward/backward.h"
#include "winnow/indexer/backward/backward_contract.h"
#include "winnow/indexer/backward/backward_oracle.h"
#include "winnow/indexer/cases.h"
#include "winnow/testing/repeated.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> backward_benchmarks();
testing::Operation backward_operation();

namespace {

// What can be asked of backward beside the problem itself.
struct Variant {
  std::string suffix;
  bool dense = false;  // d_scores of every row, without indices
  bool as_q = false;   // dq and dk in the dtype of q, d_weights in that of the weights
  bool deterministic = false;
  double magnitude = 1;  // of d_scores
};

// Any rows, some outside of the keys and some that are not visible; repeats occur.
StridedTensor make_indices(const CaseShape& shape, Layout layout, winnow::testing::Random& random) {
  StridedTensor indices = make_tensor(DType::i32, {shape.s_q, shape.topk}, layout);
  constexpr std::int32_t kFar[] = {std::numeric_limits<std::int32_t>::min(),
                                   std::numeric_limits<std::int32_t>::max()};
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    for (std::int64_t j = 0; j < shape.topk; ++j) {
      const std::int64_t row = random.below(shape.s_k + 4) - 2;
      indices.view.at<std::int32_t>(i, j) =
          random.below(50) == 0 ? kFar[j % 2] : static_cast<std::int32_t>(row);
    }
  }
  return indices;
}

bool same_bits(const ConstTensorView& a, const ConstTensorView& b) {
  const std::vector<double> one = winnow::testing::read(a), other = winnow::testing::read(b);
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size() * sizeof(double)) == 0);
}

testing::CaseOutcome run(const CaseShape& shape, const Variant& variant,
                         const testing::Target& target) {
  const Device device = testing::device_of(target);
  const CaseInputs inputs = make_inputs(shape);
  const CaseInputs inputs_there = inputs.on(device);
  const oracle::Inputs in = inputs.for_oracle();
  winnow::testing::Random random(winnow::testing::seed_from(shape.name + "-backward"));
  const Layout layout = shape.layout == Layout::broadcast ? Layout::wide : shape.layout;

  StridedTensor indices;
  if (!variant.dense) indices = make_indices(shape, layout, random);
  const std::int64_t columns = variant.dense ? shape.s_k : shape.topk;
  const StridedTensor d_scores = make_tensor(DType::f32, {shape.s_q, columns}, layout);
  winnow::testing::fill_normal(d_scores.view, random);
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t t = variant.dense ? j : indices.view.at<std::int32_t>(i, j);
      float& d_score = d_scores.view.at<float>(i, j);
      d_score *= static_cast<float>(variant.magnitude);
      if (!oracle::visible(in, i, t)) d_score = std::nanf("");
    }
  }

  const auto output = [&](bool as_input, DType dtype, std::vector<std::int64_t> dims) {
    const DType narrow = dtype == DType::f8_e4m3 ? DType::bf16 : dtype;
    return testing::on(device, make_output(as_input ? narrow : DType::f32, dims, shape.layout));
  };
  // Outputs of a call, on the device.
  struct Outputs {
    StridedTensor dq, dk, d_weights;
  };
  const auto outputs = [&] {
    return Outputs{output(variant.as_q, shape.dtype, {shape.s_q, shape.h, shape.d}),
                   output(variant.as_q, shape.dtype, {shape.s_k, shape.d}),
                   output(variant.as_q, shape.weights_dtype, {shape.s_q, shape.h})};
  };
  StridedTensor indices_there = testing::on(device, indices);
  if (!variant.dense && shape.topk == 0) {  // as frameworks give what has no elements
    indices_there.view = TensorView(nullptr, DType::i32, indices.view.shape(), device);
  }
  const StridedTensor d_scores_there = testing::on(device, d_scores);
  const auto call = [&](const Outputs& to) {
    BackwardArgs args{.indices = indices_there.view,
                      .d_scores = d_scores_there.view,
                      .deterministic = variant.deterministic,
                      .dq = to.dq.view,
                      .dk = to.dk.view,
                      .d_weights = to.d_weights.view};
    inputs_there.pass_to(args);
    return backward(args, target.options);
  };
  const Outputs there = outputs();
  testing::CaseOutcome outcome;
  outcome.backend = call(there);
  if (variant.deterministic) {
    const Outputs again = outputs();
    call(again);
    testing::Comparison same{"the same again", 0, 0, true, ""};
    for (const auto& [one, other] :
         {std::pair{&there.dq, &again.dq}, std::pair{&there.dk, &again.dk},
          std::pair{&there.d_weights, &again.d_weights}}) {
      const StridedTensor a = testing::on({}, *one), b = testing::on({}, *other);
      same.passed = same.passed && same_bits(a.view, b.view);
    }
    outcome.comparisons.push_back(same);
  }

  const oracle::Backward expected =
      oracle::backward(in, indices.view, d_scores.view, score_tolerance(shape.dtype));
  const auto compare = [&](std::string_view what, const StridedTensor& output_there,
                           const oracle::Gradient& gradient, DType narrowest) {
    const StridedTensor actual = testing::on({}, output_there);
    outcome.comparisons.push_back(testing::check_written(what, actual));
    outcome.comparisons.push_back(winnow::testing::compare(
        what, oracle::forgive(winnow::testing::read(actual.view), gradient), gradient.value,
        actual.view.shape(), gradient_tolerance(narrowest)));
    // Of a dot product that may count or not, each of two machines decides for itself.
    std::vector<double> allowed = winnow::testing::allowed_errors(
        gradient.value, actual.view.shape(), gradient_tolerance(narrowest));
    for (std::size_t n = 0; n < allowed.size(); ++n) allowed[n] += gradient.slack[n];
    outcome.samples.push_back(winnow::testing::sample(what, actual.view, allowed));
  };
  compare("dq", there.dq, expected.dq, shape.dtype);
  compare("dk", there.dk, expected.dk, shape.dtype);
  compare("d_weights", there.d_weights, expected.d_weights,
          shape.dtype == DType::f32 ? there.d_weights.view.dtype() : shape.dtype);
  return outcome;
}

}  // namespace

testing::Operation backward_operation() {
  testing::Operation operation;
  operation.name = "indexer::backward";
  operation.summary = "gradients of the lightning indexer's scores";
  operation.repeat = testing::repeated(kBackward, backward);
  const auto add = [&](const CaseShape& shape, const Variant& variant) {
    operation.cases.push_back(
        {shape.name + variant.suffix, describe(shape),
         [shape, variant](const testing::Target& target) { return run(shape, variant, target); },
         on_gpu(shape), 0, testing::cuda_for_f16(shape)});
  };
  for (CaseShape shape : case_shapes()) {
    if (shape.ties == Ties::larger && shape.order != Order::random) continue;
    // Where one row is named many times its gradients cancel, and what bf16 rounded away shows.
    if (shape.s_k == 1) shape.topk = 4;
    add(shape, {});
    const auto named = [&](const char* name) {
      return shape.name == std::string(to_string(shape.dtype)) + "-" + name;
    };
    if (shape.s_q * shape.s_k * shape.h < 200'000) add(shape, {.suffix = "-dense", .dense = true});
    if (named("h64") && shape.dtype != DType::f8_e4m3) {  // far outside of what f16 holds
      add(shape, {.suffix = "-tiny", .magnitude = 0x1p-60});
      add(shape, {.suffix = "-huge", .deterministic = true, .magnitude = 0x1p60});
    }
    for (const char* name : {"h16", "h96", "h128", "d64-h16", "d64-h64", "sq300", "all-rules",
                             "wide", "weights-bf16", "sk0"}) {
      if (!named(name)) continue;
      add(shape, {.suffix = "-as-q", .as_q = true});
      add(shape, {.suffix = "-deterministic", .deterministic = true});
      CaseShape dense = shape;
      if (named("sq300")) dense.s_k = 200;  // four tiles a query, as the simulator takes its time
      add(dense,
          {.suffix = "-dense-all-options", .dense = true, .as_q = true, .deterministic = true});
    }
  }
  // No row is chosen: every gradient is 0.
  for (const DType dtype : {DType::f32, DType::bf16, DType::f8_e4m3}) {
    for (const auto& [s_q, s_k] : {std::pair(1, 1), std::pair(3, 300)}) {
      const CaseShape shape{
          .name = std::string(to_string(dtype)) + winnow::testing::numbered("-sq", s_q) + "-k0",
          .dtype = dtype,
          .s_q = s_q,
          .s_k = s_k,
          .topk = 0};
      add(shape, {});
      add(shape, {.suffix = "-deterministic", .deterministic = true});
    }
  }
  // Many items for every block of a GPU, every other one without entries.
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const CaseShape shape{.name = std::string(to_string(dtype)) + "-sq1200",
                          .dtype = dtype,
                          .s_q = 1200,
                          .h = 3,
                          .s_k = 200,
                          .topk = 150,
                          .ranges = Ranges::empty};
    add(shape, {});
    add(shape, {.suffix = "-deterministic", .deterministic = true});
    add(shape, {.suffix = "-dense", .dense = true});
  }
  operation.benchmarks = backward_benchmarks();
  return operation;
}

}  // namespace winnow::indexer
