// How a block sums rows, in teams of 8 warps: one warp names the rows of each sum and has them
// copied, piece by piece, into a ring in shared memory, far ahead of the others, which add them up
// in registers. Device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"

namespace winnow::expert_parallel::row_sums {

inline constexpr int kAdders = 7;  // warps of a team that add; the last one feeds them
inline constexpr int kTeam = 32 * (kAdders + 1);
inline constexpr int kVectors = 4;  // of 16 bytes, of a piece, in the registers of a thread
inline constexpr int kVectorBytes = 16;
inline constexpr int kMaxPiece = kAdders * 32 * kVectors * kVectorBytes;
inline constexpr int kMaxSlots = 32;
inline constexpr int kMaxAddends = 32;
inline constexpr int kRingBytes = 220 * 1024;

// Levels of sums that a thread keeps: 1, a single sum; 2, of ranks and of their node; 3, of all
// nodes too. The fewer there are, the more teams of a block find room in the registers.
__host__ __device__ constexpr int teams_of(int levels) { return 4 - levels; }

enum Flags : std::uint32_t {
  kRow = 1,         // there is a row to add
  kBeginsRank = 2,  // a sum within a rank begins with it (2 levels, as the next two)
  kEndsRank = 4,    // that sum is complete...
  kRoundRank = 8,   // ... and rounded, then added to the sum of its node
  kEndsNode = 16,   // the sum of the node is complete and added to the total (3 levels)
  kEndsToken = 32,  // the total is complete: bias, rounding, out
  kEnd = 64,        // no more pieces
};

// One row of a sum.
struct Addend {
  const std::byte* row;
  float weight;
  std::uint32_t flags;
};

// What stands beside a piece of a row in the ring. `to` and `bias` are those of its columns.
struct alignas(16) Piece {
  std::byte* to;
  const std::byte* bias;
  std::uint32_t bytes, flags;
  float weight;
};

// A ring's bookkeeping; the slots follow it in dynamic shared memory.
struct alignas(128) Shared {
  std::uint64_t full[kMaxSlots], empty[kMaxSlots];
  Piece pieces[kMaxSlots];
  Addend addends[kMaxAddends];  // of the sum that is being fed
};

// How rows are cut: into equal pieces, with as many slots as fit in the ring of each team.
struct Cut {
  std::int64_t row_bytes;
  std::uint32_t piece_bytes, slots;
};
inline Cut cut_rows(std::int64_t row_bytes, int teams) {
  const std::int64_t pieces = (row_bytes + kMaxPiece - 1) / kMaxPiece;
  const std::int64_t piece = ((row_bytes + pieces - 1) / pieces + 127) / 128 * 128;
  const std::int64_t fit = (kRingBytes - teams * std::int64_t(sizeof(Shared))) / piece;
  return {row_bytes, std::uint32_t(piece),
          std::uint32_t((fit < kMaxSlots ? fit : kMaxSlots) / teams)};
}
inline int shared_bytes(const Cut& cut, int teams) {
  return teams * (int(sizeof(Shared)) + int(cut.slots * cut.piece_bytes));
}

// The ring of this thread's team.
struct Ring {
  Shared* shared;
  std::uint32_t slots_begin;  // shared-window address
  Cut cut;
  std::uint32_t slot = 0, parity = 0;

  __device__ Ring(std::byte* memory, const Cut& cut) : cut(cut) {
    memory += threadIdx.x / kTeam * (sizeof(Shared) + cut.slots * cut.piece_bytes);
    shared = reinterpret_cast<Shared*>(memory);
    slots_begin = device::shared_address(memory + sizeof(Shared));
  }
  // By at most all slots.
  __device__ void advance(std::uint32_t count) {
    slot += count;
    if (slot >= cut.slots) slot -= cut.slots, parity ^= 1;
  }
  __device__ std::uint32_t full() const { return device::shared_address(&shared->full[slot]); }
  __device__ std::uint32_t empty() const { return device::shared_address(&shared->empty[slot]); }
  __device__ std::uint32_t data() const { return slots_begin + slot * cut.piece_bytes; }
};

// By the whole block, before anything else.
__device__ inline void begin(const Ring& ring) {
  if (threadIdx.x % kTeam == 0) {
    for (std::uint32_t i = 0; i < ring.cut.slots; ++i) {
      device::mbarrier_init(device::shared_address(&ring.shared->full[i]), 1);
      device::mbarrier_init(device::shared_address(&ring.shared->empty[i]),
                            kAdders * device::kWarpArrival);
    }
    device::fence_mbarrier_init();
  }
  __syncthreads();
}

__device__ inline bool adds() { return threadIdx.x % kTeam < 32 * kAdders; }
// What teams take turns at, from first_turn() on, in steps of turns().
template <int kTeams>
__device__ std::int64_t first_turn() {
  return blockIdx.x * kTeams + threadIdx.x / kTeam;
}
template <int kTeams>
__device__ std::int64_t turns() {
  return gridDim.x * kTeams;
}

// The feeding warp's end of the ring.
class Feeder {
 public:
  __device__ explicit Feeder(const Ring& ring)
      : ring_(ring),
        lane_(threadIdx.x % 32),
        round_(max(1u, min(32u, ring.cut.slots / 2))),
        policy_(device::policy_evict_first()) {}

