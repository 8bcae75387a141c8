// expert_parallel::AllToAll: what one rank finds wrong, every rank refuses, and the layer works on.
#include <limits>
#include <string>

#include "winnow/expert_parallel/all_to_all_test_ranks.h"
#include "winnow/testing/compare.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::HasSubstr;

// A world of three ranks on which every test makes bad calls and then a good one.
class Refusals : public ::testing::Test {
 protected:
  Refusals() : layers_(ranks_.layers(small_config(3))) {}
  ~Refusals() override { expect_working(ranks_, layers_); }

  AllToAll& layer(int rank) { return *layers_[std::size_t(rank)]; }
  // Every rank dispatches after `change` of its arguments.
  template <class Change>
  std::vector<Outcome> dispatch(const Change& change) {
    return ranks_.run([&](int rank) {
      Given given;
      change(rank, given);
      layer(rank).dispatch(given.args);
    });
  }
  template <class Change>
  void expect_refused(const std::string& text, const Change& change) {
    expect_all_refuse(dispatch(change), "expert_parallel::dispatch: " + text);
  }
  template <class Change>
  void expect_refused_with(const std::string& part, const Change& change) {
    for (const Outcome& outcome : dispatch(change)) {
      EXPECT_THAT(outcome.text, HasSubstr(part));
      EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    }
  }

  Ranks ranks_{3};
  Layers layers_;
};

TEST_F(Refusals, MoreTokensThanMaxTokens) {
  expect_refused_with("rank 1: input", [](int rank, Given& given) {
    if (rank == 1) given = Given(5);
  });
}

TEST_F(Refusals, BadExpertIndices) {
  constexpr int kBig = std::numeric_limits<int>::max(), kSmall = std::numeric_limits<int>::min();
  for (const int bad : {7, -2, kBig, kSmall}) {
    expect_refused(
        "rank 2: expert_indices: want -1 to 6, got " + std::to_string(bad) + " for token 1",
        [&](int rank, Given& given) {
          if (rank == 2) given.indices.view().at<std::int32_t>(1, 1) = bad;
        });
  }
}

TEST_F(Refusals, OfTheLowestRankThatHasOne) {
  expect_refused_with("rank 0: expert_indices", [](int rank, Given& given) {
    if (rank != 1) given.indices.view().at<std::int32_t>(2, 0) = 99;
  });
}

TEST_F(Refusals, WrongTensors) {
  const Tensor narrow(DType::f32, {3, 4}), half(DType::f16, {3, 16}), fp8(DType::f8_e4m3, {3, 16});
  const Tensor wide_indices(DType::i32, {3, 3}), long_indices(DType::i64, {3, 2});
  const Tensor scales(DType::f32, {3, 1});
  const auto expect = [&](const std::string& argument, const auto& change) {
    expect_refused_with("rank 1: " + argument, [&](int rank, Given& given) {
      if (rank == 1) change(given.args);
    });
  };
  expect("input", [&](DispatchArgs& args) { args.input = narrow; });
  expect("input", [&](DispatchArgs& args) { args.input = half; });
  expect("input", [&](DispatchArgs& args) { args.input = {}; });
  expect("expert_indices", [&](DispatchArgs& args) { args.expert_indices = wide_indices; });
  expect("expert_indices", [&](DispatchArgs& args) { args.expert_indices = long_indices; });
  expect("expert_indices", [&](DispatchArgs& args) { args.expert_indices = {}; });
  expect("weights", [&](DispatchArgs& args) { args.weights = narrow; });
  expect("scales", [&](DispatchArgs& args) { args.input = fp8; });
  expect("scales", [&](DispatchArgs& args) { args.scales = scales; });
  expect("expert_alignment", [&](DispatchArgs& args) { args.expert_alignment = 0; });
  expect("worst_case_rows", [&](DispatchArgs& args) { args.worst_case_rows = -1; });
  expect("expert_alignment", [&](DispatchArgs& args) {
    args.order = RowOrder::token_major;
    args.expert_alignment = 4;
  });
}

