// A launch that waits in a stream or runs, and what streams.cc asks of launch.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>

#include "winnow/simulator/engine/global_shadow.h"
#include "winnow/simulator/launch.h"

namespace winnow::simulator {

// What a kernel that begins early knows of the one ahead of it: that what its blocks have read has
// been read where they let the next kernel begin, and that those kernels have ended for which all
// of them had waited by then.
struct LetGo {
  Others reads;
  bool have_waited = true;
  std::shared_ptr<const Horizon> behind;
};

struct GridRun {
  Grid grid;
  void (*kernel)(const void* parameters);
  const void* function = nullptr;  // of the program, which that calls
  std::unique_ptr<std::byte, decltype(&std::free)> parameters{nullptr, std::free};
  std::size_t parameter_bytes;
  int device;
  Ticket ticket;        // its place in a stream
  std::int64_t number;  // of the launch
  unsigned gpu;         // of the rank, which has one of its own
  // What has ended for its threads, behind griddepcontrol.wait and before.
  std::shared_ptr<const Horizon> behind, behind_early;
  std::shared_ptr<LetGo> lets = std::make_shared<LetGo>();
  std::shared_ptr<const LetGo> ahead;  // null: it begins behind the end of all that is ahead
  // By words to the host when it was queued, and to what has ended, as far as its threads have
  // asked.
  Others told_early, told;
  Others told_at_end;      // to its own threads
  std::mt19937_64 random;  // seeds of its clusters
  unsigned clusters;
  unsigned begun = 0;  // clusters
  unsigned left;       // clusters that have not ended
  unsigned held_back;  // blocks that have neither ended nor let the next kernel come
};
// The function that the calling thread has noted for its next launch.
const void* noted_kernel();
// Where a bug is planted in launches of the kernel.
void alter_launch(const void* kernel, Grid& grid, const void*& stream);
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
// Lets the clocks of kernels go on. Returns what they show then.
std::uint64_t pass_time(std::uint64_t ticks);

}  // namespace winnow::simulator