  __device__ Addend* addends() { return ring_.shared->addends; }

  // Feeds one sum of addends 0 to count - 1, which the lanes have written. The whole warp: each
  // lane takes a slot.
  __device__ void sum(std::uint32_t count, std::byte* to, const std::byte* bias) {
    __syncwarp();
    const std::int64_t row_bytes = ring_.cut.row_bytes;
    for (std::int64_t at = 0; at < row_bytes; at += ring_.cut.piece_bytes) {
      Piece piece;
      piece.to = to + at;
      piece.bias = bias == nullptr ? nullptr : bias + at;
      piece.bytes = std::uint32_t(min(std::int64_t(ring_.cut.piece_bytes), row_bytes - at));
      piece.flags = kEndsToken;  // all of a sum of nothing
      piece.weight = 0.0f;
      for (std::uint32_t first = 0; first == 0 || first < count; first += round_) {
        const std::byte* row = nullptr;
        if (first + lane_ < count) {
          const Addend& addend = ring_.shared->addends[first + lane_];
          row = addend.row + at;
          piece.weight = addend.weight;
          piece.flags = kRow | addend.flags | (first + lane_ + 1 == count ? kEndsToken : 0);
        }
        push(min(round_, max(count, 1u) - first), piece, row);
      }
    }
    __syncwarp();
  }
  __device__ void end() { push(1, {nullptr, nullptr, 0, kEnd, 0.0f}, nullptr); }

 private:
  // The pieces of the first `count` lanes, in their order, at most slots.
  __device__ void push(std::uint32_t count, const Piece& piece, const std::byte* from) {
#ifdef WINNOW_RACECHECK
    // The tool takes one lane for the issuer of all copies, so each waits for every slot.
    for (std::uint32_t i = 0; i < count; ++i) {
      Ring other = ring_;
      other.advance(i);
      device::mbarrier_wait(other.empty(), other.parity ^ 1, "feeder", int(other.slot));
    }
#endif
    if (lane_ < count) {
      Ring mine = ring_;
      mine.advance(lane_);
      device::mbarrier_wait(mine.empty(), mine.parity ^ 1, "feeder", int(mine.slot));
      mine.shared->pieces[mine.slot] = piece;
      if (from == nullptr) {
        device::mbarrier_arrive(mine.full());
      } else {
        device::mbarrier_arrive_expect(mine.full(), piece.bytes);
        device::bulk_load(mine.data(), from, piece.bytes, mine.full(), policy_);
      }
    }
    __syncwarp();
    ring_.advance(count);
  }

