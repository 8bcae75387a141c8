// The source lines of accesses through pointers, which are known by the address of their code: the
// linker's companion addr2line finds them in the line table of the program.
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

#include <unistd.h>

#include "winnow/simulator/engine/report.h"

extern "C" {
extern char __executable_start;  // of the linker
}

namespace winnow::simulator {
namespace {

// The innermost of the inlined functions' lines that is of a kernel, not of a header's that stands
// for CUDA's.
std::string look_up(const void* code) {
  constexpr const char* kUnknown = "a plain access";
  // The call before the code it returns to.
  const auto address =
      static_cast<std::uintptr_t>(static_cast<const char*>(code) - 1 - &__executable_start);
  char command[96];
  std::snprintf(command, sizeof(command), "addr2line -i -e /proc/%d/exe 0x%zx 2>/dev/null",
                static_cast<int>(getpid()), static_cast<std::size_t>(address));
  std::FILE* const lines = popen(command, "r");
  if (lines == nullptr) return kUnknown;
  std::string found;
  for (char line[4096]; std::fgets(line, sizeof(line), lines) != nullptr;) {
    const std::string text(line);
    const std::string place = text.substr(0, text.find_first_of(" \n"));
    if (!found.empty() || place.find("winnow/") == std::string::npos || place.ends_with("?") ||
        place.find("winnow/simulator/include/") != std::string::npos) {
      continue;
    }
    found = place.substr(place.rfind('/') + 1);
  }
  pclose(lines);
  return found.empty() ? kUnknown : found;
}

}  // namespace

std::string line_of_code(const void* code) {
  static std::map<const void*, std::string> known;
  const auto [place, is_new] = known.try_emplace(code);
  if (is_new) place->second = look_up(code);
  return place->second;
}

}  // namespace winnow::simulator
