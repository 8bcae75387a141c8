// The all-to-all for decode steps: few tokens, a fixed place for every row, no exchange of counts.
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

// Every rank must pass the same values; the constructor compares them. W is the transport's world
// size, expert x lives on rank x / (E / W). All ranks are on one host.
struct LowLatencyConfig {
  std::int64_t max_tokens = 0;  // M: limit of the tokens of a rank in a call, 1 or more
  std::int64_t hidden = 0;      // H: a multiple of 8
  int topk = 0;                 // K: limit of the experts of a token, 1 to 32
  int experts = 0;              // E: a multiple of W
  bool enable_shrink = false;   // mask ranks that do not take part; see LowLatency
  int sm_count = 0;             // SMs of a call on a GPU; 0: all, divided among the ranks on it
  std::chrono::nanoseconds timeout{0};  // of each wait; 0: default_timeout() of deadline.h
  Device device{};                      // of the tensors
  std::optional<Backend> backend{};     // forces one, as Config::backend does
};

// The format in which dispatch() returns rows. In the fp8 formats each group of 128 columns of a
// row is f8_e4m3 with one scale, as indexer::quantize() computes it: max(amax, 1e-4) / 448, or that
// rounded up to a power of two.
enum class RowFormat : std::uint8_t {
  bf16,              // as in the input
  fp8,               // scales f32 [E/W, W * M, H / 128]; H a multiple of 128, as below
  fp8_power_of_two,  // the same, rounded up to powers of two
  fp8_ue8m0,  // their exponents, i32 [E/W, W * M, H / 512], the first in the lowest byte; H a
              // multiple of 512
};

// Which half of a call is made: `send` as soon as the rank has its rows, and `receive`, which may
// follow later and returns the results.
enum class CallPart : std::uint8_t { both, send, receive };

// Identifies a call that has been sent, and its object: `send` returns the number, and `receive`
// takes it. No two are the same in a process.
enum class LowLatencySent : std::uint64_t { none };

// Arguments of dispatch(); e = E / W. `send` uses the first three, `receive` writes the results.
struct LowLatencyDispatchArgs {
  ConstTensorView input{};           // [n, H] bf16, n 0 to M
  ConstTensorView expert_indices{};  // [n, k] i32 or i64, k 1 to K; -1 or E: no expert
  RowFormat format = RowFormat::fp8;
  CallPart part = CallPart::both;
  LowLatencySent sent = LowLatencySent::none;  // of `receive`: the call that it receives

  TensorView output{};             // [e, W * M, H], bf16 or f8_e4m3
  TensorView scales{};             // of the fp8 formats, any strides; absent for bf16
  TensorView counts{};             // [e] i32: rows of each local expert
  TensorView source_tokens{};      // [e, W * M] i32: index of the row's token on its rank
  TensorView source_pairs{};       // [e, W * M] i32: token * K + k
  TensorView pair_rows{};          // [W, M, K] i32, for combine(); see there
  TensorView ranges{};             // [e, W] i64: first row << 32 | rows, of each source rank
  TensorView expert_statistics{};  // optional [e] i32: the counts are added
  TensorView wait_statistics{};    // optional [W] i64: nanoseconds waited for a rank are added
  Stream stream{};                 // on the layer's GPU; each rank has its own
  const Error* refusal = nullptr;  // if non-null, this rank rejects the call: every rank throws
};

// Arguments of combine(). `receive` uses expert_indices, weights, out and wait_statistics, and
// `send` the others. If `send` has expert_indices and weights, too, the ranks of a GPU may add the
// rows of a token before they send them, which is less data.
struct LowLatencyCombineArgs {
  ConstTensorView expert_output{};  // [e, W * M, H] bf16
  ConstTensorView pair_rows{};      // of the dispatch
  // The dispatch, if it was sent alone: refused until it is received, which writes pair_rows.
  LowLatencySent dispatched = LowLatencySent::none;
  ConstTensorView expert_indices{};  // [n, k] i32 or i64, as in the dispatch
  ConstTensorView weights{};         // [n, k] f32
  TensorView out{};                  // [n, H] bf16
  TensorView wait_statistics{};      // optional [W] i64
  CallPart part = CallPart::both;
  LowLatencySent sent = LowLatencySent::none;  // as above
  Stream stream{};
  const Error* refusal = nullptr;
};

