// Damaged and forged records: whatever they contain, `winnow replay` ends with a result or an
// Error, in little memory. The test replays WINNOW_SOAK_ITERATIONS (400) records; a failure prints
// the WINNOW_SOAK_SEED that repeats it, and WINNOW_SOAK_RECORD=FILE keeps the last record. Under
// AddressSanitizer it detects accesses outside of a tensor.
#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "tools/winnow/commands.h"
#include "tools/winnow/testing/run_program.h"
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "winnow/core/error.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/temporary_folder.h"

namespace winnow::cli {
namespace {

namespace fs = std::filesystem;
using testing::Random;

// Records of calls of the operation's first cases, as `winnow verify` makes them.
void add_records(const std::string& operation, int cases, std::vector<std::string>& records) {
  const testing::TemporaryFolder folder;
  const std::string environment = "WINNOW_RECORD=" + folder.path().string();
  std::istringstream lines(run("verify " + operation + " --list").output);
  std::string name, one, rest;
  for (int i = 0; i < cases && lines >> name >> one && std::getline(lines, rest); ++i) {
    run("verify " + operation + " --device cpu --case " + one,
        environment + " WINNOW_RECORD_CALLS=1 WINNOW_RECORD_ONLY=" + operation);
  }
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    std::ifstream file(entry.path(), std::ios::binary);
    records.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
}

std::size_t below(Random& random, std::size_t count) {
  return count == 0 ? 0 : std::size_t(random.below(std::int64_t(count)));
}

// (position, length) of the numbers in the text.
std::vector<std::pair<std::size_t, std::size_t>> numbers(const std::string& text) {
  std::vector<std::pair<std::size_t, std::size_t>> found;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    while (end < text.size() && (std::isdigit(static_cast<unsigned char>(text[end])) != 0)) ++end;
    if (end > at) found.emplace_back(at, end - at);
    at = end + 1;
  }
  return found;
}

std::string odd_number(Random& random) {
  static const std::vector<std::string> kOdd = {"0",
                                                "-1",
                                                "1",
                                                "2",
                                                "3",
                                                "7",
                                                "8",
                                                "64",
                                                "100000",
                                                "2147483647",
                                                "2147483648",
                                                "1099511627776",
                                                "4611686018427387904",
                                                "9223372036854775807",
                                                "-9223372036854775808",
                                                "99999999999999999999",
                                                "nan",
                                                "inf",
                                                "-inf",
                                                "1e308",
                                                "1e-320",
                                                "0x7",
                                                "-",
                                                "1 1",
                                                ""};
  return kOdd[below(random, kOdd.size())];
}

// One change, mostly of the text before the tensors.
void damage(std::string& record, Random& random) {
  const std::size_t data = std::min(record.find("\ndata "), record.size());
  const auto flip = [&](std::size_t from, std::size_t to) {
    if (to > from) record[from + below(random, to - from)] ^= char(1 << random.below(8));
  };
  switch (random.below(8)) {
    case 0:
      flip(0, data);
      break;
    case 1:
      flip(data, record.size());
      break;
    case 2:
      record.resize(below(random, record.size() + 1));
      break;
    case 3: {  // bytes of indices, lengths and everything else become extreme
      const std::size_t at = data + below(random, record.size() - data);
      const std::size_t count = std::min<std::size_t>(4 + below(random, 60), record.size() - at);
      record.replace(at, count, count, random.below(2) == 0 ? '\xff' : '\x7f');
      break;
    }
    case 4: {  // a line twice, or none
      const std::size_t at = record.find('\n', below(random, data + 1));
      const std::size_t end = at == std::string::npos ? at : record.find('\n', at + 1);
      if (end == std::string::npos) break;
      const std::string line = record.substr(at, end - at);
      random.below(2) == 0 ? record.erase(at, end - at) : record.insert(at, line);
      break;
    }
    default: {
      std::string head = record.substr(0, data);
      // One number, or all equal ones, so that sizes that must agree still do.
      const auto found = numbers(head);
      if (found.empty()) break;
      const auto [at, size] = found[below(random, found.size())];
      const std::string was = head.substr(at, size), now = odd_number(random);
      const bool all = random.below(2) == 0;
      for (std::size_t i = found.size(); i-- > 0;) {
        const bool this_one =
            all ? head.compare(found[i].first, found[i].second, was) == 0 : found[i].first == at;
        if (this_one) head.replace(found[i].first, found[i].second, now);
      }
      record.replace(0, data, head);
    }
  }
}

// Makes a tensor's first dimension a broadcast: "[7,4] [4,1] 112" becomes "[N,4] [0,1] 16". Forged
// ones can have any size; N is small enough for a call to end.
void widen(std::string& record, Random& random) {
  const std::size_t data = std::min(record.find("\ndata "), record.size());
  std::vector<std::size_t> tensors;
  for (const char* kind : {"\ntensor ", "\noutput "}) {
    for (std::size_t at = 0; (at = record.find(kind, at)) < data; ++at) tensors.push_back(at);
  }
  if (tensors.empty()) return;
  const std::size_t at = tensors[below(random, tensors.size())] + 1;
  std::istringstream words(record.substr(at, record.find('\n', at) - at));
  std::string kind, name, dtype, device, shape, strides;
  std::int64_t bytes = 0;
  if (!(words >> kind >> name >> dtype >> device >> shape >> strides >> bytes)) return;
  if (shape.find(',') == std::string::npos || strides.find(',') == std::string::npos) return;
  const std::int64_t stride = std::atoll(strides.c_str() + 1), size = std::atoll(shape.c_str() + 1);
  const std::int64_t element = dtype == "f32" || dtype == "i32"    ? 4
                               : dtype == "f16" || dtype == "bf16" ? 2
                               : dtype == "f64" || dtype == "i64"  ? 8
                                                                   : 1;
  const std::int64_t left = bytes - (size - 1) * stride * element;
  if (size < 1 || left < 0 || stride < 0) return;
  std::size_t before = data + 1;  // the first byte of the tensor among the data
  before = record.find('\n', before) + 1;
  std::istringstream lines(record.substr(0, at));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream parts(line);
    std::string part;
    std::int64_t count = 0;
    if (parts >> part && (part == "tensor" || part == "output") &&
        parts >> part >> part >> part >> part >> part >> count) {
      before += std::size_t(count);
    }
  }
  if (before + std::size_t(bytes) > record.size()) return;
  record.erase(before + std::size_t(left), std::size_t(bytes - left));
  const std::string many = std::to_string(std::int64_t{1} << random.below(16));
  const std::string line = kind + " " + name + " " + dtype + " " + device + " [" + many +
                           shape.substr(shape.find(',')) + " [0" +
                           strides.substr(strides.find(',')) + " " + std::to_string(left);
  record.replace(at, record.find('\n', at) - at, line);
}

