// A launch that waits in a stream or runs, and what streams.cc asks of launch.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>

#include "winnow/simulator/launch.h"

namespace winnow::simulator {

struct GridRun {
  Grid grid;
  void (*kernel)(const void* parameters);
  std::unique_ptr<std::byte, decltype(&std::free)> parameters{nullptr, std::free};
  std::size_t parameter_bytes;
  int device;
  Ticket ticket;           // its place in a stream
  std::mt19937_64 random;  // seeds of its clusters
  unsigned clusters;
  unsigned begun = 0;  // clusters
  unsigned left;       // clusters that have not ended
  unsigned held_back;  // blocks that have neither ended nor let the next kernel come
};
// Whether all before it in its stream has ended.
bool knows_before(const GridRun& run);

// Throws Failure.
void check_launch(const Grid& grid);
unsigned resident_clusters(int device);
// Makes the grid's next cluster resident.
void begin_cluster(GridRun& run);
// What threads did in a turn: something, or nothing but to look again at what they wait for.
enum class Ran { nothing, poll, something };
// Lets resident clusters run. Throws Failure.
Ran run_resident();
void drop_resident();
[[noreturn]] void report_deadlock();
// Before the first operation after all streams were empty: schedules begin anew.
void begin_session();
// Lets the clocks of kernels go on.
void pass_time(std::uint64_t ticks);

}  // namespace winnow::simulator