TEST_F(Refusals, AnOutThatIsTooSmall) {
  // 3 ranks of 3 tokens and 2 pairs: 18 rows, all on rank 0.
  Tensor out[3];
  const auto give = [&](int rank, Given& given) { given.args.out = out[rank]; };
  const auto make = [&](std::int64_t rows, std::int64_t of_others, DType dtype = DType::f32) {
    for (Tensor& one : out) one = Tensor(dtype, {of_others, 16});
    out[0] = Tensor(dtype, {rows, 16});
  };
  make(17, 0);
  expect_refused("out: want 18 rows or more on rank 0, got 17", give);
  for (const float value : out[0].values<float>()) EXPECT_EQ(value, 0);  // no row has moved
  make(18, 0);
  expect_all_return(dispatch(give));
  make(18, 20, DType::f16);
  expect_refused_with("rank 0: out: want dtype f32", give);
  const auto expect = [&](const std::string& text, std::int64_t rows, const auto& change) {
    make(rows, rows);
    expect_refused_with("rank 1: out: " + text, [&](int rank, Given& given) {
      given.args.worst_case_rows = 20;
      give(rank, given);
      if (rank == 1) change(given.args.out);
    });
  };
  expect("want 20 rows or more, got 19", 20, [](TensorView& view) { view = view.slice(0, 0, 19); });
  expect("want shape", 20, [](TensorView& view) { view = view.slice(1, 0, 8); });
  expect("want", 20,
         [](TensorView& view) { view = TensorView(view.data(), DType::f32, {20, 16}, {1, 20}); });

  // A repeat knows its rows.
  std::vector<std::shared_ptr<const Descriptor>> made(3);
  expect_all_return(ranks_.run([&](int rank) {
    Given given;
    made[std::size_t(rank)] = layer(rank).dispatch(given.args).descriptor;
  }));
  make(17, 0);
  expect_refused("rank 0: out: want 18 rows or more, got 17", [&](int rank, Given& given) {
    give(rank, given);
    given.args.expert_indices = {};
    given.args.cached = made[std::size_t(rank)];
  });
  // Beside it another rank may copy, but not borrow.
  make(18, 0);
  expect_all_return(dispatch([&](int rank, Given& given) {
    if (rank == 2) given.args.copy_out = true;
    if (rank != 2) give(rank, given);
  }));
  expect_refused_with("copy_out differs", [&](int rank, Given& given) {
    if (rank != 2) give(rank, given);
  });
}

TEST_F(Refusals, OptionsThatDiffer) {
  expect_refused("expert_alignment differs: 1 on rank 0, 16 on rank 2", [](int rank, Given& given) {
    if (rank == 2) given.args.expert_alignment = 16;
  });
  expect_refused_with("order differs", [](int rank, Given& given) {
    if (rank == 0) given.args.order = RowOrder::token_major;
  });
  expect_refused_with("worst_case_rows differs", [](int rank, Given& given) {
    given.args.worst_case_rows = rank == 1 ? 20 : 30;
  });
  expect_refused_with("weights", [](int rank, Given& given) {
    if (rank == 1) given.args.weights = given.weights;
  });
  const Tensor fp8(DType::f8_e4m3, {3, 16}), scales(DType::f32, {3, 1});
  expect_refused_with("differs", [&](int rank, Given& given) {
    if (rank != 1) return;
    given.args.input = fp8;
    given.args.scales = scales;
  });
}

TEST_F(Refusals, ScatterIndices) {
  // 3 ranks of 3 tokens and 2 pairs: 18 rows, all on rank 0. Rank r's pairs in the plain order.
  Tensor scatter[3];
  const auto fill = [&] {
    for (int r = 0; r < 3; ++r) {
      scatter[r] = Tensor(DType::i32, {3, 2});
      for (int i = 0; i < 6; ++i) scatter[r].values<std::int32_t>()[std::size_t(i)] = 6 * r + i;
    }
  };
  const auto give = [&](int rank, Given& given) { given.args.scatter_indices = scatter[rank]; };
  fill();
  expect_all_return(dispatch(give));
  for (const int bad : {18, -1, 19, std::numeric_limits<int>::max()}) {
    fill();
    scatter[1].view().at<std::int32_t>(2, 1) = bad;
    expect_refused(
        "rank 1: scatter_indices: want 0 to 17, got " + std::to_string(bad) + " for token 2, k 1",
        give);
  }
  fill();
  scatter[2].view().at<std::int32_t>(0, 0) = 16;  // named again by token 2, k 0
  expect_refused_with("scatter_indices: want every row once, got row 16 again", give);
  fill();
  scatter[2].view().at<std::int32_t>(0, 0) = 3;  // a row of rank 0's tokens
  expect_refused_with("scatter_indices: want every row once, got row 3 again", give);
  fill();
  expect_refused_with("expert_alignment", [&](int rank, Given& given) {
    give(rank, given);
    given.args.expert_alignment = 4;
  });
  expect_refused_with("scatter_indices", [&](int rank, Given& given) {
    give(rank, given);
    given.args.order = RowOrder::token_major;
  });
  const Tensor wrong(DType::i32, {5, 2});
  expect_refused_with("rank 0: scatter_indices", [&](int rank, Given& given) {
    give(rank, given);
    if (rank == 0) given.args.scatter_indices = wrong;
  });
}

