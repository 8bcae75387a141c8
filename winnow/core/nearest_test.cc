#include "winnow/core/nearest.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"

namespace winnow {
namespace {

const std::vector<std::string> kKnown = {"indexer",    "indexer::topk",       "indexer::topk_paged",
                                         "sparse_mla", "sparse_mla::forward", "sparse_mla::store"};

TEST(Nearest, IsTheWordOfTheFewestChanges) {
  const auto meant = [](const std::string& given) { return suggestion(given, kKnown); };
  EXPECT_EQ(meant("sparse_mla::foward"), "; did you mean sparse_mla::forward?");
  EXPECT_EQ(meant("sparse_mla.forward"), "; did you mean sparse_mla::forward?");
  EXPECT_EQ(meant("indexer::top_paged"), "; did you mean indexer::topk_paged?");
  EXPECT_EQ(meant("sparse-mla"), "; did you mean sparse_mla?");
  EXPECT_EQ(meant("indexers"), "; did you mean indexer?");
}

TEST(Nearest, KnowsOperationsWithoutTheirFamily) {
  const auto meant = [](const std::string& given) { return suggestion(given, kKnown); };
  EXPECT_EQ(meant("topkk"), "; did you mean indexer::topk?");
  EXPECT_EQ(meant("topk_pagd"), "; did you mean indexer::topk_paged?");
  EXPECT_EQ(meant("forwrad"), "; did you mean sparse_mla::forward?");
}

TEST(Nearest, MayBeABeginningOrAnEnd) {
  const auto meant = [](const std::string& given) { return suggestion(given, kKnown); };
  EXPECT_EQ(meant("forward"), "; did you mean sparse_mla::forward?");
  EXPECT_EQ(meant("in"), "; did you mean indexer?");
  EXPECT_EQ(meant("sparse_mla::forward_of_another_kind"), "; did you mean sparse_mla::forward?");
}

TEST(Nearest, IsNoneWhereNothingIsNear) {
  const std::vector<std::string> far = {"", "matmul", "xyz", std::string(100'000, 'a')};
  for (const std::string& given : far) {
    EXPECT_EQ(suggestion(given, kKnown), "") << given.substr(0, 20);
  }
  EXPECT_EQ(suggestion("forward", {}), "");
}

TEST(Nearest, IsInTheRefusal) {
  const std::vector<std::string> known = {"sm90", "cpu"};
  testing::expect_error([&] { refuse_name("op", "backend", "sm9", known); },
                        ErrorCode::invalid_argument,
                        "op: backend: want one of sm90, cpu, got \"sm9\"; did you mean sm90?");
  testing::expect_error([&] { refuse_name("op", "backend", "fpga", known); },
                        ErrorCode::invalid_argument,
                        "op: backend: want one of sm90, cpu, got \"fpga\"");
}

}  // namespace
}  // namespace winnow
