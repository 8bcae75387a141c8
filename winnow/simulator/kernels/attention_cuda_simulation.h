// The tests of sparse MLA on every GPU simulate one of compute capability 8.6: it has no other
// kernels for the operations, and blocks have 99 KiB of shared memory, or more where a test says
// so.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "winnow/simulator/kernels/sparse_mla_simulation.h"

namespace winnow::sparse_mla {

inline constexpr int kLeast = 99 * 1024, kLarge = 227 * 1024;
inline const bool kSet = [] {  // before the library asks
  simulator::settings().compute_capability = 86;
  simulator::settings().shared_bytes = kLeast;
  return true;
}();

template <class Call>
void with_much_memory(const Call& call) {
  simulator::settings().shared_bytes = kLarge;
  call();
  simulator::settings().shared_bytes = kLeast;
}

inline void expect_passes_with_much_memory(const testing::Operation& operation,
                                           const std::vector<PassingCase>& list,
                                           std::size_t cases) {
  with_much_memory([&] {
    for (std::size_t i = 0; i < cases; ++i) {
      simulator::expect_passes(operation, list[i].name, list[i].schedules.front());
    }
  });
}

template <testing::Operation (*kOperation)()>
bool register_bugs_with_much_memory(const std::string& suite, const std::vector<PlantedBug>& bugs,
                                    const simulator::Where& where = simulator::Where::current()) {
  const auto test = [](const PlantedBug& one) {
    with_much_memory([&] { simulator::expect_found(kOperation(), one); });
  };
  return simulator::register_bugs(suite, bugs, test, where);
}

}  // namespace winnow::sparse_mla
