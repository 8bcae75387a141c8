// AllToAll: what one rank finds wrong in a dispatch, a repeated dispatch or a combine, every rank
// refuses, and the layer works on. With the same texts on every device.
#include <limits>
#include <string>
#include <vector>

#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/testing/on_each_device.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::HasSubstr;

void as_it_is(int, Given&) {}

// A world of three ranks on which every test makes bad calls and then a good one.
class Refusals : public OnEachDevice {
 protected:
  void SetUp() override {
    OnEachDevice::SetUp();
    if (IsSkipped()) return;
    Config config = small_config(3);
    if (on_gpu()) config.arena_rows = 1000;  // no call waits for room
    world_.make(config);
  }
  void TearDown() override {
    if (!IsSkipped()) expect_working(world_);
  }

  AllToAll& layer(int rank) { return world_.layer(rank); }
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor tensor = world_.place(0).make(dtype, shape);
    world_.place(0).wait();
    return tensor;
  }
  // How the call would have ended if all ranks had waited for it: on a GPU a rank may learn of a
  // refusal only from the next call, here a barrier.
  std::vector<Outcome> received(const std::string& operation, std::vector<Outcome> outcomes) {
    if (!on_gpu()) return outcomes;
    const std::vector<Outcome> later = world_.barrier();
    for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
      if (outcomes[rank].code) {
        EXPECT_EQ(later[rank].text, "");
        continue;
      }
      outcomes[rank] = later[rank];
      const std::string barrier = "expert_parallel::barrier: ";
      std::string& text = outcomes[rank].text;
      if (!text.starts_with(barrier)) continue;
      text = "expert_parallel::" + operation + ": " + text.substr(barrier.size());
    }
    return outcomes;
  }
  // Every rank dispatches after change(rank, given) has changed what it gives.
  template <class Change>
  std::vector<Outcome> dispatch(const Change& change) {
    return received("dispatch", world_.dispatch(change));
  }
  template <class Change>
  void expect_refused(const std::string& text, const Change& change) {
    const std::vector<Outcome> outcomes = dispatch(change);
    expect_all_refuse(outcomes, "expert_parallel::dispatch: " + text);
    expect_arguments_named(outcomes);
  }
  static void expect_refused_with(const std::string& part, const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) {
      EXPECT_THAT(outcome.text, HasSubstr(part));
      EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    }
    expect_arguments_named(outcomes);
  }
  // An argument that is named in the text is also that of the error's argument().
  static void expect_arguments_named(const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) {
      if (outcome.text.find(": want ") == std::string::npos) continue;
      EXPECT_NE(outcome.argument, "");
      EXPECT_THAT(outcome.text, HasSubstr(outcome.argument + ": want "));
    }
  }
  template <class Change>
  void expect_refused_with(const std::string& part, const Change& change) {
    expect_refused_with(part, dispatch(change));
  }
  void combine(int rank, const ConstTensorView& expert_output, const Descriptor& descriptor) {
    CombineArgs args{.expert_output = expert_output, .stream = world_.place(rank).stream()};
    layer(rank).combine(args, descriptor);
  }

  World world_{device(), 3};
};

INSTANTIATE_TEST_SUITE_P(Cpu, Refusals, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, Refusals, ::testing::Values(kGpu));

TEST_P(Refusals, MoreTokensThanMaxTokens) {
  expect_refused("rank 1: input: want at most max_tokens = 4 tokens, got 5",
                 [&](int rank, Given& given) {
                   if (rank == 1) given = Given(world_.place(rank), 5);
                 });
}

TEST_P(Refusals, BadExpertIndices) {
  constexpr int kBig = std::numeric_limits<int>::max(), kSmall = std::numeric_limits<int>::min();
  for (const int bad : {7, -2, kBig, kSmall}) {
    expect_refused(
        "rank 2: expert_indices: want -1 to 6, got " + std::to_string(bad) + " for token 1",
        [&](int rank, Given& given) {
          if (rank == 2) given.choose(1, 1, bad);
        });
  }
}

