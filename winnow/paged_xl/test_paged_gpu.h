// What the GPU tests of the operations on a paged cache share: a step runs on the GPU, and the CPU
// backend is the reference. Needs GoogleTest.
#pragma once

#include "winnow/core/device_memory.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/paged_xl/test_step.h"
#include "winnow/testing/gpu_test.h"

namespace winnow::paged_xl {

inline constexpr Device kGpu{DeviceType::cuda, 0};
inline constexpr Mode kModes[] = {Mode::plain, Mode::fused};

using PagedGpu = testing::GpuTest<Backend::cuda>;

struct Result {
  Tensor out, lse;  // on the host
};

// Runs on the device of the inputs; the outputs are filled with NaN before the call.
inline Result run_there(const AttentionArgs& inputs, const RunOptions& options = {}) {
  const Device device = inputs.query.device();
  Tensor out(inputs.query.dtype(), inputs.query.shape());
  Tensor lse(DType::f32, {inputs.query.size(0), inputs.query.size(1)});
  testing::fill_unwritten(out);
  testing::fill_unwritten(lse);
  out = out.to(device);
  lse = lse.to(device);
  AttentionArgs args = inputs;
  args.out = out;
  args.lse = lse;
  attention(args, options);
  return {out.to({}), lse.to({})};
}

inline void expect_same(const Result& gpu, const Result& cpu) {
  constexpr double kLargestLogit = 12;  // none is larger with queries and keys of variance 1
  testing::expect_passed(
      testing::compare("out", gpu.out, testing::read(cpu.out.view()),
                       tolerance(Quantity::out, cpu.out.dtype(), kLargestLogit)));
  testing::expect_passed(testing::compare("lse", gpu.lse, testing::read(cpu.lse.view()),
                                          tolerance(Quantity::lse, DType::f32, kLargestLogit)));
}

// The same step on the GPU and on the CPU.
inline void expect_same(const Step& step) {
  expect_same(run_there(step.on(kGpu).attention_args()), run_there(step.attention_args()));
}

inline bool same_bytes(const Result& a, const Result& b) {
  return testing::same_bytes(a.out, b.out) && testing::same_bytes(a.lse, b.lse);
}

}  // namespace winnow::paged_xl
