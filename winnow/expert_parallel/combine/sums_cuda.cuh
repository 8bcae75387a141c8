// How a block sums rows: one warp names the rows of each sum and has them copied, piece by piece,
// into a ring in shared memory, far ahead of the warps that add them up in registers. Device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"

namespace winnow::expert_parallel::row_sums {

inline constexpr int kAdders = 8;  // warps that add
inline constexpr int kThreads = 32 * (kAdders + 1);
inline constexpr int kVectors = 4;  // of 16 bytes, of a piece, in the registers of a thread
inline constexpr int kVectorBytes = 16;
inline constexpr int kMaxPiece = kAdders * 32 * kVectors * kVectorBytes;
inline constexpr int kMaxSlots = 32;
inline constexpr int kMaxAddends = 32;
inline constexpr int kRingBytes = 220 * 1024;

enum Flags : std::uint32_t {
  kRow = 1,         // there is a row to add
  kEndsRank = 2,    // the sum of a rank is complete...
  kRoundRank = 4,   // ... and rounded, then added to the sum of its node
  kEndsNode = 8,    // the sum of the node is complete and added to the total
  kEndsToken = 16,  // the total is complete: bias, rounding, out
  kEnd = 32,        // no more pieces
};

// One row of a sum.
struct Addend {
  const std::byte* row;
  float weight;
  std::uint32_t flags;
};

// What stands beside a piece of a row in the ring. `to` and `bias` are those of its columns.
struct Piece {
  std::byte* to;
  const std::byte* bias;
  std::uint32_t bytes, flags;
  float weight;
};

// The ring's bookkeeping; the slots follow it in dynamic shared memory.
struct alignas(128) Shared {
  std::uint64_t full[kMaxSlots], empty[kMaxSlots];
  Piece pieces[kMaxSlots];
  Addend addends[kMaxAddends];  // of the sum that is being fed
};

// How rows are cut: the same number of slots as fit, each for one piece.
struct Cut {
  std::int64_t row_bytes;
  std::uint32_t piece_bytes, slots;
};
inline Cut cut_rows(std::int64_t row_bytes) {
  const std::int64_t pieces = (row_bytes + kMaxPiece - 1) / kMaxPiece;
  const std::int64_t piece = ((row_bytes + pieces - 1) / pieces + 127) / 128 * 128;
  const std::int64_t fit = (kRingBytes - std::int64_t(sizeof(Shared))) / piece;
  return {row_bytes, std::uint32_t(piece), std::uint32_t(fit < kMaxSlots ? fit : kMaxSlots)};
}

struct Ring {
  Shared* shared;
  std::uint32_t slots_begin;  // shared-window address
  Cut cut;
  std::uint32_t slot = 0, parity = 0;

  __device__ Ring(std::byte* memory, const Cut& cut)
      : shared(reinterpret_cast<Shared*>(memory)),
        slots_begin(device::shared_address(memory + sizeof(Shared))),
        cut(cut) {}
  __device__ void next() {
    if (++slot == cut.slots) slot = 0, parity ^= 1;
  }
  __device__ std::uint32_t full() const { return device::shared_address(&shared->full[slot]); }
  __device__ std::uint32_t empty() const { return device::shared_address(&shared->empty[slot]); }
  __device__ std::uint32_t data() const { return slots_begin + slot * cut.piece_bytes; }
};

// By the whole block, before anything else.
__device__ inline void begin(const Ring& ring) {
  if (threadIdx.x == 0) {
    for (std::uint32_t i = 0; i < ring.cut.slots; ++i) {
      device::mbarrier_init(device::shared_address(&ring.shared->full[i]), 1);
      device::mbarrier_init(device::shared_address(&ring.shared->empty[i]),
                            kAdders * device::kWarpArrival);
    }
    device::fence_mbarrier_init();
  }
  __syncthreads();
}

// The feeding warp's end of the ring.
class Feeder {
 public:
  __device__ explicit Feeder(const Ring& ring)
      : ring_(ring), policy_(device::policy_evict_first()) {}

  __device__ Addend& addend(int i) { return ring_.shared->addends[i]; }

  // Feeds one sum of addends 0 to count - 1, which the lanes have written. The whole warp.
  __device__ void sum(int count, std::byte* to, const std::byte* bias) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) feed(count, to, bias);
    __syncwarp();
  }
  __device__ void end() {
    if (threadIdx.x % 32 != 0) return;
    push({nullptr, nullptr, 0, kEnd, 0.0f}, nullptr);
  }

 private:
  __device__ void feed(int count, std::byte* to, const std::byte* bias) {
    const std::int64_t row_bytes = ring_.cut.row_bytes;
    for (std::int64_t at = 0; at < row_bytes; at += ring_.cut.piece_bytes) {
      Piece piece;
      piece.to = to + at;
      piece.bias = bias == nullptr ? nullptr : bias + at;
      piece.bytes = std::uint32_t(min(std::int64_t(ring_.cut.piece_bytes), row_bytes - at));
      piece.weight = 0.0f;
      piece.flags = kEndsToken;
      if (count == 0) push(piece, nullptr);
      for (int i = 0; i < count; ++i) {
        const Addend& addend = ring_.shared->addends[i];
        piece.weight = addend.weight;
        piece.flags = kRow | addend.flags | (i + 1 == count ? kEndsToken : 0);
        push(piece, addend.row + at);
      }
    }
  }
  __device__ void push(const Piece& piece, const std::byte* from) {
    device::mbarrier_wait(ring_.empty(), ring_.parity ^ 1, "feeder", int(ring_.slot));
    ring_.shared->pieces[ring_.slot] = piece;
    if (from == nullptr) {
      device::mbarrier_arrive(ring_.full());
    } else {
      device::mbarrier_arrive_expect(ring_.full(), piece.bytes);
      device::bulk_load(ring_.data(), from, piece.bytes, ring_.full(), policy_);
    }
    ring_.next();
  }

  Ring ring_;
  std::uint64_t policy_;
};

