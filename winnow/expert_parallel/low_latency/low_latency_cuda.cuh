// How the kernels of the low-latency calls begin and end: places that are free again, what each
// rank has sent, and what they tell the others. Device code only.
#pragma once

#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/low_latency/low_latency_cuda.h"

namespace winnow::expert_parallel::low_latency {

inline constexpr int kThreads = 512, kWarps = kThreads / 32;
// Of an SM: a kernel that receives waits beside the one that sends, also where ranks share a GPU.
inline constexpr int kBlocksOnSm = 2;
inline constexpr int kVector = 8;  // bf16 columns of a thread at a time
inline constexpr int kMostTopk = 32;

// Column i of kVector bf16 columns.
__device__ __forceinline__ float column_of(const uint4& raw, int i) {
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
}

__device__ __forceinline__ std::byte* own(const LowLatencyView& view) {
  return view.peers[view.layer.topology.rank];
}
__device__ __forceinline__ std::uint64_t* word(std::byte* memory, std::int64_t offset) {
  return reinterpret_cast<std::uint64_t*>(memory + offset);
}
__device__ __forceinline__ bool masked(const LowLatencyView& view, int rank) {
  return view.shrinks && *const_cast<const volatile std::int32_t*>(view.mask + rank) != 0;
}

// Whether the word has come so far. With enable_shrink a rank that does not come is no fault.
__device__ inline bool comes(const LowLatencyView& view, const std::uint64_t* at,
                             std::uint64_t value, Phase phase, int rank) {
  if (!view.shrinks) return wait_at_least(view.layer, at, value, phase, rank);
  if (device::ld_acquire_sys(at) >= value) return true;
  const std::uint64_t start = device::globaltimer();
  for (unsigned look = 1;; ++look) {
    if (device::ld_acquire_sys(at) >= value) return true;
    if (look % 64 != 0) continue;
    if (broken(view.layer)) return false;
    const bool late = device::globaltimer() - start >= view.layer.timeout_ns;
    const bool gone = look % kLooksBetweenPeers == 0 && writer_gone(view.layer, rank);
    if (late || gone) return device::ld_acquire_sys(at) >= value;
  }
}

// The whole block. Different warps look at different words, so that no look waits for another.
__device__ inline bool broken_or_told(const LowLatencyView& view) {
  const bool bad = threadIdx.x == 32 ? told_of_fault(view.layer) : broken(view.layer);
  return __syncthreads_or(bad) != 0;
}

// Waits until every rank's places of call `epoch` are free. The whole block; false: broken.
__device__ inline bool wait_for_places(const LowLatencyView& view, int call, std::uint64_t epoch) {
  bool ok = true;
  if (epoch > 2) {
    for (int rank = int(threadIdx.x); rank < view.layer.topology.world; rank += kThreads) {
      if (masked(view, rank)) continue;
      const std::uint64_t* at = word(own(view), view.layout.consumed_word(call, rank));
      if (comes(view, at, epoch - 2, places_phase(call), rank)) continue;
      if (view.shrinks) view.mask[rank] = 1;
      ok = ok && view.shrinks;
    }
  }
  return __syncthreads_and(ok) != 0;
}

// The last block to come here gets true. The whole block, behind all that it has written: for this
// GPU, or for the others.
enum class WrittenFor : std::uint8_t { gpu, system };
enum class Half : std::uint8_t { send, receive };  // which run side by side
template <WrittenFor kFor>
__device__ inline bool last_block(const LowLatencyView& view, Half half, bool& is_last) {
  std::uint64_t* const arrivals = &view.state->arrivals[int(half)];
  __syncthreads();
  if (threadIdx.x == 0) {
    kFor == WrittenFor::gpu ? __threadfence() : __threadfence_system();
    is_last = arrive(arrivals) == gridDim.x - 1;
    if (is_last) {
      *arrivals = 0;
      __threadfence();
    }
  }
  __syncthreads();
  return is_last;
}

// What this rank says of its call: what the host gave, or what the kernel has found. The last
// block; `memory` is its shared memory. The last thread looks, which has less to do before.
__device__ inline const LowLatencyNote& take_note(const LowLatencyView& view,
                                                  const LowLatencyNote& given,
                                                  std::uint32_t* memory) {
  constexpr int kWords = int(sizeof(LowLatencyNote) / 4);
  for (int i = int(threadIdx.x); i < kWords; i += kThreads) {
    memory[i] = reinterpret_cast<const std::uint32_t*>(&given)[i];
  }
  __syncthreads();
  auto& note = *reinterpret_cast<LowLatencyNote*>(memory);
  if (threadIdx.x == kThreads - 1) {
    LowLatencyNote& found = view.state->note;
    if (note.refusal == 0 && found.found != 0) {
      note.refusal = 1;  // ErrorCode::invalid_argument
      note.found = found.found;
      note.token = found.token;
      note.value = found.value;
    }
    found.found = 0;
  }
  __syncthreads();
  return note;
}

// The last block: says `note` to every rank and signals.
__device__ inline void tell_sent(const LowLatencyView& view, int call, std::uint64_t epoch,
                                 const LowLatencyNote& note) {
  const int world = view.layer.topology.world, rank = view.layer.topology.rank;
  constexpr int kWords = int(sizeof(LowLatencyNote) / 4);
  // The text only where there is one.
  const int words = note.refusal != 0 ? kWords : 6;
  for (int i = int(threadIdx.x); i < world * words; i += kThreads) {
    const int to = i / words;
    if (masked(view, to)) continue;
    auto* said =
        reinterpret_cast<std::uint32_t*>(view.peers[to] + view.layout.note(call, epoch, rank));
    said[i % words] = reinterpret_cast<const std::uint32_t*>(&note)[i % words];
  }
  __syncthreads();
  for (int to = int(threadIdx.x); to < world; to += kThreads) {
    if (masked(view, to)) continue;
    device::st_release_sys(word(view.peers[to], view.layout.signal(call, rank)), epoch);
  }
  if (threadIdx.x == 0) view.state->sent[call] = epoch;
}

// What a rank has heard of a call.
struct HeardCall {
  bool broken = false, refused = false;
};

// Waits for all ranks; `come` [W], in shared memory, says which have come. The whole block. One
// block decides who is masked, and tells the host of a refusal. meanwhile() loads what has come
// with the signals beside what is looked at here.
template <class Meanwhile>
__device__ inline HeardCall hear(const LowLatencyView& view, int call, std::uint64_t epoch,
                                 std::int32_t format, std::uint64_t number,
                                 std::int64_t* wait_statistics, bool* come,
                                 const Meanwhile& meanwhile) {
  const int world = view.layer.topology.world;
  bool ok = true;
  for (int rank = int(threadIdx.x); rank < world; rank += kThreads) {
    const std::uint64_t* at = word(own(view), view.layout.signal(call, rank));
    std::uint64_t* const verdict_of = view.verdicts + call * world + rank;
    if (!view.shrinks || blockIdx.x == 0) {
      const std::uint64_t start = device::globaltimer();
      const bool there = !masked(view, rank) && comes(view, at, epoch, rows_phase(call), rank);
      come[rank] = there;
      if (wait_statistics != nullptr && blockIdx.x == 0) {
        wait_statistics[rank] += std::int64_t(device::globaltimer() - start);
      }
      if (!there && !view.shrinks) ok = false;
      if (!view.shrinks) continue;
      if (!there) view.mask[rank] = 1;
      __threadfence();
      device::st_release_sys(verdict_of, epoch * 2 + (there ? 1 : 0));
    } else {
      std::uint64_t verdict;
      while ((verdict = device::ld_acquire_sys(verdict_of)) < epoch * 2) {
        if (broken(view.layer)) break;
      }
      ok = ok && verdict >= epoch * 2;
      come[rank] = verdict == epoch * 2 + 1;
    }
  }
  HeardCall heard;
  heard.broken = __syncthreads_or(!ok || broken(view.layer)) != 0;
  if (heard.broken) return heard;
  device::allow_next_kernel();
  meanwhile();
  bool refuses = false;
  // From the end: the first threads have more to do meanwhile.
  for (int rank = kThreads - 1 - int(threadIdx.x); rank < world; rank += kThreads) {
    if (!come[rank]) continue;
    const auto& note =
        *reinterpret_cast<const LowLatencyNote*>(own(view) + view.layout.note(call, epoch, rank));
    refuses = refuses || note.refusal != 0 || note.format != format;
  }
  heard.refused = __syncthreads_or(refuses) != 0;
  if (!heard.refused || blockIdx.x != 0) return heard;
  const bool free = device::ld_acquire_sys(&view.deferred.report->call) == 0;
  if (__syncthreads_and(free) == 0) return heard;
  constexpr int kWords = int(sizeof(LowLatencyNote) / 4);
  for (int i = int(threadIdx.x); i < world * kWords; i += kThreads) {
    const int rank = i / kWords;
    const auto* from =
        reinterpret_cast<const std::uint32_t*>(own(view) + view.layout.note(call, epoch, rank));
    reinterpret_cast<std::uint32_t*>(view.deferred.notes + rank)[i % kWords] =
        come[rank] ? from[i % kWords] : 0;
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    view.deferred.report->kind = std::uint64_t(call);
    device::st_release_sys(&view.deferred.report->call, number);
  }
  return heard;
}

// The last block: this rank's places of the call are free for the call after the next.
__device__ inline void tell_received(const LowLatencyView& view, int call, std::uint64_t epoch) {
  const int world = view.layer.topology.world, rank = view.layer.topology.rank;
  for (int to = int(threadIdx.x); to < world; to += kThreads) {
    if (masked(view, to)) continue;
    device::st_release_sys(word(view.peers[to], view.layout.consumed_word(call, rank)), epoch);
  }
  if (threadIdx.x == 0) view.state->received[call] = epoch;
}

// The dynamic shared memory of a kernel that calls lay_out_rows() for all experts and ranks.
inline std::size_t begins_bytes(const LowLatencyLayout& layout) {
  return (static_cast<std::size_t>(layout.per_rank) * layout.world + 1) * sizeof(std::int32_t);
}

// `begins` [entries + 1], in shared memory, becomes where the rows of each entry begin, and the end
// of all. It holds their counts before. The whole block, behind a barrier.
__device__ inline void lay_out_rows(int entries, std::int32_t* begins) {
  if (threadIdx.x < 32) {
    const int lane = int(threadIdx.x);
    std::int32_t sum = 0;
    for (int first = 0; first < entries; first += 32) {
      const int i = first + lane;
      const std::int32_t count = i < entries ? begins[i] : 0;
      std::int32_t inclusive = count;
      for (int step = 1; step < 32; step *= 2) {
        const std::int32_t before = __shfl_up_sync(device::kFullWarp, inclusive, step);
        if (lane >= step) inclusive += before;
      }
      if (i < entries) begins[i] = sum + inclusive - count;
      sum += __shfl_sync(device::kFullWarp, inclusive, 31);
    }
    if (lane == 0) begins[entries] = sum;
  }
  __syncthreads();
}
__device__ inline int entry_of(const std::int32_t* begins, int entries, std::int32_t row) {
  int low = 0, high = entries;  // begins[low] <= row < begins[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begins[middle] <= row ? low : high) = middle;
  }
  return low;
}

// By a warp; everything a multiple of 16.
inline constexpr int kAtOnce = 8;  // loads of a lane that wait together
__device__ inline void copy_row(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const std::int64_t vectors = bytes / 16;
  for (std::int64_t first = threadIdx.x % 32; first < vectors; first += 32 * kAtOnce) {
    uint4 taken[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + 32 * i < vectors) taken[i] = source[first + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + 32 * i < vectors) target[first + 32 * i] = taken[i];
    }
  }
}

}  // namespace winnow::expert_parallel::low_latency
