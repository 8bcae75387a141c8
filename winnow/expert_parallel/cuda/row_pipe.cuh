// Copies rows through the shared memory of a block: warps load them, one thread stores them, both
// by bulk copies. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/host_device.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/places.cuh"

namespace winnow::expert_parallel {

// How rows travel: in pieces, each in a stage of its own.
struct PipeShape {
  static constexpr int kMostStages = 32, kLeastStages = 12;
  static constexpr std::int64_t kBytes = 208 * 1024;  // of all stages
  int stages = 0;
  std::int64_t piece_bytes = 0;
  // For rows of that size, a multiple of 16.
  explicit PipeShape(std::int64_t row_bytes, int least_stages = kLeastStages) {
    const std::int64_t most = kBytes / least_stages / 16 * 16;
    const std::int64_t pieces = (row_bytes + most - 1) / most;
    piece_bytes = (row_bytes + 16 * pieces - 1) / (16 * pieces) * 16;
    stages =
        static_cast<int>(kBytes / piece_bytes < kMostStages ? kBytes / piece_bytes : kMostStages);
  }
  WINNOW_HOST_DEVICE std::int64_t bytes() const { return stages * piece_bytes; }
};

// Producers are whole warps, fewer than there are stages, so that no two wait for the same stage: a
// barrier's parity tells only one phase from the next. Each piece gets the next number; number i
// goes through stage i % stages, and the storing thread takes them in their order.
class RowPipe {
 public:
  struct Shared {
    device::Barrier full[PipeShape::kMostStages], empty[PipeShape::kMostStages];
    std::byte* to[PipeShape::kMostStages][32];
    // How many of `to` are used; kEnd; or kMark minus the mark.
    std::int32_t targets[PipeShape::kMostStages];
    std::uint32_t bytes[PipeShape::kMostStages];
    std::uint32_t next;      // number of the next piece
    std::int32_t producing;  // warps that may still send
  };

  __device__ RowPipe(Shared& shared, std::byte* stages, const PipeShape& shape)
      : shared_(shared),
        stages_(device::shared_address(stages)),
        count_(shape.stages),
        piece_(static_cast<std::uint32_t>(shape.piece_bytes)),
        lane_(threadIdx.x % 32) {}

  // By one thread; a barrier of the block must follow before any other call.
  __device__ void begin(int producers) {
    for (int stage = 0; stage < count_; ++stage) {
      full(stage).init(1);
      empty(stage).init(1);
    }
    device::fence_mbarrier_init();
    shared_.next = 0;
    shared_.producing = producers;
  }

  // By a warp: copies the row at `from` to `to` of each lane that wants it. `element_bytes` 0: the
  // source is aligned to 16; else it is not, and has elements of 1, 2 or 4 bytes.
  __device__ void send(const std::byte* from, std::int64_t bytes, int element_bytes, bool wanted,
                       std::byte* to) {
    const unsigned lanes = __ballot_sync(device::kFullWarp, wanted);
    if (lanes == 0) return;
    for (std::int64_t offset = 0; offset < bytes; offset += piece_) {
      const auto size = static_cast<std::uint32_t>(min(std::int64_t(piece_), bytes - offset));
      const int stage = take();
      if (wanted) shared_.to[stage][__popc(lanes & ((1u << lane_) - 1))] = to + offset;
      if (element_bytes > 0) load_elements(stage, from + offset, size, element_bytes);
      __syncwarp();
      if (lane_ == 0) {
        shared_.targets[stage] = __popc(lanes);
        shared_.bytes[stage] = size;
        if (element_bytes > 0) {
          full(stage).arrive();
        } else {
          full(stage).arrive_expect(size);
          device::bulk_load(stage_address(stage), from + offset, size, full(stage).address,
                            device::policy_evict_first());
        }
      }
    }
  }

  // By a warp that sends nothing more. The last one tells the storing thread.
  __device__ void end() {
    if (is_last(shared_.producing)) signal(kEnd);
  }

  // By a warp that has sent everything before the mark. When all `warps` have, and what they sent
  // has been written, store() calls reached(which). Without `warps`: the mark is of what this
  // warp alone has sent.
  __device__ void mark(std::int32_t& warps, int which) {
    if (is_last(warps)) signal(kMark - which);
  }

  __device__ void mark(int which) {
    __syncwarp();
    signal(kMark - which);
  }

