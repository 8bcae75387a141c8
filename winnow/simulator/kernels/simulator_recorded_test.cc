// The simulator's outputs beside those that the same kernels gave on a GPU, within the tolerances
// of the case tables. The files stand in winnow/simulator/recorded; WINNOW_SIMULATOR_RECORDED names
// another folder.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "winnow/simulator/testing/recorded.h"
#include "winnow/simulator/testing/simulate.h"
#include "winnow/testing/sample.h"
#include "winnow/testing/temporary_folder.h"

namespace winnow::sparse_mla {
testing::Operation forward_operation();
testing::Operation distribution_operation();
testing::Operation backward_operation();
testing::Operation decode_operation();
testing::Operation store_operation();
}  // namespace winnow::sparse_mla

namespace winnow::indexer {
testing::Operation topk_operation();
testing::Operation topk_paged_operation();
testing::Operation scores_operation();
testing::Operation backward_operation();
testing::Operation quantize_operation();
}  // namespace winnow::indexer

namespace winnow::simulator {
namespace {

using testing::Sample;

const std::vector<testing::Operation>& simulated_operations() {
  static const std::vector<testing::Operation> list = {
      sparse_mla::forward_operation(),  sparse_mla::distribution_operation(),
      sparse_mla::backward_operation(), sparse_mla::decode_operation(),
      sparse_mla::store_operation(),    indexer::quantize_operation(),
      indexer::scores_operation(),      indexer::topk_operation(),
      indexer::topk_paged_operation(),  indexer::backward_operation()};
  return list;
}

const testing::Operation& simulated_operation(const std::string& name) {
  for (const testing::Operation& operation : simulated_operations()) {
    if (operation.name == name) return operation;
  }
  throw std::runtime_error("no operation " + name);
}

// What differs; empty where the simulator agrees.
std::vector<std::string> differences(const std::vector<Sample>& simulated,
                                     const std::vector<Sample>& recorded) {
  if (simulated.size() != recorded.size()) return {"another number of outputs was recorded"};
  std::vector<std::string> found;
  for (std::size_t i = 0; i < simulated.size(); ++i) {
    const testing::Comparison comparison = compare(simulated[i], recorded[i]);
    if (!comparison.passed) found.push_back(comparison.what + ": " + comparison.detail);
  }
  return found;
}

TEST(SimulatorRecorded, FindsWhatDiffers) {
  const testing::TemporaryFolder folder;
  const testing::Operation& operation = simulated_operation("sparse_mla::forward");
  const std::string name = "bf16-some-nothing";
  const std::filesystem::path path = recorded_path(folder.path(), operation.name);
  settings().schedule = parse_schedule("eager");
  write_recording(path, {"simulator", "", record(operation, {{name}}, {DeviceType::cuda, {}})});
  Recording recording = read_recording(path);
  ASSERT_EQ(recording.cases.size(), 1u);
  std::vector<Sample>& recorded = recording.cases[0].samples;
  ASSERT_EQ(recorded.size(), 3u);  // out, max_logits, lse

  const Simulated simulated = simulate(operation, name, parse_schedule("random:1"));
  ASSERT_TRUE(simulated.failed.empty()) << simulated.report;
  const std::vector<Sample>& samples = simulated.outcome.samples;
  EXPECT_THAT(differences(samples, recorded), ::testing::IsEmpty());
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const Sample before = recorded[i];
    recorded[i].values.back() += 1.5 * samples[i].tolerances.back();
    EXPECT_THAT(differences(samples, recorded),
                ::testing::ElementsAre(::testing::StartsWith(before.what + ": 1 differ")));
    recorded[i] = before;
  }
  recorded.pop_back();
  EXPECT_THAT(differences(samples, recorded), ::testing::SizeIs(1));
}

// ---- What is committed -------------------------------------------------------------------------

const char* other_folder() { return std::getenv("WINNOW_SIMULATOR_RECORDED"); }
std::filesystem::path recorded_folder() {
  return other_folder() == nullptr ? WINNOW_SOURCE_DIR "/simulator/recorded" : other_folder();
}

std::vector<std::string> names_of(const std::vector<RecordedCase>& cases) {
  std::vector<std::string> names;
  for (const RecordedCase& one : cases) names.push_back(one.name);
  return names;
}

TEST(SimulatorRecorded, FilesHoldEveryCaseOfAGpu) {
  std::uintmax_t bytes = 0;
  for (const RecordedOperation& operation : recorded_operations()) {
    const std::filesystem::path path = recorded_path(recorded_folder(), operation.name);
    const Recording recording = read_recording(path);
    EXPECT_THAT(recording.machine, ::testing::StartsWith("NVIDIA ")) << path;
    EXPECT_FALSE(recording.commit.empty()) << path;
    EXPECT_EQ(names_of(recording.cases), operation.cases) << path;
    for (const RecordedCase& one : recording.cases) {
      EXPECT_THAT(one.backend, ::testing::AnyOf("sm90", "cuda")) << path << ", " << one.name;
      EXPECT_FALSE(one.samples.empty()) << path << ", " << one.name;
    }
    bytes += std::filesystem::file_size(path);
  }
  EXPECT_LE(bytes, 4u << 20);
}

struct OnGpu {
  std::string operation, name;
};
void PrintTo(const OnGpu& one, std::ostream* out) { *out << one.operation << ", " << one.name; }

// The first cases of each operation, or all.
std::vector<OnGpu> recorded_cases(std::size_t most) {
  std::vector<OnGpu> list;
  for (const RecordedOperation& operation : recorded_operations()) {
    for (std::size_t i = 0; i < std::min(most, operation.cases.size()); ++i) {
      list.push_back({operation.name, operation.cases[i]});
    }
  }
  return list;
}

class SimulatorBesideGpu : public ::testing::TestWithParam<OnGpu> {};
TEST_P(SimulatorBesideGpu, Agrees) {
  const auto& [operation, name] = GetParam();
  const Recording recording = read_recording(recorded_path(recorded_folder(), operation));
  const auto recorded = std::find_if(recording.cases.begin(), recording.cases.end(),
                                     [&](const RecordedCase& one) { return one.name == name; });
  ASSERT_NE(recorded, recording.cases.end()) << "was not recorded";
  const Simulated simulated =
      simulate(simulated_operation(operation), name, parse_schedule("random:1"));
  ASSERT_TRUE(simulated.failed.empty()) << simulated.report;
  EXPECT_EQ(to_string(simulated.outcome.backend), recorded->backend);
  EXPECT_THAT(differences(simulated.outcome.samples, recorded->samples), ::testing::IsEmpty())
      << "recorded on " << recording.machine;
}
constexpr auto kNameOf = [](const auto& tested) {
  std::string text = tested.param.operation + "_" + tested.param.name;
  std::replace(text.begin(), text.end(), ':', '_');
  return test_name(text);
};
INSTANTIATE_TEST_SUITE_P(Quick, SimulatorBesideGpu, ::testing::ValuesIn(recorded_cases(1)),
                         kNameOf);
INSTANTIATE_TEST_SUITE_P(Thorough, SimulatorBesideGpu, ::testing::ValuesIn(recorded_cases(100)),
                         kNameOf);

TEST(SimulatorRecorded, RefusesWhatCannotBeRecorded) {
  testing::CaseOutcome good{
      Backend::sm90, {{"x", 0, 0, true, ""}}, {{"x", DType::f32, {0}, {}, {}}}};
  testing::CaseOutcome wrong = good, unsampled = good, elsewhere = good;
  wrong.comparisons[0].passed = false;
  unsampled.samples.clear();
  elsewhere.backend = Backend::cpu;
  const auto refusal = [](const testing::CaseOutcome& outcome, const std::string& name) {
    const testing::Operation operation{
        "op", "", {{"case", "", [&](const testing::Target&) { return outcome; }}}, {}};
    try {
      record(operation, {{name}}, {DeviceType::cuda, {}});
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  EXPECT_EQ(refusal(good, "case"), "none");
  EXPECT_EQ(refusal(good, "other"), "op, other: not in the table");
  EXPECT_EQ(refusal(wrong, "case"), "op, case: fails against the oracle");
  EXPECT_EQ(refusal(unsampled, "case"), "op, case: its table takes no samples");
  EXPECT_EQ(refusal(elsewhere, "case"), "op, case: runs on the CPU");
}

}  // namespace
}  // namespace winnow::simulator
