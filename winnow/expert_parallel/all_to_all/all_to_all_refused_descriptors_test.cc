// AllToAll: bad arguments and descriptors of combine() and of a repeated dispatch(). Every rank
// throws the error of one, with the same text on every device, and the layer remains usable.
#include <string>

#include "winnow/expert_parallel/testing/refusals.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Cpu, Refusals, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, Refusals, ::testing::Values(kGpu));

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
