// New rows of a paged cache, CUDA: a warp for each row, whose lanes hold 8 neighbouring columns.
//
// Where a slot is named by several rows, the last one is stored, and it alone writes the slot. Few
// rows are compared with each other. Of many, a table in the workspace has a word for each slot of
// the cache: every row writes its number into the word of its slot, then raises it to the largest
// of the numbers there, and the row whose number stands there is stored. Words of slots that no row
// names are never read, so the table needs no initial contents.
#include <cstdint>
#include <type_traits>

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/device/common/warp.cuh"
#include "winnow/sparse_mla/cache_view.cuh"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr device::Runtime kRuntime{"sparse_mla::store", "cuda"};
constexpr int kWarpSize = 32, kWarps = 8, kThreads = kWarpSize * kWarps;
constexpr int kPiece = 8;  // columns that a lane holds: 16 bytes of bf16
// Up to so many rows are compared with each other.
constexpr std::int64_t kFewRows = 1024;

struct KernelParams {
  std::int64_t n;
  const char* rows;
  std::int64_t row_stride;  // bytes
  const void* slots;
  bool wide_slots;
  int pieces;                // of a row
  std::uint32_t* last_rows;  // [slots of the cache]; null where rows are compared
  CacheView<std::uint8_t> cache;
};

// Another stream may rewrite the slot, so it is read once for each use.
__device__ __forceinline__ std::int64_t slot_of(const KernelParams& p, std::int64_t row) {
  return p.wide_slots ? static_cast<const volatile std::int64_t*>(p.slots)[row]
                      : static_cast<const volatile std::int32_t*>(p.slots)[row];
}

// Makes every word of a slot that is named the number of a row of this call.
__global__ void __launch_bounds__(kThreads) name_rows(const __grid_constant__ KernelParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.n) return;
  const std::int64_t slot = slot_of(p, row);
  if (p.cache.holds(slot)) p.last_rows[slot] = static_cast<std::uint32_t>(row);
}

__global__ void __launch_bounds__(kThreads) raise_rows(const __grid_constant__ KernelParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.n) return;
  const std::int64_t slot = slot_of(p, row);
  if (p.cache.holds(slot)) atomicMax(p.last_rows + slot, static_cast<std::uint32_t>(row));
}

// Whether no later row names the slot. The whole warp calls it.
__device__ __forceinline__ bool is_last(const KernelParams& p, std::int64_t row, std::int64_t slot,
                                        int lane) {
  if (p.last_rows != nullptr) return p.last_rows[slot] == static_cast<std::uint32_t>(row);
  bool again = false;
  for (std::int64_t later = row + 1 + lane; later < p.n; later += kWarpSize) {
    again = again || slot_of(p, later) == slot;
  }
  return !__any_sync(device::kFullWarp, again);
}

// The scale of a group whose kLanes lanes hold these columns, and the columns in f8.
template <int kLanes>
__device__ __forceinline__ float quantise(const uint4& piece, uint2& f8) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  // Magnitudes order as their bits do, NaN above infinity above the rest.
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    amax = max(amax, max(words[i] << 16 & 0x7fffffffu, words[i] & 0x7fff0000u));
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    amax = max(amax, __shfl_xor_sync(device::kFullWarp, amax, distance));
  }
  const float scale = cache_scale(__uint_as_float(amax));
  if (scale != scale) {
    f8 = make_uint2(0x7f7f7f7fu, 0x7f7f7f7fu);
    return scale;
  }
  // The inverse of a power of two is exact, and so is the product, unless it is far below what f8
  // can hold.
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
  std::uint32_t bytes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const std::uint32_t word = words[i / 2];
    const float x = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    const __nv_fp8_storage_t rounded =
        __nv_cvt_float_to_fp8(__fmul_rn(x, inverse), __NV_SATFINITE, __NV_E4M3);
    bytes[i / 4] |= static_cast<std::uint32_t>(rounded) << (8 * (i % 4));
  }
  f8 = make_uint2(bytes[0], bytes[1]);
  return scale;
}

// Grid: groups of kWarps rows.
template <CacheFormat kFormat>
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ KernelParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (row >= p.n) return;
  // One lane reads it: what a warp does hangs on a single value.
  const std::int64_t slot =
      __shfl_sync(device::kFullWarp, lane == 0 ? slot_of(p, row) : std::int64_t{0}, 0);
  if (!p.cache.holds(slot) || !is_last(p, row, slot, lane)) return;

  const auto block = static_cast<std::uint32_t>(slot) / p.cache.block_size;
  const auto offset = static_cast<std::uint32_t>(slot) % p.cache.block_size;
  std::uint8_t* const to = p.cache.row(block, offset);
  const char* const from = p.rows + row * p.row_stride;
  constexpr int kRounds = 3;  // of 32 pieces, for up to 72
  uint4 pieces[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int piece = round * kWarpSize + lane;
    pieces[round] = piece < p.pieces ? *reinterpret_cast<const uint4*>(from + 16 * piece)
                                     : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int piece = round * kWarpSize + lane;
    if constexpr (kFormat == CacheFormat::bf16) {
      if (piece < p.pieces) *reinterpret_cast<uint4*>(to + 16 * piece) = pieces[round];
    } else {
      using Row = std::conditional_t<kFormat == CacheFormat::fp8_656, Row656, Row584>;
      constexpr int kLanes = Row::kGroup / kPiece, kQuantised = Row::kQuantised / kPiece;
      if (round * kWarpSize < kQuantised) {
        uint2 f8;
        const float scale = quantise<kLanes>(pieces[round], f8);
        if (piece < kQuantised) {
          *reinterpret_cast<uint2*>(to + kPiece * piece) = f8;
          if (piece % kLanes == 0) {
            if constexpr (kFormat == CacheFormat::fp8_656) {
              reinterpret_cast<float*>(to + Row::kScaleOffset)[piece / kLanes] = scale;
            } else {
              p.cache.scales_584(block, offset)[piece / kLanes] = scale_to_ue8m0(scale);
            }
          }
        }
      }
      if (piece >= kQuantised && piece < p.pieces) {
        *reinterpret_cast<uint4*>(to + Row::kRopeOffset + 16 * (piece - kQuantised)) =
            pieces[round];
      }
    }
  }
  if constexpr (kFormat == CacheFormat::fp8_584) {
    if (lane == 0) p.cache.scales_584(block, offset)[Row584::kGroups] = 0;
  }
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
  kernel.slots = params.slots.data;
  kernel.wide_slots = params.slots.wide;
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