  // By one thread: stores what the producers send, and calls reached(mark). All has been written
  // when it returns. At most kReading stages are held for stores that still read them; kReading
  // must be less than the number of stages.
  template <int kReading = 6, class Reached>
  __device__ void store(const Reached& reached) {
    const std::uint64_t policy = device::policy_evict_normal();
    // Pieces that follow a mark before it is waited for.
    constexpr int kBehind = kReading < 6 ? kReading : 6;
    int stage = 0, oldest = 0;  // `oldest` of the stages that are being read
    std::uint32_t parity = 0;
    // The mark that is not reached yet (kEnd: none), and how many groups of stores were committed
    // since it came, its own empty one included.
    int mark = kEnd, since = 0;
    const auto reach = [&] {
      wait_all_but(since);  // the pieces behind the mark stay under way
      reached(mark);
      mark = kEnd;
    };
    for (int reading = 0;; ++reading) {
      if (reading == kReading) {
        device::bulk_wait_read<kReading - 1>();
        empty(oldest).arrive();
        oldest = oldest + 1 == count_ ? 0 : oldest + 1;
        --reading;
      }
      // Waits for the mark only once kBehind pieces behind it keep the link busy, or when no piece
      // is ready, since the next one may itself depend on the mark.
      if (mark != kEnd) ++since;
      if (mark != kEnd && (since > kBehind || !full(stage).test_wait(parity))) {
        reach();
      }
      full(stage).wait(parity, "store", stage);
      const int targets = shared_.targets[stage];
      if (targets < 0 && mark != kEnd) reach();
      if (targets == kEnd) break;
      if (targets < 0) {
        mark = kMark - targets;
        since = 0;
      }
      const std::uint32_t bytes = shared_.bytes[stage];
      for (int i = 0; i < targets; ++i) {
        device::bulk_store(shared_.to[stage][i], stage_address(stage), bytes, policy);
      }
      device::bulk_commit();  // an empty group for a mark
      if (++stage == count_) stage = 0, parity ^= 1;
    }
    device::bulk_wait<0>();
  }

 private:
  static constexpr int kEnd = -1, kMark = -2;

  // Waits until all but the last `groups` groups of stores have been written.
  static __device__ void wait_all_but(int groups) {
    switch (groups) {
      case 0:
        return device::bulk_wait<0>();
      case 1:
        return device::bulk_wait<1>();
      case 2:
        return device::bulk_wait<2>();
      case 3:
        return device::bulk_wait<3>();
      case 4:
        return device::bulk_wait<4>();
      case 5:
        return device::bulk_wait<5>();
      default:
        return device::bulk_wait<6>();
    }
  }

  __device__ device::Place<device::Barrier> full(int stage) const {
    return device::place_of(shared_.full[stage]);
  }
  __device__ device::Place<device::Barrier> empty(int stage) const {
    return device::place_of(shared_.empty[stage]);
  }
  __device__ std::uint32_t stage_address(int stage) const { return stages_ + stage * piece_; }

  // Whether this is the last of the warps that `count` counts; it then sees what the others have
  // done.
  __device__ bool is_last(std::int32_t& count) {
    __syncwarp();
    bool last = false;
    if (lane_ == 0) {
      __threadfence_block();
      last = atomicSub(&count, 1) == 1;
      __threadfence_block();
    }
    return __shfl_sync(device::kFullWarp, last, 0);
  }
  __device__ void signal(int what) {
    const int stage = take();
    if (lane_ != 0) return;
    shared_.targets[stage] = what;
    full(stage).arrive();
  }

  // The stage of the next piece, empty.
  __device__ int take() {
    std::uint32_t number = 0;
    if (lane_ == 0) number = atomicAdd(&shared_.next, 1u);
    number = __shfl_sync(device::kFullWarp, number, 0);
    const int stage = static_cast<int>(number % count_);
    empty(stage).wait((number / count_ & 1) ^ 1, "load", stage);
    return stage;
  }

  __device__ void load_elements(int stage, const std::byte* from, std::uint32_t bytes,
                                int element_bytes) {
    const std::uint32_t to = stage_address(stage);
    for (std::uint32_t i = lane_ * element_bytes; i < bytes; i += 32 * element_bytes) {
      if (element_bytes == 4) {
        const auto value = *reinterpret_cast<const std::uint32_t*>(from + i);
        device::st_shared(to + i, value);
      } else if (element_bytes == 2) {
        const auto value = *reinterpret_cast<const std::uint16_t*>(from + i);
        device::st_shared(to + i, value);
      } else {
        const auto value = *reinterpret_cast<const std::uint8_t*>(from + i);
        device::st_shared(to + i, value);
      }
    }
    device::fence_proxy_async_shared();
  }

  Shared& shared_;
  std::uint32_t stages_;
  int count_;
  std::uint32_t piece_;
  int lane_;
};

}  // namespace winnow::expert_parallel
