// For portable wheels. std::random_device, which Google Benchmark uses, calls this function where
// the C library of the machine that builds has it: since 2.36, which a wheel must not want.
#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include <sys/random.h>

extern "C" [[gnu::visibility("hidden")]] std::uint32_t arc4random() noexcept {
  std::uint32_t bits = 0;
  while (getrandom(&bits, sizeof(bits), 0) != sizeof(bits)) {
    if (errno != EINTR) std::abort();
  }
  return bits;
}