// Those of 64 bits are not cut to 32, where these would be experts 3 and 5.
TEST_P(Refusals, BadExpertIndicesOf64Bits) {
  constexpr std::int64_t kBeyond = std::int64_t{1} << 32;
  for (const std::int64_t bad : {kBeyond + 3, 5 - kBeyond}) {
    Tensor wide = make(DType::i64, {3, 2});
    expect_refused(
        "rank 2: expert_indices: want -1 to 6, got " + std::to_string(bad) + " for token 1",
        [&](int rank, Given& given) {
          if (rank != 2) return;
          Tensor chosen(DType::i64, {3, 2});
          chosen.view().at<std::int64_t>(1, 1) = bad;
          world_.place(rank).write(wide.view(), chosen);
          world_.place(rank).wait();
          given.args.expert_indices = wide;
        });
  }
}

TEST_P(Refusals, OfTheLowestRankThatHasOne) {
  expect_refused("rank 0: expert_indices: want -1 to 6, got 99 for token 2",
                 [](int rank, Given& given) {
                   if (rank != 1) given.choose(2, 0, 99);
                 });
}

TEST_P(Refusals, OfTheCaller) {
  const Error refusal(ErrorCode::resource, "an engine", "no tokens");
  const auto outcomes = dispatch([&](int rank, Given& given) {
    if (rank == 1) given.args = {.stream = given.args.stream, .refusal = &refusal};
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.text, "expert_parallel::dispatch: rank 1: no tokens");
    EXPECT_EQ(outcome.code, ErrorCode::resource);
  }
}

TEST_P(Refusals, WrongTensors) {
  const Tensor narrow = make(DType::f32, {3, 4}), half = make(DType::f16, {3, 16}),
               fp8 = make(DType::f8_e4m3, {3, 16}), scales = make(DType::f32, {3, 1}),
               wide_indices = make(DType::i32, {3, 3}), long_indices = make(DType::f64, {3, 2});
  const auto expect = [&](const std::string& argument, const auto& change) {
    expect_refused_with("rank 1: " + argument, [&](int rank, Given& given) {
      if (rank == 1) change(given.args);
    });
  };
  expect("input", [&](DispatchArgs& args) { args.input = narrow; });
  expect("input", [&](DispatchArgs& args) { args.input = half; });
  expect("input: want a tensor [n, hidden], got none",
         [&](DispatchArgs& args) { args.input = {}; });
  const Device other = on_gpu() ? Device{} : kGpu;
  expect("input: want device " + to_string(device()) + ", got " + to_string(other),
         [&](DispatchArgs& args) {
           args.input = ConstTensorView(args.input.data(), DType::f32, {3, 16}, other);
         });
  expect("expert_indices", [&](DispatchArgs& args) { args.expert_indices = wide_indices; });
  expect("expert_indices", [&](DispatchArgs& args) { args.expert_indices = long_indices; });
  expect("expert_indices: want a tensor of shape [n=3, topk=2], got none",
         [&](DispatchArgs& args) { args.expert_indices = {}; });
  expect("weights", [&](DispatchArgs& args) { args.weights = narrow; });
  expect("scales", [&](DispatchArgs& args) { args.input = fp8; });
  expect("scales", [&](DispatchArgs& args) { args.scales = scales; });
  expect("expert_alignment: want 1 to 2147483647, got 0",
         [&](DispatchArgs& args) { args.expert_alignment = 0; });
  expect("worst_case_rows: want 0 to 2147483647, got -1",
         [&](DispatchArgs& args) { args.worst_case_rows = -1; });
  expect("expert_alignment", [&](DispatchArgs& args) {
    args.order = RowOrder::token_major;
    args.expert_alignment = 4;
  });
}

