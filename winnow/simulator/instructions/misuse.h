// How the instructions of this folder report a rule of the hardware that their caller breaks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace winnow::simulator {

// What an instruction does with such operands is undefined or an error on a GPU. what() begins with
// the check's name: "tensor map: ...".
class Misuse : public std::runtime_error {
 public:
  Misuse(const char* check, const std::string& text)
      : std::runtime_error(std::string(check) + ": " + text), check_(check) {}
  // The check's name, a literal.
  const char* check() const { return check_; }

 private:
  const char* check_;
};

// Throws Misuse unless `holds`; `text()` is called only then.
template <class Text>
void require(bool holds, const char* check, const Text& text) {
  if (!holds) throw Misuse(check, text());
}

inline void require_aligned(std::uint64_t address, std::uint64_t alignment, const char* check,
                            const char* subject) {
  require(address % alignment == 0, check, [&] {
    return std::string(subject) + " " + std::to_string(address) + " is not a multiple of " +
           std::to_string(alignment);
  });
}

// `address` and `bytes` of the `size` bytes of a block's shared memory.
inline void require_inside(std::uint64_t address, std::uint64_t bytes, std::size_t size,
                           const char* check) {
  require(address + bytes <= size, check, [&] {
    return "bytes " + std::to_string(address) + " to " + std::to_string(address + bytes) +
           " lie outside of the " + std::to_string(size) + " bytes of shared memory";
  });
}

}  // namespace winnow::simulator
