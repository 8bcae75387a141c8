#include "winnow/simulator/testing/recorded.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <ios>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "winnow/core/tensor.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/sample.h"

namespace winnow::simulator {
namespace {

using testing::Sample;

constexpr std::string_view kFirstLine = "winnow, outputs recorded on a GPU, version 1";

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& why) {
  throw std::runtime_error(path.string() + ": " + why);
}

std::int64_t count_of(const Sample& sample) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sample.shape) numel *= size;
  return testing::sample_count(numel);
}

template <class T>
void convert(const std::vector<double>& values, std::span<T> to) {
  for (std::size_t i = 0; i < values.size(); ++i) to[i] = static_cast<T>(values[i]);
}

Tensor elements_of(const Sample& sample) {
  Tensor elements(sample.dtype, {static_cast<std::int64_t>(sample.values.size())});
  switch (sample.dtype) {
    case DType::u8:
      convert(sample.values, elements.values<std::uint8_t>());
      break;
    case DType::i32:
      convert(sample.values, elements.values<std::int32_t>());
      break;
    case DType::i64:
      convert(sample.values, elements.values<std::int64_t>());
      break;
    default:
      for (std::int64_t i = 0; i < elements.numel(); ++i) {
        testing::fill(elements.view().slice(0, i, i + 1),
                      sample.values[static_cast<std::size_t>(i)]);
      }
  }
  return elements;
}

// Of "output f32 2 4 64 lse", whose 2 is the rank.
Sample parse_output(const std::filesystem::path& path, const std::string& line) {
  constexpr std::array kDTypes = {DType::f32, DType::f16, DType::bf16, DType::f8_e4m3,
                                  DType::u8,  DType::i32, DType::i64,  DType::f64};
  std::istringstream words(line);
  std::string word, dtype;
  std::size_t rank = 0;
  words >> word >> dtype >> rank;
  Sample sample;
  const auto* const found = std::find_if(kDTypes.begin(), kDTypes.end(),
                                         [&](DType one) { return to_string(one) == dtype; });
  if (!words || found == kDTypes.end() || rank > kMaxRank) fail(path, "a bad line: " + line);
  sample.dtype = *found;
  sample.shape.resize(rank);
  for (std::int64_t& size : sample.shape) words >> size;
  std::getline(words >> std::ws, sample.what);
  const bool negative = std::any_of(sample.shape.begin(), sample.shape.end(),
                                    [](std::int64_t size) { return size < 0; });
  if (words.fail() || negative) fail(path, "a bad line: " + line);
  return sample;
}

std::string value_of(const std::string& line, std::string_view key) {
  return line.starts_with(key) ? line.substr(key.size()) : std::string();
}

}  // namespace

const std::vector<RecordedOperation>& recorded_operations() {
  static const std::vector<RecordedOperation> list = {
      {"sparse_mla::forward",
       {"bf16-h64", "bf16-h128", "bf16-k512", "bf16-d512-h16-k100", "bf16-all-rules",
        "bf16-some-nothing", "bf16-dense-ragged-h70-d512"}},
      {"sparse_mla::distribution",
       {"bf16-h64", "bf16-h192", "bf16-k512", "bf16-d512-h16-k100", "bf16-all-rules",
        "bf16-dense-ragged-h70-d512"}},
      // The fused design, then the split one.
      {"sparse_mla::backward",
       {"bf16-h64", "bf16-h3", "bf16-d512-h16-k100", "bf16-all-rules", "bf16-h16-delta",  //
        "bf16-h128", "bf16-sink-mixed", "bf16-d512-h16-k100-deterministic",
        "bf16-all-rules-all-options"}},
      {"sparse_mla::decode",
       {"fp8_656-h64", "fp8_584-h64", "bf16_576-h64", "bf16_512-k192", "fp8_656-k2048",
        "fp8_584-extra-sq2-length", "fp8_656-some-nothing"}},
      {"sparse_mla::store",
       {"fp8_656-block3", "fp8_584-block3", "bf16_576-block3", "bf16_512-skipped"}},
      {"indexer::quantize", {"bf16-d128", "bf16-d64-power-pages", "f16-heads", "f32-skipped"}},
      {"indexer::scores",
       {"bf16-h64", "bf16-h20", "bf16-d64-h16", "bf16-stride4-from700", "f8_e4m3-h128",
        "f8_e4m3-h20", "f8_e4m3-d64-h64"}},
      {"indexer::topk",
       {"bf16-h64", "bf16-h20", "bf16-ranges-ragged", "bf16-all-rules", "f8_e4m3-h128",
        "f8_e4m3-sk127"}},
      {"indexer::topk_paged",
       {"h64", "d64", "h3", "h128", "sq5", "absent", "nan-larger", "long-h64-sq2"}},
      {"indexer::backward",
       {"bf16-h64", "bf16-h96-deterministic", "bf16-h16-dense-all-options", "bf16-d64-h64",
        "bf16-all-rules-as-q"}},
  };
  return list;
}