TEST_P(Refusals, AnOutThatIsTooSmall) {
  // 3 ranks of 3 tokens and 2 pairs: 18 rows, all on rank 0.
  Tensor out[3];
  const auto give = [&](int rank, Given& given) { given.args.out = out[rank]; };
  const auto make_out = [&](std::int64_t rows, std::int64_t of_others, DType dtype = DType::f32) {
    for (Tensor& one : out) one = make(dtype, {of_others, 16});
    out[0] = make(dtype, {rows, 16});
  };
  make_out(17, 0);
  expect_refused("out: want 18 rows or more on rank 0, got 17", give);
  // No row has moved.
  EXPECT_EQ(testing::count_unwritten(world_.place(0).to_host(out[0])), 17 * 16);
  make_out(18, 0);
  expect_all_return(dispatch(give));
  make_out(18, 20, DType::f16);
  expect_refused_with("rank 0: out: want dtype f32", give);
  const auto expect = [&](const std::string& text, const auto& change) {
    make_out(20, 20);
    expect_refused_with("rank 1: out: " + text, [&](int rank, Given& given) {
      given.args.worst_case_rows = 20;
      give(rank, given);
      if (rank == 1) change(given.args.out);
    });
  };
  expect("want 20 rows or more, got 19", [](TensorView& view) { view = view.slice(0, 0, 19); });
  expect("want shape", [](TensorView& view) { view = view.slice(1, 0, 8); });
  expect("want", [](TensorView& view) {
    view = TensorView(view.data(), DType::f32, {20, 16}, {1, 20}, view.device());
  });

  // A repeat knows its rows.
  const auto made = world_.dispatched(as_it_is);
  make_out(17, 0);
  expect_refused("rank 0: out: want 18 rows or more, got 17", [&](int rank, Given& given) {
    give(rank, given);
    given.args.expert_indices = {};
    given.args.cached = made[std::size_t(rank)].descriptor;
  });
  // Beside it another rank may copy, but not borrow.
  make_out(18, 0);
  expect_all_return(dispatch([&](int rank, Given& given) {
    if (rank == 2) given.args.copy_out = true;
    if (rank != 2) give(rank, given);
  }));
  expect_refused_with("out or copy_out differs: ", [&](int rank, Given& given) {
    if (rank != 2) give(rank, given);
  });
}

TEST_P(Refusals, OptionsThatDiffer) {
  expect_refused("expert_alignment differs: 1 on rank 0, 16 on rank 2", [](int rank, Given& given) {
    if (rank == 2) given.args.expert_alignment = 16;
  });
  expect_refused("order differs: token_major on rank 0, expert_major on rank 1",
                 [](int rank, Given& given) {
                   if (rank == 0) given.args.order = RowOrder::token_major;
                 });
  expect_refused("worst_case_rows differs: 30 on rank 0, 20 on rank 1",
                 [](int rank, Given& given) { given.args.worst_case_rows = rank == 1 ? 20 : 30; });
  expect_refused_with("weights", [](int rank, Given& given) {
    if (rank == 1) given.args.weights = given.weights;
  });
  const Tensor fp8 = make(DType::f8_e4m3, {3, 16}), scales = make(DType::f32, {3, 1});
  expect_refused_with("differs", [&](int rank, Given& given) {
    if (rank != 1) return;
    given.args.input = fp8;
    given.args.scales = scales;
  });
}

TEST_P(Refusals, ScatterIndices) {
  // 3 ranks of 3 tokens and 2 pairs: 18 rows, all on rank 0. Rank r's pairs in the plain order.
  Tensor scatter[3], there[3];
  const auto fill = [&] {
    for (int r = 0; r < 3; ++r) {
      scatter[r] = Tensor(DType::i32, {3, 2});
      for (int i = 0; i < 6; ++i) scatter[r].values<std::int32_t>()[std::size_t(i)] = 6 * r + i;
    }
  };
  const auto give = [&](int rank, Given& given) {
    there[rank] = world_.place(rank).copy(scatter[rank]);
    given.args.scatter_indices = there[rank];
  };
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
  const Tensor wrong = make(DType::i32, {5, 2});
  expect_refused_with("rank 0: scatter_indices: want 3 or 9 rows, got 5",
                      [&](int rank, Given& given) {
                        give(rank, given);
                        if (rank == 0) given.args.scatter_indices = wrong;
                      });
}

