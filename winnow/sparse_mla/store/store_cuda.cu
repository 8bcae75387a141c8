// Stores rows in a paged cache, CUDA. A warp has a row, and a lane 8 neighbouring columns of it.
//
// If several rows have the same slot, only the last one is stored. Up to kFewRows rows are compared
// with each other. For more, a table in the workspace has a word for each slot of the cache. A
// first kernel writes every row's number into the word of its slot, a second one raises the word to
// the largest of these numbers, and the row of that number is stored. Words of other slots are
// never read, so the table needs no initialisation.
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/cache/cache_view.cuh"
#include "winnow/cache/write_row.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/warp.cuh"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr device::Runtime kRuntime{"sparse_mla::store", "cuda"};
constexpr int kWarpSize = 32, kWarps = 8, kThreads = kWarpSize * kWarps;
constexpr int kPiece = 8;  // columns that a lane holds: 16 bytes of bf16
constexpr std::int64_t kFewRows = 1024;

struct KernelParams {
  std::int64_t n;
  const char* rows;
  std::int64_t row_stride;  // bytes
  Slots slots;
  int pieces;                // of a row
  std::uint32_t* last_rows;  // [slots of the cache]; null where rows are compared
  CacheView<std::uint8_t> cache;
};

// Initialises the word of every slot of this call with the number of one of its rows.
__global__ void __launch_bounds__(kThreads) name_rows(const __grid_constant__ KernelParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.n) return;
  const std::int64_t slot = cache::read_slot(p.slots, row);
  if (!p.cache.holds(slot)) return;
  // Several rows may name the slot, one of which stays: plain stores would race.
  static_cast<volatile std::uint32_t*>(p.last_rows)[slot] = static_cast<std::uint32_t>(row);
}

__global__ void __launch_bounds__(kThreads) raise_rows(const __grid_constant__ KernelParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.n) return;
  const std::int64_t slot = cache::read_slot(p.slots, row);
  if (p.cache.holds(slot)) atomicMax(p.last_rows + slot, static_cast<std::uint32_t>(row));
}

// Whether no later row names the slot. The whole warp calls it.
__device__ __forceinline__ bool is_last(const KernelParams& p, std::int64_t row, std::int64_t slot,
                                        int lane) {
  if (p.last_rows != nullptr) return p.last_rows[slot] == static_cast<std::uint32_t>(row);
  bool again = false;
  for (std::int64_t later = row + 1 + lane; later < p.n; later += kWarpSize) {
    again = again || cache::read_slot(p.slots, later) == slot;
  }
  return !__any_sync(device::kFullWarp, again);
}

// Grid: groups of kWarps rows.
template <CacheFormat kFormat>
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ KernelParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (row >= p.n) return;
  // One lane reads the slot, so that the warp agrees even if another thread changes it.
  const std::int64_t slot = __shfl_sync(
      device::kFullWarp, lane == 0 ? cache::read_slot(p.slots, row) : std::int64_t{0}, 0);
  if (!p.cache.holds(slot) || !is_last(p, row, slot, lane)) return;

  const cache::LatentPlace<kFormat> place(p.cache, static_cast<std::uint32_t>(slot));
  const char* const from = p.rows + row * p.row_stride;
  constexpr int kRounds = 3;  // of 32 pieces each; a row of 576 columns has 72
  using Piece = cache::Share<std::uint32_t, kPiece / 2>;
  Piece pieces[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int piece = round * kWarpSize + lane;
    pieces[round] = piece < p.pieces ? *reinterpret_cast<const Piece*>(from + 16 * piece) : Piece{};
  }
  const auto write = [&]<bool kQuantised>(int round) {
    const int piece = round * kWarpSize + lane;
    place.template write<kQuantised>(kPiece * piece, piece < p.pieces, pieces[round]);
  };
  write.template operator()<true>(0);
  write.template operator()<true>(1);
  write.template operator()<false>(2);  // columns from 512 on are never f8
}

}  // namespace

std::int64_t store_cuda_workspace_bytes(const StoreParams& params) {
  return params.n <= kFewRows ? 0 : params.cache.slots() * std::int64_t{sizeof(std::uint32_t)};
}

void store_cuda(const StoreParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  KernelParams kernel;
  kernel.n = params.n;
  kernel.rows = static_cast<const char*>(params.rows.data);
  kernel.row_stride = params.rows.stride0 * 2;
  kernel.slots = params.slots;
  kernel.pieces = static_cast<int>(params.cache.columns / kPiece);
  kernel.last_rows = params.n <= kFewRows ? nullptr : static_cast<std::uint32_t*>(workspace);
  kernel.cache = cache_view(params.cache);
  if (kernel.last_rows != nullptr) {
    const auto blocks = static_cast<unsigned>((params.n + kThreads - 1) / kThreads);
    kRuntime.launch(name_rows, blocks, kThreads, 0, queue, kernel);
    kRuntime.launch(raise_rows, blocks, kThreads, 0, queue, kernel);
  }
  const auto function =
      params.cache.format == CacheFormat::fp8_656   ? store_kernel<CacheFormat::fp8_656>
      : params.cache.format == CacheFormat::fp8_584 ? store_kernel<CacheFormat::fp8_584>
                                                    : store_kernel<CacheFormat::bf16>;
  kRuntime.launch(function, static_cast<unsigned>((params.n + kWarps - 1) / kWarps), kThreads, 0,
                  queue, kernel);
}

}  // namespace winnow::sparse_mla
