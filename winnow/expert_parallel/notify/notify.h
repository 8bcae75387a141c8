// Exchanges token counts: every rank learns how many tokens it receives, from which ranks and for
// which experts.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/device.h"
#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/routing/topology.h"

namespace winnow::expert_parallel {

class NotifierBackend;
class Store;
class Transport;

// Every rank must pass the same values; the constructor compares them. W is the
// transport's world size, rank r lives on node r / local_world_size, expert x on rank x / (E/W).
struct NotifierConfig {
  int experts = 0;                      // E: a multiple of W
  int local_world_size = 0;             // L: ranks per node, a divisor of W; 0: all, one node
  std::chrono::nanoseconds timeout{0};  // of each call; 0: default_timeout() of deadline.h
  Device device{};  // of the tensors: the CPU, or a GPU, whose index may differ by rank
  std::optional<Backend> backend{};  // forces one, as Config::backend does
};

// Queue buffers of an engine that moves tokens itself: notify() checks that they are at least as
// large as node_buffer_layout() and local_buffer_layout() of queue_buffers.h require; with one node
// only the latter. With bytes_per_token 0 there is no check.
struct QueueBuffers {
  std::int64_t bytes_per_token = 0;  // of a record
  std::int64_t node_recv_tokens = 0, local_recv_tokens = 0;
  std::int64_t node_buffer_bytes = 0, local_buffer_bytes = 0;  // allocated by the engine
};

// Arguments of notify(). The first four are the results of layout(); n is this rank's own. A
// channel is a slice of the tokens: with per = ceil(n / C) channel c is [min(per*c, n),
// min(per*(c+1), n)). All tensors of counts are i32. Absent outputs are not written.
struct NotifyArgs {
  ConstTensorView tokens_per_rank{};    // [W]
  ConstTensorView tokens_per_node{};    // [W/L]
  ConstTensorView tokens_per_expert{};  // [E]
  ConstTensorView is_token_in_rank{};   // [n, W], u8: 0 or else
  std::int64_t channels = 1;            // C: the same on every rank, at least 1
  std::int64_t expert_alignment = 1;    // at least 1
  std::int64_t worst_case_rows = 0;     // above 0: the host does not wait for the totals
  QueueBuffers queues{};
  Stream stream{};  // on the notifier's GPU; each rank has its own
  // If non-null, this rank rejects the call: other fields are ignored and every rank throws.
  const Error* refusal = nullptr;

  // This rank's tokens that go to a node or rank, each once, summed over channels 0 to c.
  TensorView node_channel_prefix_matrix{};  // [W/L, C]
  TensorView rank_channel_prefix_matrix{};  // [W, C]
  // Tokens that come to this rank to be forwarded in its node, summed over source nodes 0 to j:
  // they come from the rank of the same local index, on this rank's own node from this rank itself.
  TensorView recv_node_prefix_sum{};  // [W/L]
  // Tokens that this rank receives in the end, summed over source ranks 0 to r.
  TensorView recv_rank_prefix_sum{};   // [W]
  TensorView num_recv_tokens{};        // [1]: the last of recv_rank_prefix_sum
  TensorView num_forward_tokens{};     // [1]: the last of recv_node_prefix_sum
  TensorView recv_pairs_per_expert{};  // [E/W]: (token, k) pairs for each expert of this rank,
                                       // rounded up to a multiple of expert_alignment
};

// The totals on the host; -1 if unknown.
struct NotifyTotals {
  std::int32_t recv_tokens = -1;
  std::int32_t forward_tokens = -1;
  std::vector<std::int32_t> recv_pairs_per_expert;  // [E/W]
};

// One rank of the count exchange. Every rank creates its own object, and all ranks make the same
// calls in the same order: the constructor and notify() are collective. The transport determines
// whether a rank is a thread or a process. Calls of one notifier must not overlap; different ones
// are independent.
//
// The counts travel as one message per rank and other node, to the rank of the same local index
// there, which passes them on to the ranks of its node. Messages have the same size whatever
// n is. They carry the number of the call, and consecutive calls use different memory, so that
// nothing is cleared in between and counts of different calls are not confused. See notify.md.
//
// On a GPU (compute capability 9.0 and newer) the call is queued on `stream`, which other ranks on
// this GPU must not share, and the counts are read there. The host waits only for the totals, and
// not at all in worst-case mode: such a call may be recorded in a CUDA graph (others are refused
// then). Errors of a call for which the host does not wait surface at the next call that observes
// them, after that call has been queued too. Each wait of a kernel has the whole timeout.
//
// Errors are winnow::Error whose operation is "expert_parallel::Notifier" (constructor) or
// "expert_parallel::notify":
// - Refusals (invalid_argument, resource). A rank reports an error in its arguments to the others,
//   and every rank throws the same text, for the lowest such rank:
//   "expert_parallel::notify: rank 1: expert_alignment: want at least 1, got 0". Refused are wrong
//   shapes, dtypes and devices, negative counts, counts that is_token_in_rank contradicts, queue
//   buffers that are too small (bytes needed and given). "channels differs: 4 on rank 0, 8 on rank
//   2" if ranks differ. No output is written, and the next call works.
// - More than 2^31 - 1 tokens or pairs that come to one rank: on this rank alone.
// - timeout: a wait reached its deadline or a peer is known to be gone. Every rank that is alive
//   throws the same text. The notifier is then broken: later calls throw the same error at once.
// - resource: a rank has no memory for the rest of a call that the others have begun: "rank 1: out
//   of memory in the call". The notifier is then broken as after a timeout.
class WINNOW_EXPORT Notifier {
 public:
  // Joins the other ranks: compares `config` through `store`, which all ranks share, and allocates
  // the control memory, all within the timeout. Errors: sizes that do not divide, a field in which
  // ranks differ (names the field, the values and their ranks), a rank that does not arrive,
  // memory.
  Notifier(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
           const NotifierConfig& config);
  ~Notifier();
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;

  // Tensors belong to the caller and are used during the call only; rows are contiguous, and an
  // output that overlaps another tensor is refused. Returns the backend that ran.
  Backend notify(const NotifyArgs& args);

  // The totals of the last call. They are unknown until its counts have arrived, and stay unknown
  // if it failed or was a worst-case call.
  const NotifyTotals& totals() const;

  const NotifierConfig& config() const;  // with its defaults resolved
  const Topology& topology() const;
  int rank() const;
  Backend backend() const;  // the backend that runs the calls

 private:
  std::unique_ptr<NotifierBackend> backend_;
};

}  // namespace winnow::expert_parallel
