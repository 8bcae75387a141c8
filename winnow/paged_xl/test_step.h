// What the tests of the operations on a paged cache share. Needs GoogleTest.
#pragma once

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/error.h"
#include "winnow/paged_xl/attention/attention_oracle.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/testing/expect.h"

namespace winnow::paged_xl {

// The output of a step, compared with the oracle.
inline Tensor run_checked(const AttentionArgs& inputs) {
  AttentionArgs args = inputs;
  Tensor out(args.query.dtype(), args.query.shape());
  Tensor lse(accumulator_of(args.query.dtype()), {args.query.size(0), args.query.size(1)});
  args.out = out;
  args.lse = lse;
  attention(args);
  const oracle::Attention expected = oracle::attention(args);
  testing::expect_passed(testing::compare(
      "out", out, expected.out, tolerance(Quantity::out, out.dtype(), expected.largest_logit)));
  testing::expect_passed(testing::compare(
      "lse", lse, expected.lse, tolerance(Quantity::lse, lse.dtype(), expected.largest_logit)));
  return out;
}

// The output of a step.
inline Tensor run(const AttentionArgs& inputs) {
  AttentionArgs args = inputs;
  Tensor out(args.query.dtype(), args.query.shape());
  args.out = out;
  attention(args);
  return out;
}

// `call` refuses an argument; what() begins with `text`.
template <class Call>
void expect_refusal(const Call& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error; wanted: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_THAT(error.what(), ::testing::StartsWith(text));
  }
}

}  // namespace winnow::paged_xl
