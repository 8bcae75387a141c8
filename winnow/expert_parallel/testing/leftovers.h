// What a test may leave behind: open files, mappings, memory, a folder. Only for tests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "winnow/testing/temporary_folder.h"

namespace winnow::expert_parallel {

using testing::TemporaryFolder;

inline int entries_of(const std::filesystem::path& folder) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

inline int open_files() { return entries_of("/proc/self/fd"); }

// Mappings of this process whose name contains `name`.
inline int mappings(std::string_view name = {}) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(name) != std::string::npos;
  return count;
}

// "RssShmem", "VmRSS" of this process, or "MemAvailable" of "/proc/meminfo", in KiB.
inline std::int64_t memory_of_kind(const std::string& kind,
                                   const char* file = "/proc/self/status") {
  std::ifstream status(file);
  std::string word;
  std::int64_t number = 0;
  while (status >> word) {
    if (word == kind + ":" && status >> number) return number;
  }
  return -1;
}

}  // namespace winnow::expert_parallel
