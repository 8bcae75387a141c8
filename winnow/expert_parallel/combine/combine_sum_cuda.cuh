// How a block sums rows, in teams of 8 warps: one warp names the rows of each sum and has them
// copied, piece by piece, into a ring in shared memory, far ahead of the others, which add them up
// in registers. Device code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/places.cuh"

namespace winnow::expert_parallel::row_sums {

inline constexpr int kAdders = 7;  // warps of a team that add; the last one feeds them
inline constexpr int kTeam = 32 * (kAdders + 1);
inline constexpr int kVectors = 4;  // of 16 bytes, of a piece, in the registers of a thread
inline constexpr int kVectorBytes = 16;
inline constexpr int kMaxPiece = kAdders * 32 * kVectors * kVectorBytes;
inline constexpr int kMaxSlots = 32;
inline constexpr std::int64_t kLeastSlots = 3;  // of a team
inline constexpr int kMaxAddends = 32;
inline constexpr int kRingBytes = 220 * 1024;

// Levels of sums that a thread keeps: 1, where no rank has several rows of a token; 2, of ranks and
// of their node; 3, of all nodes too. The fewer there are, the more teams of a block find room in
// the registers.
__host__ __device__ constexpr int teams_of(int levels) { return 4 - levels; }

enum Flags : std::uint32_t {
  kRow = 1,         // there is a row to add
  kBeginsRank = 2,  // a sum within a rank begins with it
  kEndsRank = 4,    // that sum is complete and added to the sum of its node
  kEndsNode = 8,    // the sum of the node is complete and added to the total (3 levels)
  kEndsSum = 16,    // the total is complete: bias, rounding, out
  kMark = 32,       // no piece: what comes before has been written
  kEnd = 64,        // no more pieces
};

// One row of a sum, or a sum without rows; where the sum goes, and what is added to it at the end.
struct Addend {
  const std::byte* row;  // null: none
  std::byte* to;
  const std::byte* bias;         // may be null
  const std::byte* second_bias;  // the same
  float weight;
  std::uint32_t flags;
};

// What stands beside a piece of a row in the ring. The pointers are those of its columns.
struct alignas(16) Piece {
  std::byte* to;
  const std::byte* bias;
  const std::byte* second_bias;
  std::uint32_t bytes, flags;
  float weight;
};

// A ring's bookkeeping; the slots follow it in dynamic shared memory.
struct alignas(128) Shared {
  device::Barrier full[kMaxSlots], empty[kMaxSlots];
  Piece pieces[kMaxSlots];
  Addend addends[kMaxAddends];  // of the sums that are being fed
  std::uint32_t marks;          // that the team has reached
};

// How rows are cut: into equal pieces, with as many slots as fit in the ring of each team.
struct Cut {
  std::int64_t row_bytes;
  std::uint32_t piece_bytes, slots;
};
// `most` bytes of rows are under way at a time, in all blocks together.
inline Cut cut_rows(std::int64_t row_bytes, int teams, int blocks, std::int64_t most) {
  const std::int64_t pieces = (row_bytes + kMaxPiece - 1) / kMaxPiece;
  const std::int64_t piece = ((row_bytes + pieces - 1) / pieces + 127) / 128 * 128;
  const std::int64_t fit = (kRingBytes - teams * std::int64_t(sizeof(Shared))) / piece;
  const std::int64_t of_team = (fit < kMaxSlots ? fit : kMaxSlots) / teams;
  const std::int64_t wanted = std::max(kLeastSlots, most / (piece * teams * blocks));
  return {row_bytes, std::uint32_t(piece), std::uint32_t(std::min(of_team, wanted))};
}
inline int shared_bytes(const Cut& cut, int teams) {
  return teams * (int(sizeof(Shared)) + int(cut.slots * cut.piece_bytes));
}

// The ring of a team.
struct Ring {
  Shared* shared;
  std::uint32_t slots_begin;  // shared-window address
  std::int64_t row_bytes;
  std::uint32_t piece_bytes, slots;
  std::uint32_t slot = 0, parity = 0;

