// Gives the fuzz target random bytes for some seconds, where its compiler is not there to guide
// them.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s SECONDS SEED\n", argv[0]);
    return 2;
  }
  const std::chrono::duration<double> limit(std::atof(argv[1]));
  std::mt19937_64 random(std::strtoull(argv[2], nullptr, 10));
  std::array<std::uint8_t, 4096> bytes;
  long runs = 0;
  for (const auto begin = std::chrono::steady_clock::now();
       std::chrono::steady_clock::now() - begin < limit; ++runs) {
    const std::size_t size = random() % bytes.size();
    // Mostly small numbers, as sizes that fit each other are.
    const std::uint64_t most = random() % 4 == 0 ? 256 : 8;
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(random() % most);
    bytes[0] = static_cast<std::uint8_t>(random());  // chooses the operation
    LLVMFuzzerTestOneInput(bytes.data(), size);
  }
  std::printf("%ld inputs\n", runs);
}
