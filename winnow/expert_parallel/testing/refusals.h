// A world on which every test makes bad calls of the all-to-all and then a good one. Only for
// tests: needs GoogleTest.
#pragma once

#include <string>
#include <vector>

#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/testing/on_each_device.h"

namespace winnow::expert_parallel {

inline void as_it_is(int, Given&) {}

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
      EXPECT_THAT(outcome.text, ::testing::HasSubstr(part));
      EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    }
    expect_arguments_named(outcomes);
  }
  // An argument that is named in the text is also that of the error's argument().
  static void expect_arguments_named(const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) {
      if (outcome.text.find(": want ") == std::string::npos) continue;
      EXPECT_NE(outcome.argument, "");
      EXPECT_THAT(outcome.text, ::testing::HasSubstr(outcome.argument + ": want "));
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

}  // namespace winnow::expert_parallel