// 16 bytes of elements as floats and back; rounding is to nearest even.
template <class T>
struct Columns;
template <>
struct Columns<float> {
  static constexpr int kCount = 4;
  __device__ static void unpack(const uint4& raw, float (&to)[4]) {
    to[0] = __uint_as_float(raw.x), to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z), to[3] = __uint_as_float(raw.w);
  }
  __device__ static uint4 pack(const float (&from)[4]) {
    return {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
            __float_as_uint(from[3])};
  }
};
template <>
struct Columns<__nv_bfloat16> {
  static constexpr int kCount = 8;
  __device__ static void unpack(const uint4& raw, float (&to)[8]) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  __device__ static uint4 pack(const float (&from)[8]) {
    return {pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]),
            pack(from[6], from[7])};
  }
};
template <>
struct Columns<__half> {
  static constexpr int kCount = 8;
  __device__ static void unpack(const uint4& raw, float (&to)[8]) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
  __device__ static std::uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  __device__ static uint4 pack(const float (&from)[8]) {
    return {pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]),
            pack(from[6], from[7])};
  }
};

// 16 bytes of a row whose elements, perhaps no more, are aligned.
template <class T>
__device__ inline uint4 load_columns(const std::byte* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint4*>(from);
  alignas(16) T columns[kVectorBytes / sizeof(T)];
#pragma unroll
  for (std::size_t i = 0; i < kVectorBytes / sizeof(T); ++i) {
    columns[i] = reinterpret_cast<const T*>(from)[i];
  }
  return *reinterpret_cast<const uint4*>(columns);
}
template <class T>
__device__ inline void store_columns(std::byte* to, uint4 raw, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = raw;
    return;
  }
#pragma unroll
  for (std::size_t i = 0; i < kVectorBytes / sizeof(T); ++i) {
    reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(&raw)[i];
  }
}
__device__ inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes == 0;
}

// The adding warps: each thread owns columns of a piece and keeps their sums in registers. Products
// are rounded before they are added. All warps but the feeding one.
template <class T, bool kWeighted>
__device__ void add_rows(Ring ring) {
  using C = Columns<T>;
  const std::uint32_t thread = threadIdx.x;  // the adders are the first warps
  float rank[kVectors][C::kCount] = {}, node[kVectors][C::kCount] = {};
  float total[kVectors][C::kCount] = {};
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int c = 0; c < C::kCount; ++c) visit(v, c);
    }
  };
  for (;; ring.next()) {
    device::mbarrier_wait(ring.full(), ring.parity, "adder", int(ring.slot));
    const Piece piece = ring.shared->pieces[ring.slot];
    if (piece.flags & kEnd) return;
    const std::uint32_t vectors = piece.bytes / kVectorBytes;
    uint4 raw[kVectors] = {};
    if (piece.flags & kRow) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const std::uint32_t at = v * (32 * kAdders) + thread;
        if (at >= vectors) continue;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw[v].x), "=r"(raw[v].y), "=r"(raw[v].z), "=r"(raw[v].w)
                     : "r"(ring.data() + at * kVectorBytes)
                     : "memory");
      }
    }
    device::mbarrier_arrive_warp(ring.empty());
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float row[C::kCount];
      C::unpack(raw[v], row);
#pragma unroll
      for (int c = 0; c < C::kCount; ++c) {
        const float product = kWeighted ? __fmul_rn(row[c], piece.weight) : row[c];
        rank[v][c] = __fadd_rn(rank[v][c], product);
      }
    }
    if (piece.flags & kEndsRank) {
      if (piece.flags & kRoundRank) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) C::unpack(C::pack(rank[v]), rank[v]);
      }
      each([&](int v, int c) { node[v][c] = __fadd_rn(node[v][c], rank[v][c]), rank[v][c] = 0; });
    }
    if (piece.flags & kEndsNode) {
      each([&](int v, int c) { total[v][c] = __fadd_rn(total[v][c], node[v][c]), node[v][c] = 0; });
    }
    if (piece.flags & kEndsToken) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const std::uint32_t at = v * (32 * kAdders) + thread;
        if (at < vectors) {
          if (piece.bias != nullptr) {
            float bias[C::kCount];
            C::unpack(load_columns<T>(piece.bias + at * kVectorBytes, is_aligned(piece.bias)),
                      bias);
#pragma unroll
            for (int c = 0; c < C::kCount; ++c) total[v][c] = __fadd_rn(total[v][c], bias[c]);
          }
          store_columns<T>(piece.to + at * kVectorBytes, C::pack(total[v]), is_aligned(piece.to));
        }
#pragma unroll
        for (int c = 0; c < C::kCount; ++c) total[v][c] = 0;
      }
    }
  }
}

}  // namespace winnow::expert_parallel::row_sums
