// The modules of the CPU backend: each that runs here is as right as the others, is built for what
// its name says, and can be forced.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/core/executor.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/forward/forward_impl.h"
#include "winnow/sparse_mla/forward/forward_oracle.h"
#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"

namespace winnow {
namespace {

TEST(CpuModules, StandOnceAndTheMostDemandingFirst) {
  // A build may leave out modules (WINNOW_CPU_ISAS), but not change their order.
  const std::vector<std::string> order = {"x86_64_v4", "x86_64_v3", "baseline"};
  ASSERT_FALSE(cpu_modules().empty());
  auto next = order.begin();
  for (const CpuModule& module : cpu_modules()) {
    const auto found = std::find(next, order.end(), module.kernels->name);
    ASSERT_NE(found, order.end()) << module.kernels->name << " is unknown, twice or out of order";
    next = found + 1;
    EXPECT_TRUE(module.runs_here || *found != "baseline");
  }
}

TEST(CpuModules, InstructionsAreThoseOfTheName) {
  for (const CpuModule& module : cpu_modules()) {
    const std::string name = module.kernels->name, instructions = module.kernels->instructions;
    if (name == "x86_64_v4") {
      EXPECT_EQ(instructions, "AVX-512");
    } else if (name == "x86_64_v3") {
      EXPECT_EQ(instructions, "AVX2");
    } else {
#ifdef __x86_64__
      EXPECT_EQ(instructions, "SSE2") << name;
#else
      EXPECT_EQ(instructions, "baseline") << name;
#endif
    }
  }
}

TEST(CpuModules, TheFirstThatRunsHereIsChosen) {
  if (std::getenv("WINNOW_CPU_ISA") != nullptr) GTEST_SKIP() << "WINNOW_CPU_ISA is set";
  for (const CpuModule& module : cpu_modules()) {
    if (!module.runs_here) continue;
    EXPECT_EQ(&cpu_kernels(), module.kernels);
    return;
  }
}

TEST(CpuModules, EachGivesTheSameForward) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    const sparse_mla::CaseShape shape{
        .name = "modules", .dtype = dtype, .h_q = 16, .topk = 100, .poison = false};
    const sparse_mla::CaseInputs inputs = sparse_mla::make_inputs(shape);
    const std::vector<std::int64_t> queries = sparse_mla::checked_queries(shape);
    const auto expected = sparse_mla::oracle::forward(inputs.for_oracle(), queries);
    sparse_mla::Problem problem;
    problem.dtype = dtype;
    problem.s_q = shape.s_q;
    problem.h_q = shape.h_q;
    problem.s_kv = shape.s_kv;
    problem.d_qk = shape.d_qk;
    problem.topk = shape.topk;
    problem.scale = round_to_accumulator(dtype, inputs.for_oracle().logit_scale());
    problem.q = rows_of<const void*>(inputs.q.view, 0, 1);
    problem.kv = rows_of<const void*>(inputs.kv.view, 0);
    problem.indices = rows_of<const std::int32_t*>(inputs.indices.view, 0);
    for (const CpuModule& module : cpu_modules()) {
      if (!module.runs_here) continue;
      SCOPED_TRACE(module.kernels->name);
      Tensor out(dtype, {shape.s_q, shape.h_q, 512}),
          lse(accumulator_of(dtype), {shape.s_q, shape.h_q});
      sparse_mla::ForwardParams params;
      params.problem = problem;
      params.out = rows_of<void*>(out.view(), 0, 1);
      params.lse = rows_of<void*>(lse.view(), 0);
      module.kernels->sparse_mla_forward(params, ThreadExecutor());
      using sparse_mla::Quantity;
      testing::expect_passed(testing::compare(
          "out", out, expected.out, tolerance(Quantity::out, shape, expected.largest_logit)));
      testing::expect_passed(testing::compare(
          "lse", lse, expected.lse, tolerance(Quantity::lse, shape, expected.largest_logit)));
    }
  }
}

TEST(CpuModules, EachMultipliesMatrices) {
  constexpr std::int64_t kM = 37, kN = 21, kK = 65;
  Tensor a(DType::f32, {kM, kK}), b(DType::f32, {kK, kN});
  testing::Random random(5);
  testing::fill_normal(a, random);
  testing::fill_normal(b, random);
  std::vector<double> expected(kM * kN, 0.0);
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t n = 0; n < kN; ++n) {
      for (std::int64_t k = 0; k < kK; ++k) {
        expected[m * kN + n] += double(a.view().at<float>(m, k)) * b.view().at<float>(k, n);
      }
    }
  }
  for (const CpuModule& module : cpu_modules()) {
    if (!module.runs_here) continue;
    Tensor c(DType::f32, {kM, kN});
    testing::fill_unwritten(c);
    module.kernels->matmul(a.values<float>().data(), b.values<float>().data(),
                           c.values<float>().data(), kM, kN, kK, ThreadExecutor());
    testing::expect_passed(
        testing::compare(module.kernels->name, c, expected,
                         tolerance(sparse_mla::Quantity::out, sparse_mla::CaseShape{}, 1)));
  }
}

// Runs this program again as `WINNOW_CPU_ISA=isa select_test` with the test below, which may be
// of another shard, and returns what it said.
std::string with_isa(const std::string& isa) {
  char program[4096] = {};
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) <= 0) return "no /proc/self/exe";
  const std::string command =
      "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX WINNOW_CPU_ISA='" + isa + "' '" + program +
      "' --gtest_also_run_disabled_tests --gtest_filter=CpuModules.DISABLED_SayWhichIsChosen 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "no pipe";
  std::string output;
  char line[512];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) output += line;
  pclose(pipe);
  return output;
}

TEST(CpuModules, DISABLED_SayWhichIsChosen) {
  try {
    sparse_mla::TestProblem problem;
    sparse_mla::forward(sparse_mla::ForwardOp::args(problem));
    std::printf("ran on %s\n", cpu_kernels().name);
  } catch (const Error& error) {
    std::printf("%d %s\n", int(error.code()), error.what());
  }
}

TEST(CpuModules, EnvironmentForcesAModule) {
  for (const CpuModule& module : cpu_modules()) {
    const std::string name = module.kernels->name, output = with_isa(name);
    const std::string wanted = module.runs_here ? "ran on " + name + "\n" : "WINNOW_CPU_ISA";
    EXPECT_NE(output.find(wanted), std::string::npos) << output;
  }
  EXPECT_NE(with_isa("").find("ran on "), std::string::npos);
}

TEST(CpuModules, UnknownModulesAreRefused) {
  std::string known;
  for (const CpuModule& module : cpu_modules()) {
    known += std::string(known.empty() ? "" : ", ") + module.kernels->name +
             (module.runs_here ? "" : " (not on this processor)");
  }
  const std::string wanted = std::to_string(int(ErrorCode::unsupported)) +
                             " cpu_kernels: WINNOW_CPU_ISA: want one of " + known + ", got z80\n";
  const std::string output = with_isa("z80");
  EXPECT_NE(output.find(wanted), std::string::npos) << output;
}

}  // namespace
}  // namespace winnow
