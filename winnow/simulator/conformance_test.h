// Fixture of the conformance tests: passes 32-bit words to a micro-kernel and returns the words
// that it wrote. The same tests run on a GPU (conformance_gpu_test) and in the simulator
// (conformance_test).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/backend.h"
#include "winnow/core/device_memory.h"
#include "winnow/simulator/conformance.h"

namespace winnow::conformance {

using Words = std::vector<std::uint32_t>;

class Conformance : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const BackendStatus& status : backends()) {
      if (status.backend == Backend::sm90 && !status.supported) GTEST_SKIP() << status.reason;
    }
  }
  static constexpr std::uint32_t kUntouched = 0xabadcafeu;
  // Launches on `in` and returns `words` words of output, each kUntouched before the launch.
  static Words run(ConformanceLaunch launch, const Words& in, std::size_t words) {
    constexpr Device kGpu{DeviceType::cuda, 0};
    const Memory input(4 * in.size()), output(4 * words);
    Words out(words, kUntouched);
    copy_between(input.data, kGpu, in.data(), {}, 4 * in.size());
    copy_between(output.data, kGpu, out.data(), {}, 4 * words);
    launch(static_cast<const std::uint32_t*>(input.data), static_cast<std::uint32_t*>(output.data));
    synchronize(kGpu);
    copy_between(out.data(), {}, output.data, kGpu, 4 * words);
    return out;
  }

 private:
  struct Memory {
    explicit Memory(std::size_t bytes) : data(allocate_on({DeviceType::cuda, 0}, bytes)) {}
    ~Memory() { free_on({DeviceType::cuda, 0}, data); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    void* data;
  };
};

inline std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float number(std::uint32_t word) { return std::bit_cast<float>(word); }

inline Words random_words(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Words words(count);
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  return words;
}

}  // namespace winnow::conformance
