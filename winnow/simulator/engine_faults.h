// Micro-kernels that break a rule each, for the tests of what the engine reports.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace winnow::engine_faults {

struct Fault {
  std::string name;
  std::string check;  // that is to report it
  std::string says;   // stands in the report
  // Launches the kernel with kFaultWords words of the device's memory.
  std::function<void(std::uint32_t* words)> launch;
};
inline void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }
inline constexpr int kFaultWords = 16;

std::vector<Fault> faults();
// Similar kernels without a fault, one of which stores its rank to words[rank].
void launch_faultless(std::uint32_t* words);
// Whether a cluster of so many blocks of 1,024 threads can be launched; `allowed`: those that not
// every GPU has are.
bool launches_in_cluster(unsigned blocks, bool allowed);

// Queues a kernel of `blocks` blocks that count themselves in words[0] and wait for each other.
void queue_meeting(std::uint32_t* words, unsigned blocks);
// Queues a kernel on a stream that stores `value` to words[mine] and waits until words[other] holds
// the same.
void queue_exchange(void* stream, std::uint64_t* words, int mine, int other, std::uint64_t value);
// Queues a kernel that stores a word and releases a flag to the GPU; or one that acquires it and
// loads the word.
void queue_release_of_gpu(void* stream, std::uint32_t* words, bool tells);

}  // namespace winnow::engine_faults