TEST(DamagedRecord, IsRepeatedOrRefused) {
  std::vector<std::string> records;
  for (const testing::Operation& operation : testing::operations()) {
    if (operation.repeat) add_records(operation.name, 3, records);
  }
  ASSERT_GE(records.size(), 40u);
  const testing::TemporaryFolder folder;
  const char* const kept = std::getenv("WINNOW_SOAK_RECORD");
  const std::string file = kept != nullptr ? kept : (folder.path() / "damaged.call").string();
  const std::int64_t count = testing::environment_number("WINNOW_SOAK_ITERATIONS", 400);
  const std::int64_t seed = testing::environment_number("WINNOW_SOAK_SEED", 1);
  std::int64_t repeated = 0, refused = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Random random(std::uint64_t(seed + i));
    std::string record = records[below(random, records.size())];
    if (random.below(4) == 0) widen(record, random);
    for (std::int64_t times = random.below(3) + (random.below(4) != 0); times > 0; --times) {
      damage(record, random);
    }
    std::ofstream(file, std::ios::binary) << record;
    SCOPED_TRACE("WINNOW_SOAK_ITERATIONS=1 WINNOW_SOAK_SEED=" + std::to_string(seed + i));
    const auto start = std::chrono::steady_clock::now();
    std::ostringstream printed;
    std::streambuf* const screen = std::cout.rdbuf(printed.rdbuf());
    try {
      ReplayOptions options;
      options.file = file;
      run_replay(options);
      ++repeated;
    } catch (const Error& error) {
      ++refused;
      EXPECT_NE(error.code(), ErrorCode::internal) << error.what();
    } catch (const std::bad_alloc&) {
      ADD_FAILURE() << "memory ran out";
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    std::cout.rdbuf(screen);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took.count(), 20);
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    ASSERT_LT(usage.ru_maxrss, 1 << 20) << "KiB of memory";
    if (HasFailure())
      std::cout << printed.str() << record.substr(0, record.find("\ndata ")) << "\n";
  }
  std::cout << repeated << " repeated, " << refused << " refused\n";
  EXPECT_GT(repeated, count / 20);
  EXPECT_GT(refused, count / 20);
}

}  // namespace
}  // namespace winnow::cli
