// What kernels and launches find in CUDA's names: the indices of the thread that runs, and how much
// dynamic shared memory launches have allowed to kernels; and which kernels have run.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <map>
#include <set>

#include <cuda_runtime.h>

#include "winnow/simulator/engine/block.h"

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
}

namespace {
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

void note_kernel(const void* kernel) {
  static const char* const file = std::getenv("WINNOW_SIMULATOR_KERNELS");
  static std::set<const void*> known;
  if (file == nullptr || !known.insert(kernel).second) return;
  // The program, and the kernel's address in it as nm has it.
  std::ofstream(file, std::ios::app)
      << std::filesystem::read_symlink("/proc/self/exe").string() << ' ' << std::hex
      << std::setfill('0') << std::setw(16)
      << static_cast<const char*>(kernel) - &__executable_start << '\n';
}

}  // namespace winnow::simulator
