// Random worlds, sizes, routings and mixtures of calls with ranks that dawdle; every result checked
// bit for bit; at the end neither memory nor the time of a call has grown. WINNOW_SOAK_ITERATIONS
// (300) dispatches, `make soak` runs 10,000; a failure names the WINNOW_SOAK_SEED that repeats it.
// WINNOW_SOAK_DEVICE=cuda: all ranks on the first GPU.
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <malloc.h>

#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/testing/gpus.h"
#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using testing::Random;

bool one_in(int count, Random& random) { return random.below(count) == 0; }

template <class T>
T one_of(std::initializer_list<T> list, Random& random) {
  return list.begin()[random.below(std::int64_t(list.size()))];
}

constexpr int kSteps = 20;  // of one world

// What all ranks do in one iteration.
struct Step {
  Problem problem;
  std::uint64_t routing_seed = 0;
  Round round;
  int refused_by = -1;            // this rank gives what is wrong; no rows move
  std::int64_t refused_rows = 0;  // 0: an expert that does not exist; else no input, in a call with
                                  // so many worst_case_rows
  int cached = -1;                // the step whose routing is repeated
  std::vector<std::size_t> then;  // the steps that are combined and forgotten after the dispatch
};

// The sizes of a layer, which its steps share.
Problem random_layer(Random& random) {
  Problem problem;
  do {
    problem.nodes = int(1 + random.below(4));
    problem.local_world_size = int(1 + random.below(4));
  } while (problem.world_size() > 6);
  problem.experts_per_rank = int(1 + random.below(5));
  problem.topk = int(1 + random.below(one_in(8, random) ? 32 : 6));
  problem.max_tokens = one_in(10, random) ? 280 + random.below(300) : 1 + random.below(24);
  problem.dtype = one_of({DType::bf16, DType::f16, DType::f32}, random);
  problem.weight_dtype = one_of({DType::f32, DType::bf16, DType::f16}, random);
  problem.hidden = 8 * (1 + random.below(problem.max_tokens > 100 ? 2 : 20));
  problem.local_combine = one_in(2, random);
  problem.arena_rows = one_of<std::int64_t>({0, 1, 40}, random);
  problem.sm_count = one_of({8, 20, 24}, random);
  problem.mode = one_in(3, random) ? Mode::worst_case : Mode::counted;
  return problem;
}

void choose_call(Problem& problem, Random& random) {
  problem.weights = one_in(2, random);
  problem.weighted_combine = problem.weights && !problem.token_major && one_in(2, random);
  problem.fp8 = problem.hidden % 16 == 0 && one_in(5, random);
  if (problem.fp8 && one_in(2, random)) {
    problem.scale_dtype = DType::u8;
    problem.scale_columns = 4 * (1 + random.below((problem.hidden + 31) / 32));
    problem.scales_by_column = one_in(2, random);
  }
  problem.bias = one_in(3, random);
  problem.second_bias = problem.bias && one_in(3, random);
  problem.pair_values = one_in(3, random);
  problem.add_values = problem.pair_values && problem.token_major && one_in(2, random);
  problem.combine_weights = !problem.weighted_combine && !problem.token_major && one_in(4, random);
  problem.copy_out = one_in(3, random);
  problem.out = one_in(4, random);
  problem.strided = one_in(4, random);
  problem.wide_indices = one_in(4, random);
  problem.expert_rows =
      one_of({ExpertRows::combine_buffer, ExpertRows::own, ExpertRows::in_place}, random);
  if (problem.fp8 && problem.expert_rows == ExpertRows::in_place) {
    problem.expert_rows = ExpertRows::own;
  }
}

// A layer whose problem is in the worst-case mode stays in it: no host waits for another.
void choose_routing(Problem& problem, Random& random) {
  problem.tokens = one_in(12, random)
                       ? one_of({Tokens::none, Tokens::even_ranks_empty, Tokens::full}, random)
                       : Tokens::uneven;
  problem.choice = one_of({ExpertChoice::distinct, ExpertChoice::dropped, ExpertChoice::duplicates,
                           ExpertChoice::one_expert, ExpertChoice::none},
                          random);
  const bool distinct =
      problem.choice == ExpertChoice::distinct || problem.choice == ExpertChoice::dropped;
  if (distinct && problem.topk > problem.experts()) problem.choice = ExpertChoice::duplicates;
  problem.token_major = one_in(3, random);
  problem.alignment = !problem.token_major && one_in(3, random) ? 1 + random.below(16) : 1;
  if (one_in(5, random)) problem.mode = Mode::worst_case;
  problem.scatter = Scatter::none;
  if (!problem.token_major && problem.alignment == 1 && problem.mode == Mode::counted) {
    problem.scatter =
        one_of({Scatter::none, Scatter::none, Scatter::slice, Scatter::table}, random);
  }
}