// Rows beyond the worst case are dropped; whichever call comes next throws, and the one after it
// works.
TEST_P(Refusals, WorstCaseTooSmall) {
  const auto read = [&](const ConstTensorView& view) {
    return testing::read(world_.place(0).to_host(view));
  };
  for (const std::string next : {"dispatch", "combine", "barrier"}) {
    SCOPED_TRACE(next);
    const auto got = world_.dispatched([&](int rank, Given& given) {
      if (rank == 2) given = Given(world_.place(rank), 3, 5);  // 12 rows on rank 0, 6 on rank 2
      given.args.worst_case_rows = 7;
    });
    const Descriptor& descriptor = *got[0].descriptor;
    EXPECT_EQ(descriptor.rows(), 7);
    EXPECT_EQ(descriptor.wanted_rows(), on_gpu() ? -1 : 12);
    EXPECT_EQ(read(descriptor.wanted_rows_per_rank()), (std::vector<double>{12, 0, 6}));
    EXPECT_EQ(read(descriptor.expert_counts()), (std::vector<double>{12, 0}));
    const auto outcomes = world_.run([&](int rank) {
      const Descriptor& mine = *got[std::size_t(rank)].descriptor;
      if (next == "dispatch") layer(rank).dispatch(world_.give(rank).args);
      if (next == "combine") combine(rank, layer(rank).combine_buffer(mine), mine);
      if (next == "barrier") layer(rank).barrier(false, world_.place(rank).stream());
    });
    expect_all_refuse(
        outcomes, "expert_parallel::" + next + ": rank 0: worst_case_rows: want 12 or more, got 7");
    expect_working(world_);
  }
}

TEST_P(Refusals, BadExpertIndicesInTheWorstCase) {
  const auto got = world_.dispatched([](int rank, Given& given) {
    given.args.worst_case_rows = 20;
    if (rank == 1) given.choose(2, 0, 77);
  });
  const auto wanted = got[0].descriptor->wanted_rows_per_rank();
  EXPECT_EQ(testing::read(world_.place(0).to_host(wanted))[0], 17);  // the bad pair is dropped
  expect_all_refuse(world_.barrier(),
                    "expert_parallel::barrier: rank 1: expert_indices: want -1 to 6, got 77 for "
                    "token 2");
}

// ---- Descriptors, of combine() and of a repeated dispatch().

TEST_P(Refusals, Combine) {
  std::vector<Dispatched> got;
  const auto dispatch_all = [&](RowOrder order, bool weights) {
    got = world_.dispatched([&](int, Given& given) {
      given.args.order = order;
      if (weights) given.args.weights = given.weights;
    });
  };
  const auto expect = [&](const std::string& part, const auto& change) {
    const auto outcomes = world_.run([&](int rank) {
      const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
      CombineArgs args{.expert_output = layer(rank).combine_buffer(descriptor),
                       .stream = world_.place(rank).stream()};
      change(rank, args);
      layer(rank).combine(args, descriptor);
    });
    for (const Outcome& outcome : received("combine", outcomes)) {
      EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::combine: "));
      EXPECT_THAT(outcome.text, HasSubstr(part));
      EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    }
  };
  dispatch_all(RowOrder::expert_major, false);
  Tensor few = make(DType::f32, {2, 16}), half = make(DType::f16, {3, 16}),
         narrow = make(DType::f32, {3, 7}), rows = make(DType::f32, {20, 16});
  expect("rank 1: expert_output", [&](int rank, CombineArgs& args) {
    if (rank == 1) args.expert_output = few;
  });
  expect("rank 1: expert_output", [&](int rank, CombineArgs& args) {
    if (rank == 1) args.expert_output = {};
  });
  const Error refusal(ErrorCode::invalid_argument, "an engine", "no rows");
  expect("rank 2: no rows", [&](int rank, CombineArgs& args) {
    if (rank == 2) args = {.stream = args.stream, .refusal = &refusal};
  });
  expect("rank 2: bias", [&](int rank, CombineArgs& args) {
    if (rank == 2) args.bias = half;
  });
  expect("rank 2: out", [&](int rank, CombineArgs& args) {
    if (rank == 2) args.out = narrow;
  });
  expect("rank 0: out: want memory apart from expert_output and combine_buffer(), got some of",
         [&](int rank, CombineArgs& args) {
           const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
           if (rank == 0) args.out = layer(rank).combine_buffer(descriptor).slice(0, 0, 3);
         });
  expect("rank 0: out: want memory apart", [&](int rank, CombineArgs& args) {
    if (rank != 0) return;
    args.expert_output = rows.view().slice(0, 0, 18);
    args.out = rows.view().slice(0, 17, 20);
  });
  expect("rank 0: out: want memory apart from bias", [&](int rank, CombineArgs& args) {
    if (rank != 0) return;
    args.bias = rows.view().slice(0, 0, 3);
    args.out = rows.view().slice(0, 1, 4);
  });
  expect("rank 0: expert_output: want dense rows", [&](int rank, CombineArgs& args) {
    const ConstTensorView& buffer = args.expert_output;
    if (rank == 0) {
      args.expert_output = {buffer.data(), DType::f32, {18, 16}, {8, 1}, buffer.device()};
    }
  });
  expect("weighted", [&](int, CombineArgs& args) { args.weighted = true; });
  dispatch_all(RowOrder::expert_major, true);
  expect("weighted differs", [&](int rank, CombineArgs& args) { args.weighted = rank == 1; });
  dispatch_all(RowOrder::token_major, true);
  expect("weighted", [&](int, CombineArgs& args) { args.weighted = true; });
}

