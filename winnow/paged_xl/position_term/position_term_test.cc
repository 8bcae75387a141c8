// paged_xl::position_term: the case table, its convention worked by hand, rejections.
#include <cstring>

#include "winnow/paged_xl/test_step.h"

namespace winnow::paged_xl {
namespace {

using ::testing::ElementsAre;

WINNOW_CASE_TABLE(PositionTermCase, "paged_xl::position_term");

TEST(PositionTerm, TheLastTokenHasDistanceZero) {
  // r[h, distance] = (10 * h + distance, 0, ...) and query + v = (1, 0, ...): the term is its own
  // distance. Columns past the context stay as they were.
  Tensor query(DType::f32, {2, 2, 32}), v(DType::f32, {2, 32}), r(DType::f32, {2, 5, 32});
  Tensor lens(DType::i32, {2}), term(DType::f32, {2, 2, 5});
  for (std::int64_t h = 0; h < 2; ++h) {
    v.view().at<float>(h, 0) = 0.75f;
    for (std::int64_t s = 0; s < 2; ++s) query.view().at<float>(s, h, 0) = 0.25f;
    for (std::int64_t distance = 0; distance < 5; ++distance) {
      r.view().at<float>(h, distance, 0) = static_cast<float>(10 * h + distance);
    }
  }
  lens.view().at<std::int32_t>(0) = 4;
  lens.view().at<std::int32_t>(1) = 1;
  testing::fill(term, -7);
  position_term({query, v, r, lens, term});
  EXPECT_THAT(term.values<float>(), ElementsAre(3, 2, 1, 0, -7,      //
                                                13, 12, 11, 10, -7,  //
                                                0, -7, -7, -7, -7,   //
                                                10, -7, -7, -7, -7));
}

TEST(PositionTerm, SameBitsForAnyThreads) {
  const Step step = make_step({.name = "bits", .context_lens = {700, 1300, 3}});
  Tensor first(DType::f32, {3, 4, 1309}), again(DType::f32, {3, 4, 1309});
  PositionTermArgs args = step.position_term_args();
  args.matrix_bd = first;
  position_term(args);
  args.matrix_bd = again;
  for (const int threads : {1, 3, 7}) {
    const testing::Threads number(threads);
    position_term(args);
    ASSERT_EQ(std::memcmp(first.data(), again.data(), sizeof(float) * first.values<float>().size()),
              0);
  }
}

class PositionTermRejects : public ::testing::Test {
 protected:
  PositionTermRejects()
      : step_(make_step({.name = "reject", .context_lens = {20, 33, 0}})),
        term_(DType::f32, {3, 4, 40}),
        good_(step_.position_term_args()) {
    testing::fill_unwritten(term_);
    good_.matrix_bd = term_;
    args_ = good_;
  }
  // A call with args_ is refused so. Afterwards they are good again.
  void expect_error(const std::string& message) {
    expect_refusal([&] { position_term(args_); }, "paged_xl::position_term: " + message);
    args_ = good_;
    EXPECT_EQ(testing::count_unwritten(term_.view()), term_.numel());
  }
  Step step_;
  Tensor term_;
  PositionTermArgs good_, args_;
};

TEST_F(PositionTermRejects, LengthsThatDoNotFit) {
  args_.matrix_bd = term_.view().slice(2, 0, 32);
  expect_error(
      "context_lens: want 0 to 32 (matrix_bd has that many columns), got 33 for "
      "sequence 1");
  args_.r = args_.r.slice(1, 0, 19);
  expect_error("context_lens: want 0 to 19 (r holds that many distances), got 20 for sequence 0");
  step_.context_lens.view().at<std::int32_t>(2) = -1;
  expect_error(
      "context_lens: want 0 to 40 (matrix_bd has that many columns), got -1 for "
      "sequence 2");
}

TEST_F(PositionTermRejects, WrongTensors) {
  args_.matrix_bd = {};
  expect_error("matrix_bd: want a tensor [num_seqs, num_heads, columns], got none");
  args_.r = args_.r.slice(0, 0, 2);
  expect_error("r: want shape [num_heads=4");
  Tensor half(DType::f16, {3, 4, 40});
  args_.matrix_bd = half;
  expect_error("matrix_bd: want dtype f32, got f16");
  args_.matrix_bd = TensorView(term_.data(), DType::f32, {3, 4, 40}, {160, 0, 1});
  expect_error("matrix_bd: want an output whose elements do not share memory");
}

TEST_F(PositionTermRejects, AnOutputThatOverlaps) {
  args_.matrix_bd = TensorView(const_cast<void*>(args_.query.data()), DType::f32, {3, 4, 16});
  expect_error("matrix_bd: want memory apart from query, got memory that both use");
}

TEST_F(PositionTermRejects, ADryRunLooksAtNoContents) {
  PositionTermArgs args = args_;
  for (auto* view : {&args.query, &args.pos_bias_v, &args.r, &args.context_lens}) {
    *view = testing::without_memory(*view);
  }
  args.matrix_bd = testing::without_memory(args.matrix_bd);
  EXPECT_EQ(position_term(args, {.dry_run = true}), Backend::cpu);
  args.matrix_bd = {};
  expect_refusal([&] { position_term(args, {.dry_run = true}); },
                 "paged_xl::position_term: matrix_bd: want a tensor");
}

}  // namespace
}  // namespace winnow::paged_xl
