// What kernels and launches find in CUDA's names: the indices of the thread that runs, and how much
// dynamic shared memory and how large clusters launches have allowed to kernels; and which kernels
// have run.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <map>
#include <set>
#include <string>

#include <cuda_runtime.h>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/grid.h"

extern "C" {
extern char __executable_start;  // of the linker
}

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace winnow::simulator {

void set_indices(const Block& of, unsigned thread) {
  const unsigned(&size)[3] = of.grid.block;
  threadIdx = {thread % size[0], thread / size[0] % size[1], thread / size[0] / size[1]};
  blockIdx = {of.index[0], of.index[1], of.index[2]};
  blockDim = dim3(size[0], size[1], size[2]);
  gridDim = dim3(of.grid.grid[0], of.grid.grid[1], of.grid.grid[2]);
  if (!detail::any_planted) return;
  threadIdx.x += detail::planted_shift(cluster->run->function, Plant::Action::shift_thread);
  blockIdx.x += detail::planted_shift(cluster->run->function, Plant::Action::shift_block);
  gridDim.x += detail::planted_shift(cluster->run->function, Plant::Action::shift_grid);
}

namespace {
std::map<const void*, unsigned>& cluster_limits() {
  static std::map<const void*, unsigned> all;
  return all;
}
std::map<const void*, std::size_t>& limits() {
  static std::map<const void*, std::size_t> all;
  return all;
}
}  // namespace

void allow_shared_bytes(const void* kernel, std::size_t bytes) { limits()[kernel] = bytes; }

std::size_t allowed_shared_bytes(const void* kernel) {
  const auto found = limits().find(kernel);
  return found == limits().end() ? 48 * 1024 : found->second;
}

void allow_cluster(const void* kernel, unsigned blocks) { cluster_limits()[kernel] = blocks; }

unsigned allowed_cluster(const void* kernel) {
  constexpr unsigned kPortable = 8;
  const auto found = cluster_limits().find(kernel);
  return found == cluster_limits().end() ? kPortable : found->second;
}

int clusters_at_a_time(unsigned blocks, std::size_t threads, std::size_t shared_bytes) {
  // Of a multiprocessor; each block takes 1 KiB for the system.
  constexpr std::size_t kThreads = 2048, kBlocks = 32, kSharedBytes = 228 * 1024;
  if (blocks == 0 || threads == 0) return 0;
  const std::size_t of_each =
      std::min({kBlocks, kThreads / threads, kSharedBytes / (shared_bytes + 1024)});
  return static_cast<int>(static_cast<std::size_t>(settings().multiprocessors) * of_each / blocks);
}

namespace {
thread_local const void* noted = nullptr;
}

const void* noted_kernel() { return noted; }

namespace {
// The program, the kernel's address in it as nm has it, and the text.
void record(const void* kernel, const std::string& text) {
  static const char* const file = std::getenv("WINNOW_SIMULATOR_KERNELS");
  if (file == nullptr) return;
  std::ofstream(file, std::ios::app)
      << std::filesystem::read_symlink("/proc/self/exe").string() << ' ' << std::hex
      << std::setfill('0') << std::setw(16)
      << static_cast<const char*>(kernel) - &__executable_start << text << '\n';
}
}  // namespace

void note_kernel(const void* kernel) {
  noted = kernel;
  static std::set<const void*> known;
  if (known.insert(kernel).second) record(kernel, "");
}

void note_found(const std::string& bug) {
  for (const void* const kernel : planted_kernels()) record(kernel, " " + bug);
}

}  // namespace winnow::simulator