TEST_F(Refusals, Combine) {
  std::vector<Dispatched> got(3);
  const auto dispatch_all = [&](RowOrder order, bool weights) {
    expect_all_return(ranks_.run([&](int rank) {
      Given given;
      given.args.order = order;
      if (weights) given.args.weights = given.weights;
      got[std::size_t(rank)] = layer(rank).dispatch(given.args);
    }));
  };
  const auto expect = [&](const std::string& part, const auto& change) {
    const auto outcomes = ranks_.run([&](int rank) {
      const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
      CombineArgs args{.expert_output = layer(rank).combine_buffer(descriptor)};
      change(rank, args);
      layer(rank).combine(args, descriptor);
    });
    for (const Outcome& outcome : outcomes) {
      EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::combine: "));
      EXPECT_THAT(outcome.text, HasSubstr(part));
      EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    }
  };
  dispatch_all(RowOrder::expert_major, false);
  Tensor few(DType::f32, {2, 16}), half(DType::f16, {3, 16}), narrow(DType::f32, {3, 7});
  expect("rank 1: expert_output", [&](int rank, CombineArgs& args) {
    if (rank == 1) args.expert_output = few;
  });
  expect("rank 1: expert_output", [&](int rank, CombineArgs& args) {
    if (rank == 1) args.expert_output = {};
  });
  expect("rank 2: bias", [&](int rank, CombineArgs& args) {
    if (rank == 2) args.bias = half;
  });
  expect("rank 2: out", [&](int rank, CombineArgs& args) {
    if (rank == 2) args.out = narrow;
  });
  const auto first_rows = [](const TensorView& rows) {
    return TensorView(rows.data(), rows.dtype(), {3, 16});
  };
  expect("rank 0: out: want memory apart from expert_output and combine_buffer(), got some of",
         [&](int rank, CombineArgs& args) {
           const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
           if (rank == 0) args.out = first_rows(layer(rank).combine_buffer(descriptor));
         });
  Tensor rows(DType::f32, {20, 16});
  expect("rank 0: out: want memory apart", [&](int rank, CombineArgs& args) {
    if (rank != 0) return;
    args.expert_output = rows.view().slice(0, 0, 18);
    args.out = rows.view().slice(0, 17, 20);
  });
  expect("weighted", [&](int, CombineArgs& args) { args.weighted = true; });
  dispatch_all(RowOrder::expert_major, true);
  expect("weighted differs", [&](int rank, CombineArgs& args) { args.weighted = rank == 1; });
  dispatch_all(RowOrder::token_major, true);
  expect("weighted", [&](int, CombineArgs& args) { args.weighted = true; });
}

TEST_F(Refusals, Cached) {
  std::vector<Dispatched> a(3), b(3);
  for (auto* got : {&a, &b}) {
    expect_all_return(ranks_.run([&](int rank) {
      Given given;
      (*got)[std::size_t(rank)] = layer(rank).dispatch(given.args);
    }));
  }
  expect_refused_with("cached", [&](int rank, Given& given) {  // of another dispatch on one rank
    given.args.expert_indices = {};
    given.args.cached = (rank == 1 ? a : b)[std::size_t(rank)].descriptor;
  });
  expect_refused_with("cached", [&](int rank, Given& given) {  // on one rank only
    if (rank != 1) return;
    given.args.expert_indices = {};
    given.args.cached = a[1].descriptor;
  });
  expect_refused_with("rank 2: input", [&](int rank, Given& given) {  // another n
    if (rank == 2) given = Given(2);
    given.args.expert_indices = {};
    given.args.cached = a[std::size_t(rank)].descriptor;
  });
  expect_refused_with("rank 0: expert_indices", [&](int rank, Given& given) {  // and indices
    if (rank != 0) given.args.expert_indices = {};
    given.args.cached = a[std::size_t(rank)].descriptor;
  });
}

