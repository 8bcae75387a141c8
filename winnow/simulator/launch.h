// Launches of the simulated device, and how they are scheduled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace winnow::simulator {

// The order in which threads run and asynchronous operations complete.
struct Schedule {
  enum class Kind {
    eager,    // warps in turn; operations complete when they are issued
    late,     // warps in turn; operations complete when nothing else can go on, the last one first
    random,   // by the seed
    starved,  // operations complete at once; warp `seed` (modulo their number) runs only when no
              // other can
  };
  Kind kind = Kind::eager;
  std::uint64_t seed = 0;
};
// "eager", "late", "random:7", "starved:3", and back. Throws std::invalid_argument.
std::string to_string(const Schedule& schedule);
Schedule parse_schedule(const std::string& text);

// The device, as kernels and launches see it.
struct Settings {
  Schedule schedule;
  int multiprocessors = 2;
  std::int64_t l2_bytes = 50 << 20;
  int shared_bytes = 232448;         // that a block can have
  int compute_capability = 90;       // before the library first asks for it
  std::string driver = "simulated";  // the same
};
Settings& settings();

// What a launch found: the check's name first. The device can be used further.
class Failure : public std::runtime_error {
 public:
  Failure(std::string check_name, const std::string& report)
      : std::runtime_error(report), check_(std::move(check_name)) {}
  const std::string& check() const { return check_; }

 private:
  std::string check_;
};

struct Grid {
  unsigned grid[3], block[3];
  std::size_t shared_bytes;
  unsigned cluster = 1;  // blocks of a cluster, neighbours along x: 1 or 2
};
// Runs kernel(parameters) in every thread of every block.
void launch(const Grid& grid, void (*kernel)(const void* parameters), const void* parameters,
            std::size_t parameter_bytes);

// Of all launches since the last reset.
struct Statistics {
  std::int64_t launches = 0, blocks = 0, switches = 0, operations = 0;
};
Statistics& statistics();

// Memory of the device: NaN until it is written, unmapped memory around it. Null: there is none.
void* allocate(std::size_t bytes);
void free(void* memory);  // null: nothing. Throws std::invalid_argument for other addresses

}  // namespace winnow::simulator