std::filesystem::path recorded_path(const std::filesystem::path& folder,
                                    const std::string& operation) {
  std::string name;
  for (const char c : operation) {
    if (c != ':') {
      name += c;
    } else if (!name.ends_with('-')) {
      name += '-';
    }
  }
  return folder / (name + ".recorded");
}

void write_recording(const std::filesystem::path& path, const Recording& recording) {
  std::ofstream file(path, std::ios::binary);
  file << kFirstLine << "\nmachine " << recording.machine << "\ncommit " << recording.commit
       << '\n';
  for (const RecordedCase& one : recording.cases) {
    file << "case " << one.name << "\nbackend " << one.backend << '\n';
    for (const Sample& sample : one.samples) {
      file << "output " << to_string(sample.dtype) << ' ' << sample.shape.size();
      for (const std::int64_t size : sample.shape) file << ' ' << size;
      file << ' ' << sample.what << '\n';
    }
  }
  file << "data\n";
  for (const RecordedCase& one : recording.cases) {
    for (const Sample& sample : one.samples) {
      const Tensor elements = elements_of(sample);
      file.write(static_cast<const char*>(elements.data()),
                 elements.numel() * size_of(elements.dtype()));
    }
  }
  file.close();
  if (!file) fail(path, "cannot be written");
}

Recording read_recording(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "cannot be read");
  Recording recording;
  std::string line;
  if (!std::getline(file, line) || line != kFirstLine) {
    fail(path, "does not begin with \"" + std::string(kFirstLine) + "\"");
  }
  while (std::getline(file, line) && line != "data") {
    if (line.starts_with("machine ")) {
      recording.machine = value_of(line, "machine ");
    } else if (line.starts_with("commit ")) {
      recording.commit = value_of(line, "commit ");
    } else if (line.starts_with("case ")) {
      recording.cases.push_back({value_of(line, "case "), "", {}});
    } else if (line.starts_with("backend ") && !recording.cases.empty()) {
      recording.cases.back().backend = value_of(line, "backend ");
    } else if (line.starts_with("output ") && !recording.cases.empty()) {
      recording.cases.back().samples.push_back(parse_output(path, line));
    } else {
      fail(path, "a bad line: " + line);
    }
  }
  if (line != "data") fail(path, "ends before its data");
  for (RecordedCase& one : recording.cases) {
    for (Sample& sample : one.samples) {
      Tensor elements(sample.dtype, {count_of(sample)});
      file.read(static_cast<char*>(elements.data()), elements.numel() * size_of(sample.dtype));
      if (!file) fail(path, "ends within " + one.name);
      sample.values = testing::read(elements);
    }
  }
  if (file.get() != std::ifstream::traits_type::eof()) fail(path, "has more than its lines say");
  return recording;
}

std::vector<RecordedCase> record(const testing::Operation& operation,
                                 std::span<const std::string> cases,
                                 const testing::Target& target) {
  std::vector<RecordedCase> recorded;
  for (const std::string& name : cases) {
    const auto at = std::find_if(operation.cases.begin(), operation.cases.end(),
                                 [&](const testing::Case& one) { return one.name == name; });
    const auto refuse = [&](const std::string& why) {
      throw std::runtime_error(operation.name + ", " + name + ": " + why);
    };
    if (at == operation.cases.end()) refuse("not in the table");
    const testing::CaseOutcome outcome = at->run(target);
    if (!outcome.passed()) refuse("fails against the oracle");
    if (outcome.samples.empty()) refuse("its table takes no samples");
    if (target.device == DeviceType::cuda && outcome.backend == Backend::cpu) {
      refuse("runs on the CPU");
    }
    recorded.push_back({name, std::string(to_string(outcome.backend)), outcome.samples});
  }
  return recorded;
}

}  // namespace winnow::simulator
