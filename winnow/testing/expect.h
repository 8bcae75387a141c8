// Expectations that the tests of several rooms share. Only for tests: needs GoogleTest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/error.h"
#include "winnow/core/parallel.h"
#include "winnow/core/tensor.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"

namespace winnow::testing {

// `call` throws an Error of this code whose what() is exactly `text`.
inline void expect_error(const std::function<void()>& call, ErrorCode code,
                         const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error; wanted: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(text, error.what());
    EXPECT_EQ(int(code), int(error.code())) << text;
  }
}

// The operation's function refuses the arguments with "<operation>: <text>", and so it does in a
// dry run, unless it then cannot know. It writes nothing: each of `outputs` is as fill_unwritten()
// left it.
template <class Args>
void expect_refused(Backend (*function)(const Args&, const RunOptions&), const Args& args,
                    const std::string& text, const std::vector<ConstTensorView>& outputs,
                    bool dry = true) {
  for (const bool dry_run : {false, true}) {
    if (dry_run && !dry) continue;
    expect_error([&] { function(args, {.dry_run = dry_run}); }, ErrorCode::invalid_argument, text);
  }
  for (const ConstTensorView& output : outputs) {
    EXPECT_EQ(count_unwritten(output), output.numel()) << text;
  }
}

// The number of threads while this lives.
class Threads {
 public:
  explicit Threads(int number) { set_num_threads(number); }
  ~Threads() { set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  const int before_ = num_threads();
};

// The number in an environment variable, such as WINNOW_SOAK_ITERATIONS.
inline std::int64_t environment_number(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

inline RunOptions forced(Backend backend) {
  RunOptions options;
  options.backend = backend;
  return options;
}

// The view at an address without memory, for dry runs: touching it ends the test.
template <class View>
View without_memory(const View& view) {
  if (!view.present()) return view;
  static constexpr std::uintptr_t kNowhere = 4096;
  return {reinterpret_cast<decltype(view.data())>(kNowhere), view.dtype(), view.shape(),
          view.strides(), view.device()};
}

inline void expect_passed(const Comparison& comparison) {
  EXPECT_TRUE(comparison.passed) << comparison.what << ": error " << comparison.error
                                 << ", tolerance " << comparison.tolerance << "; "
                                 << comparison.detail;
}

inline void expect_passed(const std::vector<Comparison>& comparisons) {
  EXPECT_FALSE(comparisons.empty());
  for (const Comparison& comparison : comparisons) expect_passed(comparison);
}

// Every comparison of a row of the case table.
inline void expect_case_passes(std::string_view operation, const Case& test) {
  const CaseOutcome outcome = test.run({});
  EXPECT_EQ(to_string(outcome.backend), to_string(Backend::cpu));
  expect_passed(outcome.comparisons);
  EXPECT_TRUE(outcome.passed()) << test.shape << "\nagain with: winnow verify " << operation
                                << " --case " << test.name;
}

inline const Operation& operation_named(std::string_view name) {
  for (const Operation& operation : operations()) {
    if (operation.name == name) return operation;
  }
  throw Error(ErrorCode::internal, "testing", "no operation " + std::string(name));
}

class CaseTest : public ::testing::Test {
 public:
  CaseTest(const std::string& operation, const Case& test) : operation_(operation), test_(test) {}
  void TestBody() override { expect_case_passes(operation_, test_); }

 private:
  const std::string operation_;
  const Case& test_;
};

inline bool register_case_table(const std::string& suite, const std::string& operation,
                                const char* file, int line) {
  for (const Case& test : operation_named(operation).cases) {
    std::string name = test.name;
    std::replace(name.begin(), name.end(), '-', '_');  // GoogleTest accepts no '-'
    ::testing::RegisterTest(("Table/" + suite).c_str(), ("MatchesTheOracle/" + name).c_str(),
                            nullptr, test.shape.c_str(), file, line,
                            [operation, &test] { return new CaseTest(operation, test); });
  }
  return true;
}

// Defines the tests Table/Suite.MatchesTheOracle/CASE of an operation's case table. (What TEST_P
// makes of a suite takes the compiler longer than most tests.)
#define WINNOW_CASE_TABLE(Suite, operation)        \
  [[maybe_unused]] const bool registered_##Suite = \
      ::winnow::testing::register_case_table(#Suite, operation, __FILE__, __LINE__)

// The same bytes, padding included. Both are dense and of the same size.
inline bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.numel() == b.numel() && a.dtype() == b.dtype() &&
         (a.numel() == 0 ||
          std::memcmp(a.data(), b.data(), std::size_t(a.numel() * size_of(a.dtype()))) == 0);
}

// Every element of the tensor has this value; NaN stands for NaN.
inline void expect_all(const ConstTensorView& view, double value) {
  const std::vector<double> expected(static_cast<std::size_t>(view.numel()), value);
  expect_passed(compare("tensor of one value", view, expected, {0, RelativeTo::nothing}));
}

}  // namespace winnow::testing
