// Expectations that the tests of several rooms share. Only for tests: needs GoogleTest.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ostream>
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
template <class Call>
void expect_error(const Call& call, ErrorCode code, const std::string& text) {
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

// How GoogleTest shows a case.
inline void PrintTo(const Case& test, std::ostream* stream) { *stream << test.shape; }

// A name that GoogleTest accepts.
inline std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  for (char& letter : name) {
    if (letter == '-') letter = '_';
  }
  return name;
}

inline const Operation& operation_named(std::string_view name) {
  for (const Operation& operation : operations()) {
    if (operation.name == name) return operation;
  }
  throw Error(ErrorCode::internal, "testing", "no operation " + std::string(name));
}

// Defines the tests Table/Suite.MatchesTheOracle/CASE of an operation's case table.
#define WINNOW_CASE_TABLE(Suite, operation)                                                   \
  class Suite : public ::testing::TestWithParam<::winnow::testing::Case> {};                  \
  TEST_P(Suite, MatchesTheOracle) {                                                           \
    ::winnow::testing::expect_case_passes(operation, GetParam());                             \
  }                                                                                           \
  INSTANTIATE_TEST_SUITE_P(                                                                   \
      Table, Suite, ::testing::ValuesIn(::winnow::testing::operation_named(operation).cases), \
      ::winnow::testing::test_name)

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