TEST_P(Refusals, Cached) {
  const auto a = world_.dispatched(as_it_is), b = world_.dispatched(as_it_is);
  expect_refused_with("cached", [&](int rank, Given& given) {  // rank 1 names another dispatch
    given.args.expert_indices = {};
    given.args.cached = (rank == 1 ? a : b)[std::size_t(rank)].descriptor;
  });
  expect_refused_with("cached", [&](int rank, Given& given) {  // only rank 1 passes one
    if (rank != 1) return;
    given.args.expert_indices = {};
    given.args.cached = a[1].descriptor;
  });
  expect_refused_with("rank 2: input", [&](int rank, Given& given) {  // rank 2 has another n
    if (rank == 2) given = Given(world_.place(rank), 2);
    given.args.expert_indices = {};
    given.args.cached = a[std::size_t(rank)].descriptor;
  });
  expect_refused_with("rank 0: expert_indices", [&](int rank, Given& given) {  // rank 0 passes both
    if (rank != 0) given.args.expert_indices = {};
    given.args.cached = a[std::size_t(rank)].descriptor;
  });
}

TEST_P(Refusals, DifferentCalls) {
  const auto got = world_.dispatched(as_it_is);
  const auto outcomes = world_.run([&](int rank) {
    const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
    if (rank != 1) layer(rank).dispatch(world_.give(rank).args);
    if (rank == 1) combine(rank, layer(rank).combine_buffer(descriptor), descriptor);
  });
  expect_refused_with("the call differs: dispatch on rank 0, combine on rank 1",
                      received("combine", outcomes));
}

TEST_P(Refusals, DescriptorsOfAnotherLayer) {
  World other(device(), small_config(3), 3);
  const auto got = other.dispatched(as_it_is);
  expect_refused_with("rank 0: cached: want a descriptor of this layer",
                      [&](int rank, Given& given) {
                        given.args.expert_indices = {};
                        given.args.cached = got[std::size_t(rank)].descriptor;
                      });
  const Tensor rows = make(DType::f32, {18, 16}), none = make(DType::f32, {0, 16});
  const auto outcomes = world_.run([&](int rank) {
    combine(rank, rank == 0 ? rows : none, *got[std::size_t(rank)].descriptor);
  });
  expect_refused_with("rank 0: descriptor", received("combine", outcomes));
}

TEST_P(Refusals, DescriptorsWithoutADispatch) {
  const Descriptor none;
  EXPECT_EQ(none.rows(), 0);
  EXPECT_EQ(none.num_dispatch_token_cur_rank(), 0);
  EXPECT_EQ(none.expert_offsets().numel(), 1);
  const auto got = world_.dispatched(as_it_is);
  const Error refusal(ErrorCode::invalid_argument, "an engine", "no rows");
  for (const bool refuses : {true, false}) {
    const auto outcomes = world_.run([&](int rank) {
      const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
      CombineArgs args{.stream = world_.place(rank).stream()};
      if (rank == 1) {
        if (refuses) args.refusal = &refusal;
        layer(rank).combine(args, none);
      } else {
        args.expert_output = layer(rank).combine_buffer(descriptor);
        layer(rank).combine(args, descriptor);
      }
    });
    expect_refused_with(refuses ? "rank 1: no rows"
                                : "rank 1: descriptor: want one of this layer, got one without a "
                                  "dispatch",
                        received("combine", outcomes));
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
