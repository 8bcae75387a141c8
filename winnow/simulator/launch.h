// Launches of the simulated device, and how they are scheduled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
  int devices = 1;
  // Clusters of a device that run side by side, however many its multiprocessors could hold.
  unsigned resident_clusters = 3;
  // Turns in which nothing changes, until that counts as a deadlock.
  int most_idle_turns = 8000;
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

// ---- Streams -----------------------------------------------------------------------------------
// What is queued runs when a host waits for it, side by side with what other streams hold. Every
// call may come from any host thread; a stream is a handle of the current device.

int current_device();  // of the host thread
void set_current_device(int device);

// The operation of that number in a stream, counted from 1; none: stream 0.
struct Ticket {
  std::uint32_t stream = 0, number = 0;
};
struct Grid {
  unsigned grid[3], block[3];
  std::size_t shared_bytes;
  unsigned cluster = 1;  // blocks of a cluster, neighbours along x
  bool early = false;    // may begin before the kernel ahead of it has ended
};
// Queues kernel(parameters) in every thread of every block, with a copy of the parameters' bytes.
// Throws Failure if it cannot be launched.
Ticket launch(const void* stream, const Grid& grid, void (*kernel)(const void* parameters),
              const void* parameters, std::size_t parameter_bytes);
// Queues a call; `always`: it is made even if a failure ends what is before it.
Ticket enqueue(const void* stream, std::function<void()> operation, bool always = false);
// The last operation of the stream; and what comes next in a stream waits for an operation.
Ticket last_operation(const void* stream);
void wait_in_stream(const void* stream, Ticket ticket);
bool has_ended(Ticket ticket);

// These wait, and run what is queued meanwhile. They throw the Failure that it ends with.
void synchronize(Ticket ticket);
void synchronize_device();  // all streams of the current device
void synchronize_all();
void wait_until(const std::function<bool()>& is_over);

// Whether the operation has ended; throws the Failure of what has been queued.
bool look(Ticket ticket);

// Runs body(0) to body(count - 1) in threads of their own, of which one runs at a time, until it
// waits here or lets others run (sched_yield(), sleeps). While none can go on, what is queued runs.
// A Failure reaches every one of them. Nothing may leave `body`.
void run_hosts(int count, const std::function<void(int)>& body);
// False: the thread is not one of run_hosts().
bool let_others_run();

// Of all launches since the last reset.
struct Statistics {
  std::int64_t launches = 0, blocks = 0, switches = 0, operations = 0;
};
Statistics& statistics();

// Memory of the device: NaN until it is written, unmapped memory around it. Null: there is none.
void* allocate(std::size_t bytes);
// Memory of the host that kernels reach. What a kernel releases to the system by a word of it is
// known to whatever is queued from then on: a host may have read the word.
void* allocate_of_host(std::size_t bytes);
// Waits for all streams; what they fail with, the next call throws that waits or launches. Null:
// nothing. Throws std::invalid_argument for other addresses.
void free(void* memory);
void free_in_stream(void* memory, const void* stream);
// From memory of the host, whose bytes are taken at once, or of the device.
void copy_in_stream(void* to, const void* from, std::size_t bytes, const void* stream);
// Rows of `width` bytes, `pitch` bytes apart.
void fill_in_stream(void* memory, std::size_t pitch, int value, std::size_t width,
                    std::size_t height, const void* stream);

}  // namespace winnow::simulator