TEST_F(Refusals, DifferentCalls) {
  std::vector<Dispatched> got(3);
  expect_all_return(ranks_.run([&](int rank) {
    Given given;
    got[std::size_t(rank)] = layer(rank).dispatch(given.args);
  }));
  for (const Outcome& outcome : ranks_.run([&](int rank) {
         const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
         Given given;
         if (rank != 1) layer(rank).dispatch(given.args);
         if (rank == 1) {
           layer(rank).combine({.expert_output = layer(rank).combine_buffer(descriptor)},
                               descriptor);
         }
       })) {
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    EXPECT_THAT(outcome.text, HasSubstr("the call differs: dispatch on rank 0, combine on rank 1"));
  }
}

TEST_F(Refusals, DescriptorsOfAnotherLayer) {
  Ranks others(3);
  const Layers other = others.layers(small_config(3));
  std::vector<Dispatched> got(3);
  expect_all_return(others.run([&](int rank) {
    Given given;
    got[std::size_t(rank)] = other[std::size_t(rank)]->dispatch(given.args);
  }));
  expect_refused_with("rank 0: cached", [&](int rank, Given& given) {
    given.args.expert_indices = {};
    given.args.cached = got[std::size_t(rank)].descriptor;
  });
  const Tensor rows(DType::f32, {18, 16}), none(DType::f32, {0, 16});
  for (const Outcome& outcome : ranks_.run([&](int rank) {
         layer(rank).combine({.expert_output = rank == 0 ? rows : none},
                             *got[std::size_t(rank)].descriptor);
       })) {
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    EXPECT_THAT(outcome.text, HasSubstr("rank 0: descriptor"));
  }
}

// Rows beyond the worst case are dropped; whichever call comes next throws, and the one after it
// works.
TEST_F(Refusals, WorstCaseTooSmall) {
  for (int next = 0; next < 3; ++next) {
    SCOPED_TRACE(next);
    std::vector<Dispatched> got(3);
    expect_all_return(ranks_.run([&](int rank) {
      Given given(3, rank == 2 ? 5 : 0);  // 12 rows on rank 0, 6 on rank 2
      given.args.worst_case_rows = 7;
      got[std::size_t(rank)] = layer(rank).dispatch(given.args);
    }));
    EXPECT_EQ(got[0].descriptor->rows(), 7);
    EXPECT_EQ(got[0].descriptor->wanted_rows(), 12);
    EXPECT_EQ(got[2].descriptor->wanted_rows(), 6);
    EXPECT_EQ(testing::read(got[0].descriptor->expert_counts()), (std::vector<double>{12, 0}));
    const auto outcomes = ranks_.run([&](int rank) {
      const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
      Given given;
      if (next == 0) layer(rank).dispatch(given.args);
      if (next == 1) {
        layer(rank).combine({.expert_output = layer(rank).combine_buffer(descriptor)}, descriptor);
      }
      if (next == 2) layer(rank).barrier();
    });
    const char* name = next == 0 ? "dispatch" : next == 1 ? "combine" : "barrier";
    expect_all_refuse(outcomes, std::string("expert_parallel::") + name +
                                    ": rank 0: worst_case_rows: want 12 or more, got 7");
    expect_working(ranks_, layers_);
  }
}

TEST_F(Refusals, BadExpertIndicesInTheWorstCase) {
  std::vector<Dispatched> got(3);
  expect_all_return(ranks_.run([&](int rank) {
    Given given;
    given.args.worst_case_rows = 20;
    if (rank == 1) given.indices.view().at<std::int32_t>(2, 0) = 77;
    got[std::size_t(rank)] = layer(rank).dispatch(given.args);
  }));
  EXPECT_EQ(got[0].descriptor->wanted_rows(), 17);  // the bad pair is dropped
  expect_all_refuse(ranks_.run([&](int rank) { layer(rank).barrier(); }),
                    "expert_parallel::barrier: rank 1: expert_indices: want -1 to 6, got 77 for "
                    "token 2");
}

}  // namespace
}  // namespace winnow::expert_parallel
