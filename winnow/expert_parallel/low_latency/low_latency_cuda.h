// The low-latency calls on GPUs: what their kernels are given, and their launches, each a
// cudaError_t. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/low_latency/low_latency_layout.h"

namespace winnow::expert_parallel {

// What their waits wait for, by LowLatencyCall: rows, and the places of rows of an earlier call.
WINNOW_HOST_DEVICE constexpr Phase rows_phase(int call) { return Phase(16 + call); }
WINNOW_HOST_DEVICE constexpr Phase places_phase(int call) { return Phase(18 + call); }

// What the host reads of a call that a rank has refused, in pinned memory: this, and what each rank
// has said, [W].
struct LowLatencyReport {
  std::uint64_t call = 0;  // 0: nothing; written last
  std::uint64_t kind = 0;  // LowLatencyCall
};
struct LowLatencyReportView {
  LowLatencyReport* report = nullptr;
  LowLatencyNote* notes = nullptr;
};

// What blocks that send have done: all of it, or, in combine, looked at their pairs.
enum BlocksSending { kBlocksSent, kBlocksKnow };

// In the device memory of this rank alone, zero-filled at first.
struct LowLatencyState {
  std::uint64_t sent[kLowLatencyCalls] = {}, received[kLowLatencyCalls] = {};  // epochs
  // Blocks of the kernel that sends, see BlocksSending; in the upper half those that have found
  // something wrong. Of the kernel that receives: that know the epoch. Back to 0.
  std::uint64_t sending[2] = {}, receiving = 0;
  LowLatencyNote note{};  // what the kernel that runs has found
};

struct LowLatencyView {
  LayerView layer;  // topology, control memory, faults
  LowLatencyLayout layout;
  std::byte* const* peers = nullptr;  // [W]: the rows' memory of every rank, in device memory
  LowLatencyState* state = nullptr;
  std::int32_t* slots = nullptr;  // [E]: rows for each expert so far; back to 0
  std::int32_t* mask = nullptr;   // [W]
  // [calls, 2, W], the second by the epoch: epoch * 2, and 1 more where the rank has come. Dispatch
  // and combine count epochs each by themselves.
  std::uint64_t* verdicts = nullptr;
  bool shrinks = false;
  LowLatencyReportView deferred;
};

// Which call a kernel receives: how many older ones are still to be received, and how many of the
// oldest ones are over behind it.
struct ReceivedCall {
  int place_in_line = 0, consumed = 1;
};

struct ExpertIndices {
  const void* data = nullptr;  // [n, k]
  std::int64_t stride = 0;     // elements
  std::int64_t tokens = 0;
  int topk = 0;
  bool wide = false;  // i64

  WINNOW_HOST_DEVICE std::int64_t at(std::int64_t token, int k) const {
    const std::int64_t i = token * stride + k;
    return wide ? static_cast<const std::int64_t*>(data)[i]
                : static_cast<const std::int32_t*>(data)[i];
  }
};

// Both halves of dispatch; strides in elements.
struct LowLatencyDispatchParams : ReceivedCall {
  LowLatencyView view;
  LowLatencyNote note;  // format; a refusal: nothing is sent
  std::uint64_t call = 0;
  const std::byte* input = nullptr;
  std::int64_t input_stride = 0;  // bytes
  ExpertIndices indices;
  std::int64_t hidden = 0;
  // Receiving; output null: what has come is dropped. `behind_send`: the kernel before it in the
  // stream is that which sends, of the same call. It need not wait for its end then: what stands
  // before both has ended, and what is sent is told by signals.
  bool behind_send = false;
  std::byte* output = nullptr;
  std::int64_t expert_stride = 0, row_stride = 0;  // bytes
  std::byte* scales = nullptr;                     // words of 4 bytes
  std::int64_t scale_strides[3] = {};              // words
  std::int64_t scale_words = 0;
  std::int32_t* counts = nullptr;
  std::int32_t* source_tokens = nullptr;
  std::int32_t* source_pairs = nullptr;
  std::int64_t tokens_stride = 0, pairs_stride = 0;
  std::int32_t* pair_rows = nullptr;
  std::int64_t pair_rows_strides[2] = {};
  std::int64_t* ranges = nullptr;
  std::int64_t ranges_stride = 0;
  std::int32_t* expert_statistics = nullptr;
  std::int64_t* wait_statistics = nullptr;
};
int launch_low_latency_send(const LowLatencyDispatchParams& params, int blocks, void* stream);
int launch_low_latency_receive(const LowLatencyDispatchParams& params, int blocks, void* stream);

struct LowLatencyCombineParams : ReceivedCall {
  LowLatencyView view;
  LowLatencyNote note;
  std::uint64_t call = 0;
  std::int64_t hidden = 0;
  const std::byte* expert_output = nullptr;
  std::int64_t expert_stride = 0, row_stride = 0;  // bytes
  const std::int32_t* pair_rows = nullptr;
  std::int64_t pair_rows_strides[2] = {};
  std::uint64_t patience_ns = 0;  // with which a rank waits for weights in order to send sums
  // Receiving; out null: as above.
  bool behind_send = false;
  ExpertIndices indices;
  const float* weights = nullptr;
  std::int64_t weights_stride = 0;
  std::byte* out = nullptr;
  std::int64_t out_stride = 0;  // bytes
  std::int64_t* wait_statistics = nullptr;
};
int launch_low_latency_send(const LowLatencyCombineParams& params, int blocks, void* stream);
int launch_low_latency_receive(const LowLatencyCombineParams& params, int blocks, void* stream);

// Whose rows' beginnings have room in the shared memory of a block.
inline constexpr int kLowLatencyMostExperts = 20'000;
int load_low_latency_dispatch();
int load_low_latency_combine();

}  // namespace winnow::expert_parallel
