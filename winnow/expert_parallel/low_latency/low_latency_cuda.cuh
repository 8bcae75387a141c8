// The waits and signals with which the kernels of the low-latency calls begin and end: which places
// are free, what each rank has sent, and the errors. Device code only.
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
// Blocks on an SM: a receiving kernel waits beside a sending one, also where ranks share a GPU.
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

// Waits until the word is at least `value`. False: a fault, or with enable_shrink a missing rank.
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

// Tells every rank which calls this rank has received, so that their places are free for the call
// after the next. A kernel does this at its beginning, when the kernel before it has ended: so a
// receiving kernel need not wait for all of its blocks. The threads with the least work do it.
__device__ inline void signal_received(const LowLatencyView& view) {
  if (blockIdx.x != gridDim.x - 1) return;
  const int world = view.layer.topology.world, rank = view.layer.topology.rank;
  for (int i = kThreads - 1 - int(threadIdx.x); i < kLowLatencyCalls * world; i += kThreads) {
    const int call = i / world, to = i % world;
    if (masked(view, to)) continue;
    device::st_release_sys(word(view.peers[to], view.layout.consumed_word(call, rank)),
                           view.state->received[call]);
  }
}

// Waits until every rank's places of call `epoch` are free. The whole block calls it; false: the
// layer is broken. Warps poll different words, so that no poll waits for another.
__device__ inline bool wait_for_places(const LowLatencyView& view, int call, std::uint64_t epoch) {
  bool ok = true;
  if (threadIdx.x == kThreads - 1) ok = !fault_signalled(view.layer);
  if (threadIdx.x == kThreads - 33) ok = !broken(view.layer);
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

// Records an error that a sending kernel finds; `found` is in the block's shared memory. The first
// error of all blocks fills the note by set(note).
template <class Set>
__device__ inline void find(const LowLatencyView& view, std::uint32_t& found,
                            LowLatencyNote::Found what, const Set& set) {
  found = 1;
  LowLatencyNote& note = view.state->note;
  if (atomicCAS(reinterpret_cast<int*>(&note.found), 0, int(what)) == 0) set(note);
}

// One thread reports that its block of a sending kernel has done `what`. Returns whether all blocks
// have, and whether one has found an error.
struct Sent {
  bool all, found;
};
__device__ inline Sent arrive_sent(const LowLatencyView& view, BlocksSending what,
                                   const std::uint32_t& found) {
  constexpr std::uint64_t kFound = std::uint64_t(1) << 32;  // counts blocks with an error
  auto* const sent = reinterpret_cast<unsigned long long*>(&view.state->sending[what]);
  const bool mine = *const_cast<const volatile std::uint32_t*>(&found) != 0;
  if (mine) __threadfence();  // after the writes of the note
  const std::uint64_t here = mine ? 1 + kFound : 1;
  const std::uint64_t so_far = here + atomicAdd(sent, static_cast<unsigned long long>(here));
  const bool all = std::uint32_t(so_far) == gridDim.x;
  if (all) {
    __threadfence_system();  // behind what all blocks have done, which other ranks are told next
    *sent = 0;
  }
  return {all, so_far >= kFound};
}

// Writes `note` to every rank.
__device__ inline void signal_note(const LowLatencyView& view, int call, std::uint64_t epoch,
                                   const LowLatencyNote& note) {
  const int world = view.layer.topology.world, rank = view.layer.topology.rank;
  constexpr int kWords = int(sizeof(LowLatencyNote) / 4);
  // Without the text if there is none.
  const int words = note.refusal != 0 ? kWords : 6;
  for (int i = int(threadIdx.x); i < world * words; i += kThreads) {
    const int to = i / words;
    if (masked(view, to)) continue;
    auto* message =
        reinterpret_cast<std::uint32_t*>(view.peers[to] + view.layout.note(call, epoch, rank));
    message[i % words] = reinterpret_cast<const std::uint32_t*>(&note)[i % words];
  }
}

// Writes the error that was found over the note that a block has sent before. One thread of the
// last block.
__device__ inline void signal_found(const LowLatencyView& view, int call, std::uint64_t epoch) {
  const volatile LowLatencyNote& found = view.state->note;
  for (int to = 0; to < view.layer.topology.world; ++to) {
    if (masked(view, to)) continue;
    auto& message = *reinterpret_cast<LowLatencyNote*>(
        view.peers[to] + view.layout.note(call, epoch, view.layer.topology.rank));
    message.refusal = 1;  // ErrorCode::invalid_argument
    message.found = found.found;
    message.token = found.token;
    message.value = found.value;
  }
  view.state->note.found = 0;
  __threadfence_system();
}

// The epoch of the call that a kernel receives. The whole block calls it; false: broken.
__device__ inline bool begin_to_receive(const LowLatencyView& view, int call,
                                        const ReceivedCall& received, std::uint64_t& epoch) {
  const std::uint64_t before = view.state->received[call];
  epoch = before + 1 + received.place_in_line;
  if (__syncthreads_or(broken(view.layer)) != 0) return false;
  if (threadIdx.x != 0) return true;
  // This block has read `received`. When all blocks have, it may change for the next kernel.
  __threadfence();
  if (arrive(&view.state->receiving) == gridDim.x - 1) {
    __threadfence();
    view.state->receiving = 0;
    view.state->received[call] = before + received.consumed;
  }
  return true;
}

struct ReceiveOutcome {
  bool broken = false, refused = false;
};

// Waits for all ranks' words [W] at `words` in this rank's memory; `come` [W], in shared memory,
// says which have come. The whole block calls it, which has waited since `start`. Block 0 decides
// which ranks are masked, and reports a refusal to the host. meanwhile() loads what the words
// announce while the notes are checked here.
template <class Meanwhile>
__device__ inline ReceiveOutcome receive_call(const LowLatencyView& view, int call,
                                              std::int64_t words, std::uint64_t epoch,
                                              std::int32_t format, std::uint64_t number,
                                              std::int64_t* wait_statistics, std::uint64_t start,
                                              bool* come, const Meanwhile& meanwhile) {
  const int world = view.layer.topology.world;
  bool ok = true;
  for (int rank = int(threadIdx.x); rank < world; rank += kThreads) {
    const std::uint64_t* at = word(own(view), words) + rank;
    std::uint64_t* const verdict_of = view.verdicts + (call * 2 + int(epoch % 2)) * world + rank;
    if (!view.shrinks || blockIdx.x == 0) {
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
  ReceiveOutcome received;
  received.broken = __syncthreads_or(!ok) != 0;
  if (received.broken) return received;
  device::allow_next_kernel();
  meanwhile();
  bool refuses = false;
  // The last threads do this: the first have more to do in meanwhile().
  for (int rank = kThreads - 1 - int(threadIdx.x); rank < world; rank += kThreads) {
    if (!come[rank]) continue;
    const auto& note =
        *reinterpret_cast<const LowLatencyNote*>(own(view) + view.layout.note(call, epoch, rank));
    refuses = refuses || note.refusal != 0 || note.format != format;
  }
  received.refused = __syncthreads_or(refuses) != 0;
  if (!received.refused || blockIdx.x != 0) return received;
  const bool free = device::ld_acquire_sys(&view.deferred.report->call) == 0;
  if (__syncthreads_and(free) == 0) return received;
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
  return received;
}

// Bytes of the `begins` of lay_out_rows().
WINNOW_HOST_DEVICE constexpr std::size_t begins_bytes(int experts) {
  return (static_cast<std::size_t>(experts) + 1 + kWarps) * sizeof(std::int32_t);
}
inline constexpr int kMostBeginsBytes = static_cast<int>(begins_bytes(kLowLatencyMostExperts));

// Replaces the counts of rows in `begins` [entries + 1 + kWarps], in shared memory, by their
// exclusive sums, followed by the sum of all. The whole block calls it, after a barrier; the last
// kWarps words are scratch.
__device__ inline void lay_out_rows(int entries, std::int32_t* begins) {
  std::int32_t* const of_warps = begins + entries + 1;
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  std::int32_t before = 0;  // the sum of the entries before `first`
  for (int first = 0; first < entries; first += kThreads) {
    const int i = first + int(threadIdx.x);
    const std::int32_t count = i < entries ? begins[i] : 0;
    std::int32_t inclusive = count;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t above = __shfl_up_sync(device::kFullWarp, inclusive, step);
      if (lane >= step) inclusive += above;
    }
    if (lane == 31) of_warps[warp] = inclusive;
    __syncthreads();
    std::int32_t all = lane < kWarps ? of_warps[lane] : 0, of_warps_before = lane < warp ? all : 0;
    all = __reduce_add_sync(device::kFullWarp, all);
    of_warps_before = __reduce_add_sync(device::kFullWarp, of_warps_before);
    if (i < entries) begins[i] = before + of_warps_before + inclusive - count;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) begins[entries] = before;
  __syncthreads();
}

}  // namespace winnow::expert_parallel::low_latency
