// Files of recorded outputs: what is read is what was written, and damage is refused.
#include <fstream>
#include <limits>
#include <sstream>

#include <gmock/gmock.h>

#include "winnow/simulator/testing/recorded.h"
#include "winnow/testing/sample.h"
#include "winnow/testing/temporary_folder.h"

namespace winnow::simulator {
namespace {

using testing::Sample;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Recording example() {
  Recording recording{"NVIDIA H200, driver of CUDA 13.0", "60d6b13", {}};
  recording.cases.push_back({"bf16-h3",
                             "sm90",
                             {{"out", DType::bf16, {1, 2, 2}, {1.5, -0.25, kInfinity, 3}, {}},
                              {"scores at indices", DType::f32, {3}, {1e-3f, -kInfinity, 7}, {}}}});
  recording.cases.push_back({"bf16-k0", "sm90", {{"length", DType::i32, {2}, {-1, 1 << 30}, {}}}});
  recording.cases.push_back({"empty", "cuda", {{"pages", DType::u8, {0, 4}, {}, {}}}});
  return recording;
}

std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string refusal(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
  try {
    read_recording(path);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "none";
}

TEST(RecordedFile, IsReadAsItWasWritten) {
  const testing::TemporaryFolder folder;
  const std::filesystem::path path = recorded_path(folder.path(), "sparse_mla::forward");
  EXPECT_EQ(path.filename(), "sparse_mla-forward.recorded");
  const Recording written = example();
  write_recording(path, written);
  const Recording read = read_recording(path);
  EXPECT_EQ(read.machine, written.machine);
  EXPECT_EQ(read.commit, written.commit);
  ASSERT_EQ(read.cases.size(), written.cases.size());
  for (std::size_t i = 0; i < read.cases.size(); ++i) {
    EXPECT_EQ(read.cases[i].name, written.cases[i].name);
    EXPECT_EQ(read.cases[i].backend, written.cases[i].backend);
    ASSERT_EQ(read.cases[i].samples.size(), written.cases[i].samples.size());
    for (std::size_t n = 0; n < read.cases[i].samples.size(); ++n) {
      const Sample &one = read.cases[i].samples[n], &other = written.cases[i].samples[n];
      EXPECT_EQ(one.what, other.what);
      EXPECT_EQ(one.dtype, other.dtype);
      EXPECT_EQ(one.shape, other.shape);
      EXPECT_EQ(one.values, other.values);
    }
  }
}

TEST(RecordedFile, DamageIsRefused) {
  using ::testing::HasSubstr;
  const testing::TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "file";
  EXPECT_THROW(read_recording(path), std::runtime_error);
  write_recording(path, example());
  const std::string whole = contents(path);
  EXPECT_EQ(refusal(path, whole), "none");
  EXPECT_THAT(refusal(path, ""), HasSubstr("does not begin with"));
  EXPECT_THAT(refusal(path, whole.substr(1)), HasSubstr("does not begin with"));
  EXPECT_THAT(refusal(path, whole.substr(0, whole.find("data\n"))), HasSubstr("before its data"));
  EXPECT_THAT(refusal(path, whole.substr(0, whole.size() - 1)), HasSubstr("ends within bf16-k0"));
  EXPECT_THAT(refusal(path, whole + "x"), HasSubstr("more than its lines say"));
  for (const char* const dtype : {"b16", "-1", ""}) {
    std::string other = whole;
    other.replace(other.find("bf16 3"), 4, dtype);
    EXPECT_THAT(refusal(path, other), HasSubstr("a bad line: output")) << dtype;
  }
  std::string other = whole;
  other.replace(other.find("3 1 2 2"), 1, "9");
  EXPECT_THAT(refusal(path, other), HasSubstr("a bad line: output"));
  EXPECT_THROW(write_recording(folder.path() / "no" / "folder", example()), std::runtime_error);
}

}  // namespace
}  // namespace winnow::simulator
