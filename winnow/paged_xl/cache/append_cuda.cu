// Appends keys and values to the paged cache, CUDA. The lanes of a warp have 32 consecutive tokens,
// mostly neighbours in a block of the cache, so that a warp stores contiguous bytes: for each token
// 16 bytes of the key or an element of the value. Elements are copied as unsigned integers.
#include <algorithm>
#include <bit>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/runtime.h"
#include "winnow/paged_xl/cache/append_impl.h"
#include "winnow/paged_xl/launch_cuda.cuh"

namespace winnow::paged_xl {
namespace {

constexpr device::Runtime kRuntime{"paged_xl::append", "cuda"};
constexpr int kTokens = 32, kUnitsAtOnce = 8;

struct KernelParams {
  std::int64_t num_tokens, num_blocks;
  int dim, block_shift;
  Rows<const void*> key, value;
  const void* slot_mapping;
  bool wide_slots;
  Rows<void*> key_cache, value_cache;
};

template <class Bits>
struct alignas(16) Unit {
  static constexpr int kX = 16 / sizeof(Bits);
  Bits elements[kX];

  // kAligned: as one access of 16 bytes, else element by element.
  template <bool kAligned>
  static __device__ Unit load(const Bits* from) {
    if constexpr (kAligned) {
      return *reinterpret_cast<const Unit*>(from);
    } else {
      Unit unit;
#pragma unroll
      for (int i = 0; i < kX; ++i) unit.elements[i] = from[i];
      return unit;
    }
  }
  template <bool kAligned>
  __device__ void store(Bits* to) const {
    if constexpr (kAligned) {
      *reinterpret_cast<Unit*>(to) = *this;
    } else {
#pragma unroll
      for (int i = 0; i < kX; ++i) to[i] = elements[i];
    }
  }
};

// Grid: (groups of kTokens tokens, heads); block: (kTokens, kUnitsAtOnce).
template <class Bits, bool kAligned>
__global__ void append_kernel(const __grid_constant__ KernelParams p) {
  constexpr int kX = Unit<Bits>::kX;
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokens + threadIdx.x;
  const std::int64_t head = blockIdx.y;
  if (token >= p.num_tokens) return;
  const std::int64_t slot = p.wide_slots ? static_cast<const std::int64_t*>(p.slot_mapping)[token]
                                         : static_cast<const std::int32_t*>(p.slot_mapping)[token];
  const std::int64_t block = slot >> p.block_shift;
  if (slot < 0 || block >= p.num_blocks) return;
  const std::int64_t offset = slot & ((std::int64_t{1} << p.block_shift) - 1);
  const auto row = [&](const auto& rows, std::int64_t i0) {
    return static_cast<Bits*>(const_cast<void*>(static_cast<const void*>(rows.data))) +
           i0 * rows.stride0 + head * rows.stride1;
  };
  const Bits* key = row(p.key, token);
  const Bits* value = row(p.value, token);
  Bits* to_key = row(p.key_cache, block) + offset * kX;
  Bits* to_value = row(p.value_cache, block) + offset;
  for (int d = static_cast<int>(threadIdx.y) * kX; d < p.dim; d += kUnitsAtOnce * kX) {
    Unit<Bits>::template load<kAligned>(key + d).template store<kAligned>(
        to_key + (std::int64_t{d} << p.block_shift));
    const Unit<Bits> column = Unit<Bits>::template load<kAligned>(value + d);
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      to_value[std::int64_t{d + i} << p.block_shift] = column.elements[i];
    }
  }
}

Rows<const void*> read_only(const Rows<void*>& rows) {
  return {rows.data, rows.stride0, rows.stride1};
}

}  // namespace

void append_cuda(const AppendParams& params, void* stream) {
  const CacheShape& cache = params.cache;
  const std::int64_t groups = (params.num_tokens + kTokens - 1) / kTokens;
  const KernelParams kernel = {params.num_tokens,
                               cache.num_blocks,
                               static_cast<int>(cache.head_size),
                               std::countr_zero(static_cast<std::uint64_t>(cache.block_size)),
                               params.key,
                               params.value,
                               params.slots.data,
                               params.slots.wide,
                               params.key_cache,
                               params.value_cache};
  const std::int64_t size = size_of(cache.dtype);
  const bool aligned = is_aligned(params.key, size) && is_aligned(params.value, size) &&
                       is_aligned(read_only(params.key_cache), size);
  auto* const function =
      size == 4
          ? (aligned ? append_kernel<std::uint32_t, true> : append_kernel<std::uint32_t, false>)
          : (aligned ? append_kernel<std::uint16_t, true> : append_kernel<std::uint16_t, false>);
  kRuntime.launch(function,
                  dim3(static_cast<unsigned>(groups), static_cast<unsigned>(cache.num_kv_heads)),
                  dim3(kTokens, kUnitsAtOnce), 0, static_cast<cudaStream_t>(stream), kernel);
}

}  // namespace winnow::paged_xl
