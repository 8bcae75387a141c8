// The all-to-all of decoding: few tokens, fixed places for every row, no counts before the rows.
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

namespace winnow::expert_parallel {

class LowLatencyBackend;
class Store;
class Transport;

// What every rank gives alike; the constructor compares it. W is the transport's world size, expert
// x lives on rank x / (E / W). All ranks are on one host.
struct LowLatencyConfig {
  std::int64_t max_tokens = 0;  // M: most tokens of a rank in a call, 1 or more
  std::int64_t hidden = 0;      // H: a multiple of 8
  int topk = 0;                 // K: most experts of a token, 1 to 32
  int experts = 0;              // E: a multiple of W
  bool enable_shrink = false;   // a rank that does not come is masked; see LowLatency
  int sm_count = 0;             // SMs of a call on a GPU; 0: all of them, shared by its ranks
  std::chrono::nanoseconds timeout{0};  // of each wait; 0: default_timeout() of deadline.h
  Device device{};                      // of the tensors
  std::optional<Backend> backend{};     // forces one, as Config::backend does
};

// What rows are in a dispatch. Of the fp8 formats each 128 columns of a row are f8_e4m3 with one
// scale, as indexer::quantize() makes them: max(amax, 1e-4) / 448, or the power of two not below.
enum class RowFormat : std::uint8_t {
  bf16,              // as they are given
  fp8,               // scales f32 [E/W, W * M, H / 128]; H a multiple of 128, as below
  fp8_power_of_two,  // the same, of powers of two
  fp8_ue8m0,  // their exponents, i32 [E/W, W * M, H / 512], the first in the lowest byte; H a
              // multiple of 512
};

// Which half of a call is made: sending, which a rank does when it has its rows, or receiving,
// which it may do later and which gives the results.
enum class CallPart : std::uint8_t { both, send, receive };

// Arguments of dispatch(); e = E / W. Sending takes the first three, receiving the results.
struct LowLatencyDispatchArgs {
  ConstTensorView input{};           // [n, H] bf16, n 0 to M
  ConstTensorView expert_indices{};  // [n, k] i32 or i64, k 1 to K; -1 or E: no expert
  RowFormat format = RowFormat::fp8;
  CallPart part = CallPart::both;

  TensorView output{};             // [e, W * M, H], bf16 or f8_e4m3
  TensorView scales{};             // of the fp8 formats, any strides
  TensorView counts{};             // [e] i32: rows of each local expert
  TensorView source_tokens{};      // [e, W * M] i32: the token of its rank that a row is
  TensorView source_pairs{};       // [e, W * M] i32: token * K + k
  TensorView ranges{};             // [e, W] i64: first row << 32 | rows, of each source rank
  TensorView expert_statistics{};  // optional [e] i32: the counts are added
  TensorView wait_statistics{};    // optional [W] i64: nanoseconds waited for a rank are added
  Stream stream{};                 // on the layer's GPU; each rank has its own
  const Error* refusal = nullptr;  // if non-null, this rank rejects the call: every rank throws
};

// Arguments of combine(). Receiving takes expert_indices, weights, out and wait_statistics, sending
// the others.
struct LowLatencyCombineArgs {
  ConstTensorView expert_output{};   // [e, W * M, H] bf16
  ConstTensorView source_pairs{};    // of the dispatch
  ConstTensorView ranges{};          // of the dispatch
  ConstTensorView expert_indices{};  // [n, k] i32 or i64, as in the dispatch
  ConstTensorView weights{};         // [n, k] f32
  TensorView out{};                  // [n, H] bf16
  TensorView wait_statistics{};      // optional [W] i64
  CallPart part = CallPart::both;
  Stream stream{};
  const Error* refusal = nullptr;
};

// One rank of the low-latency all-to-all. All ranks make the same calls in the same order: the
// constructor, dispatch() and combine() are collective. Every row has a place of its own at every
// rank that may get it, so that nothing is counted before it travels: 4 * (W + K) * M * H bytes and what
// stands beside them are taken when the object is made, and nothing in a call.
//
// dispatch(): the rows of local expert x are output[x, 0 to counts[x] - 1], those of a source rank
// together, as `ranges` says, in the order of ranks and then, on the CPU, of tokens (on a GPU any).
// Rows from counts[x] on are not written. A token names an expert once at most:
// twice is refused.
//
// combine(): out[t] = sum over k of weights[t, k] * row(t, k), in f32, k ascending, begun at +0,
// each product rounded before it is added, the result rounded to bf16 once. Pairs without an expert
// are left out.
//
// A call may be made in two parts. At most two dispatches, and two combines, may have been sent and
// not received; a third is an Error on this rank alone. What is sent of the call's tensors is read
// until the part's work is done.
//
// Faults. Without enable_shrink a rank that does not come within the timeout is an Error (timeout)
// on every rank, which names it, and the object is broken. With it, that rank is masked here: the
// call goes on with no rows from it, later calls neither wait for it nor send to it, and combine()
// leaves out the pairs of its experts. mask() tells, set_mask() changes it: a rank that has missed
// a call cannot come back; then all ranks make a new object. A rank that is masked by others only
// notices that they do not come.
//
// Errors as those of AllToAll: what one rank's arguments have wrong, every rank throws, as
// "expert_parallel::low_latency_dispatch: rank 1: input: want ...", when it receives; the results
// are unspecified and the next call works. Masked ranks do not hear of it. On a GPU a call is
// queued on `stream`; what other ranks or kernels find is thrown by a later call.
class WINNOW_EXPORT LowLatency {
 public:
  // Joins the other ranks through `store` and takes the memory. Errors as of AllToAll; unsupported
  // where another rank's memory cannot be reached by a pointer.
  LowLatency(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
             const LowLatencyConfig& config);
  ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  void dispatch(const LowLatencyDispatchArgs& args);
  void combine(const LowLatencyCombineArgs& args);

  // Of this rank: which ranks are masked, [W], 1 or 0. On a GPU waits for its calls. Without
  // enable_shrink all 0.
  std::vector<std::int32_t> mask() const;
  // Only with enable_shrink, and not this rank itself.
  void set_mask(int rank, bool masked);

  const LowLatencyConfig& config() const;
  int rank() const;
  int world_size() const;
  Backend backend() const;
  // The memory that this rank has taken.
  std::int64_t bytes() const;
  // Leaves; idempotent, waits for nobody.
  void close() noexcept;

 private:
  LowLatencyBackend& open(const char* operation) const;
  std::unique_ptr<LowLatencyBackend> backend_;
  LowLatencyConfig config_;
  int rank_ = 0, world_size_ = 1;
  Backend which_ = Backend::cpu;
};

}  // namespace winnow::expert_parallel