// One rank of the low-latency all-to-all. All ranks make the same calls in the same order: the
// constructor, dispatch() and combine() are collective. Every row has a fixed place on every rank
// that may receive it, so no counts are exchanged before rows are sent. The constructor allocates
// 4 * (W + K) * M * H bytes with their metadata; calls allocate nothing.
//
// dispatch(): the rows of local expert x are output[x, 0 to counts[x] - 1], sorted by source rank,
// with the range of each source rank in `ranges`. On the CPU the rows of a source rank are sorted
// by token; on a GPU their order is unspecified. Rows from counts[x] on are not written. A token
// that names an expert twice is refused.
//
// `pair_rows` [s, t, k] is x * W * M + i where output[x, i] is the row of pair (t, k) of rank s,
// and -1 where that pair's expert is not on this rank. It is all that combine() reads of a
// dispatch: callers may keep several, and pass them in any order. A dispatch that was sent alone is
// named by `dispatched`, so that a combine before it is received is refused; on the CPU also one
// after a receive that has thrown what another rank refused.
//
// combine(): out[t] = sum over k of weights[t, k] * row(t, k), accumulated in f32 from +0: of the
// experts of each rank in ascending order of k, then of the ranks in ascending order. Each product
// is rounded before it is added, and the result is rounded to bf16 once. Pairs without an expert
// are omitted.
//
// A call may be split into two parts. At most two dispatches and two combines may be in flight,
// that is, sent and not yet received. Each rank receives them in any order, and whole calls may
// come in between. A third one is an Error on this rank only, as is call n + 2 of a kind while call
// n is in flight, whose memory it takes, and as is `receive` of a call that is not in flight. The
// tensors that a part sends are read until the work of that part is done.
//
// Faults. Without enable_shrink, if a rank does not take part within the timeout, every rank throws
// an Error (timeout) that names it, and the object is broken. With enable_shrink this rank masks
// that rank: the call continues without rows from it, later calls neither wait for it nor send to
// it, and combine() omits the pairs of its experts. mask() returns the masked ranks and set_mask()
// changes them. A rank that has missed a call cannot rejoin; all ranks must create a new object. A
// masked rank itself sees that the others no longer take part.
//
// Errors are those of AllToAll; outputs that overlap inputs or each other are refused. If the
// arguments of one rank are invalid, every rank that is not masked throws the same text when it
// receives, for example "expert_parallel::low_latency_dispatch: rank 1: input: want ..."; the
// results are unspecified and the next call works. On the CPU indices that another thread rewrites
// during a call make the result wrong, never an access outside of a tensor. On a GPU a call is
// queued on `stream`, and errors of other ranks or of kernels are thrown by a later call, which is
// not a `send`: by the next one before anything is queued if the object is broken, otherwise after
// that call has been queued as well. So the tensors of a call that throws stay in use, as those of
// one that returns, until the stream has completed its work.
class WINNOW_EXPORT LowLatency {
 public:
  // Joins the other ranks through `store` and allocates the memory. Errors: as AllToAll;
  // unsupported if the memory of another rank cannot be accessed by pointer.
  LowLatency(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
             const LowLatencyConfig& config);
  ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  // With CallPart::send they return the number of the call, for `receive`; else none.
  LowLatencySent dispatch(const LowLatencyDispatchArgs& args);
  LowLatencySent combine(const LowLatencyCombineArgs& args);

  // The ranks that this rank has masked: [W], 1 if masked, else 0; all 0 without enable_shrink. On
  // a GPU it waits for this rank's calls.
  std::vector<std::int32_t> mask() const;
  // Requires enable_shrink. A rank cannot mask itself.
  void set_mask(int rank, bool masked);

  const LowLatencyConfig& config() const;
  int rank() const;
  int world_size() const;
  Backend backend() const;
  // The bytes that this rank has allocated.
  std::int64_t bytes() const;
  // Leaves the world. Idempotent; never waits for other ranks.
  void close() noexcept;

 private:
  LowLatencyBackend& open(const char* operation) const;
  std::unique_ptr<LowLatencyBackend> backend_;
  LowLatencyConfig config_;
  int rank_ = 0, world_size_ = 1;
  Backend which_ = Backend::cpu;
};

}  // namespace winnow::expert_parallel