std::vector<Step> random_steps(const Problem& layer, std::size_t count, Random& random) {
  std::vector<Step> steps(count);
  std::vector<std::size_t> alive;
  for (std::size_t i = 0; i < count; ++i) {
    Step& step = steps[i];
    const bool waits = layer.mode == Mode::counted;
    if (one_in(waits ? 15 : 6, random)) {
      step.refused_by = int(random.below(layer.world_size()));
      if (!waits || one_in(2, random)) step.refused_rows = 1 + random.below(60);
      continue;
    }
    if (!alive.empty() && one_in(4, random)) {
      step.cached = int(alive[std::size_t(random.below(std::int64_t(alive.size())))]);
      step.problem = steps[std::size_t(step.cached)].problem;
      step.routing_seed = steps[std::size_t(step.cached)].routing_seed;
    } else {
      step.problem = layer;
      step.routing_seed = random.next();
      choose_routing(step.problem, random);
    }
    choose_call(step.problem, random);
    step.round = make_round(step.problem, step.routing_seed, random.next());
    alive.push_back(i);
    // Up to three descriptors wait; any of them may be next.
    while (alive.size() > std::size_t(random.below(4))) {
      const auto next = alive.begin() + random.below(std::int64_t(alive.size()));
      step.then.push_back(*next);
      alive.erase(next);
    }
  }
  return steps;
}

// Ranks that have not waited for the others learn of it in the next call.
void expect_refusal(AllToAll& layer, const RankDevice& place, const Step& step) {
  const Config& config = layer.config();
  const bool wrong = layer.rank() == step.refused_by;
  Tensor input(config.dtype, {1, config.hidden}), indices(DType::i32, {1, config.topk});
  std::string text = "rank " + std::to_string(step.refused_by);
  if (step.refused_rows > 0) {
    text += ": input: want a tensor [n, hidden], got none";
  } else {
    if (wrong) indices.view().at<std::int32_t>(0, 0) = config.experts + 5;
    text += ": expert_indices: want -1 to " + std::to_string(config.experts) + ", got " +
            std::to_string(config.experts + 5) + " for token 0";
  }
  const Tensor there = place.copy(input), chosen = place.copy(indices);
  const auto outcome = outcome_of([&] {
    DispatchArgs args{.input = there, .expert_indices = chosen, .stream = place.stream()};
    args.worst_case_rows = step.refused_rows;
    if (wrong && step.refused_rows > 0) args.input = {};
    layer.dispatch(args);
    place.wait();
  });
  const Outcome later = outcome_of([&] {
    layer.barrier(false, place.stream());
    place.wait();
  });
  EXPECT_EQ(outcome.text + later.text,
            (outcome.code ? "expert_parallel::dispatch: " : "expert_parallel::barrier: ") + text);
  EXPECT_TRUE(outcome.code || step.refused_rows > 0);
}

// Half of the time up to 5 ms, and now and then up to 50.
void dawdle(Random& random) {
  const std::int64_t most = one_in(40, random) ? 50'000 : one_in(2, random) ? 5'000 : 0;
  if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(most)));
}

void run_steps(AllToAll& layer, const std::vector<Step>& steps, Random random) {
  const RankDevice place(layer.config().device);
  std::map<std::size_t, Dispatched> alive;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    SCOPED_TRACE("rank " + std::to_string(layer.rank()) + ", step " + std::to_string(i));
    dawdle(random);
    if (step.refused_by >= 0) {
      expect_refusal(layer, place, step);
      continue;
    }
    Comparisons comparisons;
    const auto cached = step.cached < 0 ? nullptr : alive.at(std::size_t(step.cached)).descriptor;
    alive[i] = dispatch_and_check(layer, place, step.problem, step.round, layer.rank(), cached,
                                  comparisons);
    for (const std::size_t ready : step.then) {
      dawdle(random);
      combine_and_check(layer, place, steps[ready].problem, steps[ready].round, layer.rank(),
                        alive.at(ready), comparisons);
      alive.erase(ready);
    }
    expect_passed(comparisons);
  }
}