  __device__ Ring(std::byte* memory, const Cut& cut, int team)
      : row_bytes(cut.row_bytes),
        piece_bytes(device::keep_in_register(cut.piece_bytes)),
        slots(device::keep_in_register(cut.slots)) {
    memory += team * (sizeof(Shared) + slots * piece_bytes);
    shared = reinterpret_cast<Shared*>(memory);
    slots_begin = device::shared_address(memory + sizeof(Shared));
  }
  // By at most all slots.
  __device__ void advance(std::uint32_t count) {
    slot += count;
    if (slot >= slots) slot -= slots, parity ^= 1;
  }
  __device__ device::Place<device::Barrier> full() const {
    return device::place_of(shared->full[slot]);
  }
  __device__ device::Place<device::Barrier> empty() const {
    return device::place_of(shared->empty[slot]);
  }
  __device__ std::uint32_t data() const { return slots_begin + slot * piece_bytes; }
};

// By one thread of the team; the block's barrier follows.
__device__ inline void begin(const Ring& ring) {
  for (std::uint32_t i = 0; i < ring.slots; ++i) {
    device::place_of(ring.shared->full[i]).init(1);
    device::place_of(ring.shared->empty[i]).init(kAdders * device::kWarpArrival);
  }
  device::fence_mbarrier_init();
  ring.shared->marks = 0;
}

// Whether this thread adds; else it is of the feeding warp.
__device__ inline bool adds() { return threadIdx.x % kTeam < 32 * kAdders; }

// The feeding warp's end of the ring.
class Feeder {
 public:
  __device__ explicit Feeder(const Ring& ring)
      : ring_(ring), lane_(threadIdx.x % 32), policy_(device::policy_evict_first()) {}

  __device__ Addend* addends() { return ring_.shared->addends; }

  // Feeds sums of the addends 0 to count - 1, which the lanes have written. By the warp.
  __device__ void sum(std::uint32_t count) {
    __syncwarp();
    const std::int64_t row_bytes = ring_.row_bytes, piece_bytes = ring_.piece_bytes;
    for (std::uint32_t first = 0, last; first < count; first = last) {
      last = row_bytes <= piece_bytes ? count : end_of_sum(first);
      for (std::int64_t at = 0; at < row_bytes; at += piece_bytes) push_pieces(first, last, at);
    }
    __syncwarp();
  }
  // What has been fed so far is followed by a mark.
  __device__ void mark() { push_flag(kMark); }
  __device__ void end() { push_flag(kEnd); }

 private:
  __device__ std::uint32_t end_of_sum(std::uint32_t addend) {
    while (!(addends()[addend++].flags & kEndsSum)) continue;
    return addend;
  }

  // The pieces at `at` of the addends from `first` to before `last`, in their order: each time as
  // many as there are empty slots, and each lane takes one.
  __device__ void push_pieces(std::uint32_t first, std::uint32_t last, std::int64_t at) {
    const std::uint32_t bytes =
        std::uint32_t(min(std::int64_t(ring_.piece_bytes), ring_.row_bytes - at));
    for (std::uint32_t count; first < last; first += count) {
      Ring mine = ring_;
      mine.advance(min(lane_, ring_.slots));
      count = empty_slots(mine, last - first);
      if (lane_ < count) {
        const Addend& addend = addends()[first + lane_];
        Piece& piece = mine.shared->pieces[mine.slot];
        piece.to = addend.to + at;
        piece.bias = addend.bias == nullptr ? nullptr : addend.bias + at;
        piece.second_bias = addend.second_bias == nullptr ? nullptr : addend.second_bias + at;
        piece.bytes = bytes;
        piece.flags = addend.flags | (addend.row == nullptr ? 0u : std::uint32_t(kRow));
        piece.weight = addend.weight;
        if (addend.row == nullptr) {
          mine.full().arrive();
        } else {
          mine.full().arrive_expect(bytes);
          device::bulk_load(mine.data(), addend.row + at, bytes, mine.full().address, policy_);
        }
      }
      __syncwarp();
      ring_.advance(count);
    }
  }
  __device__ void push_flag(Flags flag) {
    if (lane_ == 0) {
      ring_.empty().wait(ring_.parity ^ 1, "feeder", int(ring_.slot));
      ring_.shared->pieces[ring_.slot] = {nullptr, nullptr, nullptr, 0, flag, 0.0f};
      ring_.full().arrive();
    }
    __syncwarp();
    ring_.advance(1);
  }