  Ring ring_;
  std::uint32_t lane_, round_;
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

template <bool kFirst, class A, class B>
__device__ auto& choose(A& first, B& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// The adding warps of a team: each thread owns columns of a piece and keeps their sums in
// registers. Products are rounded before they are added. Only the outermost sum needs to begin at
// +0, for a +0 or -0 added to it makes no difference.
template <class T, bool kWeighted, int kLevels>
__device__ void add_rows(Ring ring) {
  using C = Columns<T>;
  constexpr std::uint32_t kStep = 32 * kAdders;  // of a thread's vectors
  const std::uint32_t thread = threadIdx.x % kTeam;
  float rank[kLevels > 1 ? kVectors : 1][C::kCount], node[kVectors][C::kCount] = {};
  float all_nodes[kLevels > 2 ? kVectors : 1][C::kCount] = {};
  auto& total = choose<(kLevels > 2)>(all_nodes, node);
  const auto value = [&](const uint4& raw, float weight, float(&row)[C::kCount]) {
    C::unpack(raw, row);
    if constexpr (kWeighted) {
#pragma unroll
      for (int c = 0; c < C::kCount; ++c) row[c] = __fmul_rn(row[c], weight);
    }
  };
  const auto add = [](float(&to)[C::kCount], const float(&what)[C::kCount]) {
#pragma unroll
    for (int c = 0; c < C::kCount; ++c) to[c] = __fadd_rn(to[c], what[c]);
  };
  const auto clear = [](float(&what)[C::kCount]) {
#pragma unroll
    for (int c = 0; c < C::kCount; ++c) what[c] = 0.0f;
  };
  for (;; ring.advance(1)) {
    device::mbarrier_wait(ring.full(), ring.parity, "adder", int(ring.slot));
    const Piece piece = ring.shared->pieces[ring.slot];
    if (piece.flags & kEnd) return;
    const std::uint32_t vectors = piece.bytes / kVectorBytes;
    // The vectors that any thread has, two at a time; what is added beyond them is never stored.
    const auto each_vector = [&](const auto& visit) {
#pragma unroll
      for (std::uint32_t v = 0; v < kVectors; v += 2) {
        if (v * kStep >= vectors) break;
        visit(v);
        visit(v + 1);
      }
    };
    uint4 raw[kVectors] = {};
    if (piece.flags & kRow) {
      const std::uint32_t from = ring.data() + thread * kVectorBytes;
#pragma unroll
      for (std::uint32_t v = 0; v < kVectors; ++v) {
        if (v * kStep + thread >= vectors) continue;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw[v].x), "=r"(raw[v].y), "=r"(raw[v].z), "=r"(raw[v].w)
                     : "r"(from + v * kStep * kVectorBytes)
                     : "memory");
      }
    }
    device::mbarrier_arrive_warp(ring.empty());
    const std::uint32_t kind = piece.flags & (kRow | kBeginsRank | kEndsRank | kRoundRank);
    if (kLevels == 1 ? kind != 0 : kind == (kRow | kBeginsRank | kEndsRank)) {  // a rank's only row
      each_vector([&](std::uint32_t v) {
        float row[C::kCount];
        value(raw[v], piece.weight, row);
        add(node[v], row);
      });
    } else if (kLevels > 1 && kind != 0) {
      each_vector([&](std::uint32_t v) {
        float sum[C::kCount];
        value(raw[v], piece.weight, sum);
        if (!(kind & kBeginsRank)) add(sum, rank[v]);
        if (kind & kEndsRank) {
          if (kind & kRoundRank) C::unpack(C::pack(sum), sum);
          add(node[v], sum);
        } else {
#pragma unroll
          for (int c = 0; c < C::kCount; ++c) rank[v][c] = sum[c];
        }
      });
    }
    if constexpr (kLevels > 2) {
      if (piece.flags & kEndsNode) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          add(total[v], node[v]);
          clear(node[v]);
        }
      }
    }
    if (!(piece.flags & kEndsToken)) continue;
    const std::uint32_t offset = thread * kVectorBytes;
    if (piece.bias != nullptr) {
      const bool aligned = is_aligned(piece.bias);
#pragma unroll
      for (std::uint32_t v = 0; v < kVectors; ++v) {
        uint4 bias = {};
        if (v * kStep + thread < vectors) {
          bias = load_columns<T>(piece.bias + offset + v * kStep * kVectorBytes, aligned);
        }
        float row[C::kCount];
        C::unpack(bias, row);
        add(total[v], row);
      }
    }
#pragma unroll
    for (std::uint32_t v = 0; v < kVectors; ++v) {
      raw[v] = C::pack(total[v]);
      clear(total[v]);
    }
    const bool aligned = is_aligned(piece.to);
#pragma unroll
    for (std::uint32_t v = 0; v < kVectors; ++v) {
      if (v * kStep + thread >= vectors) continue;
      store_columns<T>(piece.to + offset + v * kStep * kVectorBytes, raw[v], aligned);
    }
  }
}

}  // namespace winnow::expert_parallel::row_sums