// The steps on a world of the seed.
void run_world(std::uint64_t seed, Device device) {
  Random random(seed);
  const Problem layer = random_layer(random);
  const std::vector<Step> steps = random_steps(layer, kSteps, random);
  SCOPED_TRACE("WINNOW_SOAK_SEED=" + std::to_string(seed) + ": " + describe(layer));
  const Ranks ranks(layer.world_size());
  Config config = layer.config();
  config.device = device;
  if (device.type == DeviceType::cuda) config.timeout = std::chrono::seconds(10);
  const Layers layers = ranks.layers(config);
  expect_all_return(ranks.run([&](int rank) {
    run_steps(*layers[std::size_t(rank)], steps, Random(seed * 64 + std::uint64_t(rank)));
  }));
}

struct Held {
  int files = 0, mappings = 0;
  std::size_t heap = 0;  // bytes
  static Held now() {
    // What is allocated. The resident size is no measure: it has what the allocator keeps for
    // later, more after each world that was larger than others.
    const struct mallinfo2 heap = mallinfo2();
    return {open_files(), expert_parallel::mappings(), heap.uordblks + heap.hblkhd};
  }
};

// A layer as old as the soak. What piles up from call to call slows down its calls. It has one
// rank: how soon two threads learn of each other is up to the machine.
class OldLayer {
 public:
  // Calls it for a while and notes the fastest dispatch and combine.
  void call() {
    auto fastest = Clock::duration::max();
    expect_all_return(ranks_.run([&](int) {
      const Round::Rank& given = round_.ranks[0];
      for (int i = 0; i < 100; ++i) {
        const auto start = Clock::now();
        const Dispatched got =
            layers_[0]->dispatch({.input = given.input, .expert_indices = given.expert_indices});
        layers_[0]->combine({.expert_output = got.output}, *got.descriptor);
        fastest = std::min(fastest, Clock::now() - start);
      }
    }));
    fastest_.push_back(fastest);
  }

  // The fastest call of the last tenth against that of the first. Not a high percentile, which
  // tells what else the machine does: on a busy one many calls are slow, but a call that has more
  // to do is slow each time. Three times, since processors share caches and clocks.
  void expect_as_fast_as_ever() const {
    const auto tenth = std::max<std::ptrdiff_t>(std::ptrdiff_t(fastest_.size()) / 10, 2);
    if (std::ptrdiff_t(fastest_.size()) < 2 * tenth) return;
    const Seconds first = *std::min_element(fastest_.begin(), fastest_.begin() + tenth);
    const Seconds last = *std::min_element(fastest_.end() - tenth, fastest_.end());
    EXPECT_LE(last.count(), 3 * first.count());
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  static Problem problem() { return {.local_world_size = 1, .tokens = Tokens::full}; }
  const Ranks ranks_{1};
  const Layers layers_ = ranks_.layers(problem().config());
  const Round round_ = make_round(problem(), 1, 2);
  std::vector<Clock::duration> fastest_;
};

TEST(AllToAllSoak, RandomCallsOnRandomWorlds) {
  const Device device = soak_device();
  // CUDA opens files and maps memory when it likes.
  const bool on_cpu = device.type == DeviceType::cpu;
  const std::int64_t iterations = testing::environment_number("WINNOW_SOAK_ITERATIONS", 300);
  std::uint64_t seed = std::uint64_t(testing::environment_number("WINNOW_SOAK_SEED", 1));
  std::optional<OldLayer> old_layer;
  if (on_cpu) old_layer.emplace();
  Held early;  // the most in the first third
  for (std::int64_t done = 0; done < iterations && !HasFailure(); ++seed) {
    run_world(seed, device);
    done += kSteps;
    if (!on_cpu) continue;
    old_layer->call();
    if (3 * done > iterations && early.files != 0) continue;
    const Held now = Held::now();
    early = {now.files, std::max(early.mappings, now.mappings), std::max(early.heap, now.heap)};
  }
  if (!on_cpu) return;
  const Held late = Held::now();
  EXPECT_EQ(late.files, early.files);
  EXPECT_LE(late.mappings, early.mappings + 64);  // the allocator keeps some
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Their quarantine keeps freed memory, and they have their own idea of time.
  EXPECT_LE(late.heap, early.heap + (256 << 10));
  old_layer->expect_as_fast_as_ever();
#endif
}

}  // namespace
}  // namespace winnow::expert_parallel