  // How many of the next `wanted` slots are empty: waits for the first. `mine` is this lane's.
  __device__ std::uint32_t empty_slots(const Ring& mine, std::uint32_t wanted) const {
#ifdef WINNOW_RACECHECK
    // The tool takes one lane for the issuer of all copies, so each waits for every slot.
    ring_.empty().wait(ring_.parity ^ 1, "feeder", int(ring_.slot));
    return 1;
#else
    const bool mine_is =
        lane_ < min(wanted, ring_.slots) && mine.empty().test_wait(mine.parity ^ 1);
    const unsigned others = ~__ballot_sync(device::kFullWarp, mine_is);
    if (others == 0) return 32;
    if (others & 1) {
      ring_.empty().wait(ring_.parity ^ 1, "feeder", int(ring_.slot));
    }
    return max(1, __ffs(others) - 1);
#endif
  }

  Ring ring_;
  std::uint32_t lane_;
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

// The adding warps of a team, all of them.
__device__ inline void meet_adders() {
  __syncwarp();
  device::bar_sync<32 * kAdders>(1 + threadIdx.x / kTeam);
}

// The adding warps of a team: each thread owns columns of a piece and keeps their sums in
// registers. Products are rounded before they are added. Only the outermost sum needs to begin at
// +0, for a +0 or -0 added to it makes no difference. Shared::marks counts the marks whose sums
// have been written, for threads of the block that read it with acquire.
template <class T, bool kWeighted, int kLevels>
__device__ void add_rows(Ring ring) {
  static_assert(kLevels >= 1 && kLevels <= 3);
  using C = Columns<T>;
  constexpr std::uint32_t kStep = 32 * kAdders;  // of a thread's vectors
  const std::uint32_t thread = device::keep_in_register(threadIdx.x % kTeam);
  float rank[kLevels > 1 ? kVectors : 1][C::kCount];
  float node[kVectors][C::kCount] = {};
  float all_nodes[kLevels > 2 ? kVectors : 1][C::kCount] = {};
  auto& total = choose<(kLevels > 2)>(all_nodes, node);
  const auto add = [](float(&to)[C::kCount], const float(&what)[C::kCount]) {
#pragma unroll
    for (int c = 0; c < C::kCount; ++c) to[c] = __fadd_rn(to[c], what[c]);
  };
  const auto clear = [](float(&what)[C::kCount]) {
#pragma unroll
    for (int c = 0; c < C::kCount; ++c) what[c] = 0.0f;
  };
  // What an adder needs of a Piece at once, of the next one while it adds.
  struct Head {
    std::uint32_t flags;
    float weight;
  } next{};
  const auto read_next = [&] {
    const Piece& piece = ring.shared->pieces[ring.slot];
    next = {piece.flags, piece.weight};
  };
  const auto count_mark = [&] { device::red_release_cta_shared_add<1>(&ring.shared->marks); };
  const std::uint32_t vectors = device::keep_in_register(ring.piece_bytes / kVectorBytes);
  const bool many = vectors > kVectors / 2 * kStep;
  for (bool there = false;;) {
    if (!there) {
      ring.full().wait(ring.parity, "adder", int(ring.slot));
      read_next();
    }
    const Head piece = next;
    const auto empty = ring.empty();
    const std::uint32_t slot = ring.slot;
    const std::uint32_t data = ring.data() + thread * kVectorBytes;
    ring.advance(1);
    if (piece.flags & kEnd) return;
    if (piece.flags & kMark) {
      meet_adders();
      if (thread == 0) count_mark();
      empty.arrive_warp();
      there = false;
      continue;
    }
    // The vectors that any thread has, or twice as many; what a thread adds up beyond its own is
    // never stored, nor what a slot still holds behind a shorter last piece.
    const auto each_vector = [&](const auto& visit) {
#pragma unroll
      for (std::uint32_t v = 0; v < kVectors / 2; ++v) visit(v);
      if (!many) return;
#pragma unroll
      for (std::uint32_t v = kVectors / 2; v < kVectors; ++v) visit(v);
    };
    uint4 raw[kVectors];
    if (piece.flags & kRow) {
      each_vector([&](std::uint32_t v) {
        raw[v] =
            device::ld_shared_v4_if(v * kStep + thread < vectors, data + v * kStep * kVectorBytes);
      });
    }
    std::byte* to = nullptr;
    const std::byte *bias = nullptr, *second_bias = nullptr;
    std::uint32_t bytes = 0;
    if (piece.flags & kEndsSum) {
      bytes = ring.shared->pieces[slot].bytes;
      to = ring.shared->pieces[slot].to + thread * kVectorBytes;
      bias = ring.shared->pieces[slot].bias;
      second_bias = ring.shared->pieces[slot].second_bias;
    }
    empty.arrive_warp();
    there = ring.full().test_wait(ring.parity);
    if (there) read_next();
    if (piece.flags & kRow) {
      const auto value = [&](std::uint32_t v, float(&row)[C::kCount]) {
        C::unpack(raw[v], row);
        if constexpr (kWeighted) {
#pragma unroll
          for (int c = 0; c < C::kCount; ++c) row[c] = __fmul_rn(row[c], piece.weight);
        }
      };
      if constexpr (kLevels == 1) {
        each_vector([&](std::uint32_t v) {
          float row[C::kCount];
          value(v, row);
          add(node[v], row);
        });
      } else if (piece.flags & kBeginsRank) {
        if (piece.flags & kEndsRank) {  // a rank's only row
          each_vector([&](std::uint32_t v) {
            float row[C::kCount];
            value(v, row);
            add(node[v], row);
          });
        } else {
          each_vector([&](std::uint32_t v) { value(v, rank[v]); });
        }
      } else {
        each_vector([&](std::uint32_t v) {
          float row[C::kCount];
          value(v, row);
          add(rank[v], row);
        });
        if (piece.flags & kEndsRank) {
          each_vector([&](std::uint32_t v) { add(node[v], rank[v]); });
        }
      }
    }
    if constexpr (kLevels > 2) {
      if (piece.flags & kEndsNode) {
        each_vector([&](std::uint32_t v) {
          add(total[v], node[v]);
          clear(node[v]);
        });
      }
    }
    if (!(piece.flags & kEndsSum)) continue;
    const auto mine = [&](std::uint32_t v) { return (v * kStep + thread) * kVectorBytes < bytes; };
    for (; bias != nullptr; bias = second_bias, second_bias = nullptr) {
      bias += thread * kVectorBytes;
      const bool aligned = is_aligned(bias);
      each_vector([&](std::uint32_t v) {
        uint4 columns = {};
        if (mine(v)) columns = load_columns<T>(bias + v * kStep * kVectorBytes, aligned);
        float row[C::kCount];
        C::unpack(columns, row);
        add(total[v], row);
      });
    }
    const bool aligned = is_aligned(to);
    each_vector([&](std::uint32_t v) {
      const uint4 sum = C::pack(total[v]);
      clear(total[v]);
      if (mine(v)) store_columns<T>(to + v * kStep * kVectorBytes, sum, aligned);
    });
  }
}

// How many marks a team has reached.
__device__ inline std::uint32_t marks_of(const Ring& ring) {
  return device::ld_acquire_cta_shared(&ring.shared->marks);
}

}  // namespace winnow::expert_parallel::row_sums
