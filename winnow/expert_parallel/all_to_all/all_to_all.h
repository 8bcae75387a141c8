// The expert-parallel all-to-all: tokens travel to the ranks of their experts and back.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "winnow/core/device.h"
#include "winnow/core/dtype.h"
#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/layer/descriptor.h"
#include "winnow/expert_parallel/routing/topology.h"

namespace winnow::expert_parallel {

class Transport;
class Store;

// The fixed sizes of a layer. Every rank must give the same values; they are compared when the
// layer is made. W is the transport's world size, rank r lives on node r / local_world_size, expert
// x on rank x / (experts / W). Largest values: max_tokens (2^31 - 1) / 32, hidden 2^24; on a GPU
// W * max_tokens 2^31 - 1 and local_world_size 72.
struct Config {
  std::int64_t max_tokens = 0;        // T: most tokens that one rank dispatches; 1 or more
  std::int64_t hidden = 0;            // H: elements of a row; H * size of dtype a multiple of 16
  int topk = 0;                       // K: experts per token, 1 to 32
  int experts = 0;                    // E: a multiple of W
  DType dtype = DType::bf16;          // of rows: bf16, f16 or f32; dispatch takes f8_e4m3 too
  DType weight_dtype = DType::f32;    // of routing weights: f32, bf16 or f16
  int local_world_size = 0;           // L: ranks per node, a divisor of W; 0: all, one node
  bool enable_local_combine = false;  // see combine()
  int sm_count = 20;                  // SMs that a GPU layer uses at most; else only compared
  // Rows of a dispatch, with its combine_buffer(), for which the arena has room at first; 0: as
  // many as fill 64 MiB, at most 2 * max_tokens * topk.
  std::int64_t arena_rows = 0;
  std::chrono::nanoseconds timeout{0};  // of every wait; 0: default_timeout() of deadline.h
  Device device{};  // where tensors and arena are: the CPU, or a GPU, its index each rank's own
};

// Arguments of dispatch(). n, 0 to T, is this rank's own.
struct DispatchArgs {
  ConstTensorView input{};  // [n, H], the layer's dtype; or f8_e4m3 with scales, H a multiple of 16
  ConstTensorView expert_indices{};  // [n, K] i32
  ConstTensorView weights{};         // optional [n, K], the layer's weight_dtype
  ConstTensorView scales{};  // [n, ceil(H / 128)] f32 with f8_e4m3, one for 128 columns: carried,
                             // not applied; absent otherwise
  ConstTensorView scatter_indices{};  // optional [n, K] or [sum of n, K] i32: the caller's own rows
  RowOrder order = RowOrder::expert_major;
  std::int64_t expert_alignment = 1;  // expert-major: rows of each expert are padded to a multiple
  std::int64_t worst_case_rows = 0;  // 0: the output has as many rows as arrive; else exactly these
  bool copy_out = false;             // the output in memory of its own, not in the arena
  TensorView out{};                  // optional [R or more, H] of input's dtype: the output's place
  std::shared_ptr<const Descriptor> cached{};  // repeat the routing of this descriptor
  Stream stream{};                             // of the layer's GPU; every rank its own
  // Not null: why this rank cannot take part, whatever the rest. Refused on all ranks.
  const Error* refusal = nullptr;
};

// What dispatch() returns. S = ceil(H / 128), e = E / W.
struct Dispatched {
  Tensor output;      // [R, H] of input's dtype; empty where `out` is given
  Tensor weights;     // expert-major [R], token-major [R, K], weight_dtype; empty without weights
  Tensor scales;      // [R, S] f32; empty without scales
  Tensor expert_ids;  // token-major: [R, K] i32, local expert 0 to e - 1 of each pair, -1 if it
                      // lives elsewhere or was dropped; empty in expert-major order
  std::shared_ptr<const Descriptor> descriptor;
};

// Arguments of combine().
struct CombineArgs {
  ConstTensorView expert_output{};  // [R, H], the layer's dtype
  ConstTensorView bias{};           // optional [n, H], the layer's dtype
  bool weighted = false;            // multiply each row by the weight sent at dispatch
  TensorView out{};                 // optional [n, H], the layer's dtype: where the sums go
  Stream stream{};                  // of the layer's GPU
  const Error* refusal = nullptr;   // as in DispatchArgs
};

// One rank of the layer. Every rank makes its own, and all ranks make the same calls in the same
// order: constructor, dispatch(), combine() and barrier() are collective. A rank may be a thread or
// a process, as its transport says. Calls of one layer must not overlap; different layers, also on
// one transport, are independent.
//
// On the CPU a call runs on the calling thread and returns when its work is done; no stream is
// involved. On a GPU a call is queued on `stream` and returns; the host waits only in a dispatch
// that counts, or that finds no room in the arena as it is known. Calls on different streams are
// put in order, launches of recorded graphs are not. Ranks that share a GPU may not use the default
// stream: it is an error on that rank, while the others wait for it. A call takes up to sm_count
// SMs and waits there for the other ranks, so calls of several layers that may run at the same time
// must fit a GPU together. Memory that a tensor or descriptor gives back is used by later calls:
// what other streams do with it must be done by then.
//
// Tensors: inputs are read until the call's work is done: on a GPU they must stay, unchanged, until
// the stream has come past it. Every tensor needs contiguous rows (stride 1 in the last dimension),
// the stride between rows is free and its elements are naturally aligned; `out` and `expert_output`
// of different ranks must not share memory.
//
// Errors are winnow::Error whose operation is "expert_parallel::AllToAll" (constructor),
// "expert_parallel::dispatch", "expert_parallel::combine", "expert_parallel::combine_buffer" or
// "expert_parallel::barrier":
// - Refusals (invalid_argument, resource). What a rank finds wrong with its own arguments it tells
//   the others, and every rank throws the same text: "expert_parallel::dispatch: rank 1: input:
//   want [n, 64], got ...", for the lowest such rank. So it is with what the caller finds wrong
//   and gives as `refusal`, instead of staying away from a call in which the others wait. A bad
//   expert index reads "rank 1: expert_indices: want -1 to 8, got 12 for token 3" (8 = E). Options
//   that differ read "expert_alignment differs: 1 on rank 0, 16 on rank 2". No row has moved then,
//   and the next call works.
// - timeout: a wait reached its deadline or a peer is known to be gone. The text names operation,
//   rank, what was waited for and the peer; every rank that is still alive gets it. The layer
//   is broken: later calls throw the same at once, close() returns. A new layer can be made.
// - resource, besides, and then the layer is broken on every rank: one has no memory for the rest
//   of a call that the others are in: "rank 1: memory for the call could not be had".
// - unsupported (constructor): config.device cannot be used, with the reason; on that rank, while
//   the others wait for it.
// - internal: CUDA has failed; the layer is broken.
// - "the layer is closed" (invalid_argument): a call after close(), on this rank alone.
// On a GPU a combine and a dispatch whose host does not wait cannot throw what other ranks or the
// kernels find. The first later call on the layer that sees it throws it, after that call has been
// queued as well; that may be another one on each rank. The rank whose own arguments were wrong
// throws at once. What the failed call returned is unspecified. To hear of a failure at a known
// place, synchronise the stream and call barrier().
class WINNOW_EXPORT AllToAll {
 public:
  // Joins the other ranks: compares `config` through `store` within the timeout and allocates the
  // control memory and the arena. The transport is shared for the layer's life, the store used
  // during this call. Errors, on every rank: a field in which ranks differ (names it, the values
  // and their ranks), a size that the comments of Config exclude, a rank that does not arrive,
  // memory.
  AllToAll(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
           const Config& config);
  // Closes. Never throws.
  ~AllToAll();
  AllToAll(const AllToAll&) = delete;
  AllToAll& operator=(const AllToAll&) = delete;

  // Carries every token to the ranks of its experts.
  //
  // A pair (t, k) with expert index E or -1 is dropped. One token may name an expert twice: two
  // pairs, two rows. R rows arrive here:
  // - expert_major: one per kept pair whose expert lives here, by local expert, then source rank,
  //   token and k. With expert_alignment a each expert's rows are followed by zero rows up to a
  //   multiple of a; their weights and scales are 0.
  // - token_major: one per token with an expert here, by source rank, then token; expert_ids and
  //   weights [R, K] say which (0 is the weight of pairs that are not here). expert_alignment is 1.
  // Rows, weights and scales are copied bit for bit.
  //
  // scatter_indices (expert_major with expert_alignment 1 and without worst_case_rows only): the
  // row of each pair as a position in the concatenation of all ranks' outputs; entries of dropped
  // pairs are ignored. The whole table in rank order or this rank's part, told apart by the number
  // of rows. Each kept pair must name a row of its expert's rank and no row may be named twice;
  // else every rank refuses: "rank 0: scatter_indices: want 6 to 9, got 12 for token 3, k 1" or
  // "rank 0: scatter_indices: want every row once, got row 7 again for token 3, k 1".
  //
  // worst_case_rows w: the output has w rows. Rows from w on are dropped and rows from the true
  // count on are unspecified (their weights 0, expert_ids -1). Dropped rows, and expert indices out
  // of range, whose pairs are dropped, do not fail the call. A later dispatch(), combine() or
  // barrier() throws, on every rank: "dispatch: rank 2: worst_case_rows: want 9 or more, got 6"
  // (the operation is that of the call that throws). On the CPU that is the next one, instead of
  // running; on a GPU see the class. The call after it works.
  //
  // cached: the routing of the descriptor: same n; expert_indices and scatter_indices are absent,
  // and order, expert_alignment and worst_case_rows as they were, or left at their defaults. input,
  // weights and scales are new; the result's descriptor is new and shares the routing. Every rank
  // must give the descriptor of the same dispatch.
  //
  // Ownership: output, weights, scales and expert_ids borrow the arena, whose rows are reused when
  // the tensors are gone; they may outlive the layer. With copy_out they own their memory. The
  // arena grows by itself, for all ranks at once, and nothing is dropped for lack of room.
  //
  // out: the rows go to its first R rows, what lies behind them is not touched, and for all the
  // rest the call is one with copy_out: one rank may give `out` and another copy_out. With fewer
  // than R rows it is refused, on every rank and before a row has moved, also where only the counts
  // of all ranks tell R: "out: want 9 rows or more on rank 1, got 6".
  //
  // Refused besides: n > T, wrong shapes or dtypes, options that differ between ranks, more than
  // 2^31 - 1 rows on one rank (token-major (2^31 - 1) / K).
  Dispatched dispatch(const DispatchArgs& args);

  // Sums the experts' rows of each token of this rank: out[t] = sum over kept k of row(t, k), times
  // weight(t, k) if weighted, plus bias[t]. Returns [n, H] in memory of its own, or an empty tensor
  // if `out` is given. A token without kept pairs gets zeros, plus bias. In token-major order
  // `expert_output` has one row per (token, rank), already summed over that rank's experts;
  // `weighted` is refused then.
  //
  // Arithmetic: f32, every sum begun at +0, products rounded before they are added. Per rank over k
  // ascending, per node over ranks ascending, over nodes ascending, then the bias, and one rounding
  // to the dtype. Partial sums are rounded to the dtype only where they cross a wire: the sum of
  // another node; and under enable_local_combine the sum of another rank than the one of that node
  // that has this rank's local index. The result does not depend on timing.
  //
  // expert_output that already lies in this rank's arena (combine_buffer(), or a borrowed output of
  // the layer's dtype overwritten in place), with dense rows, is read where it is; any other is
  // copied first. On a GPU the ranks of a node may push to each other: expert-major sums of rows,
  // with enable_local_combine; token-major the rows, from an sm_count of 20 on (24 with 2 ranks a
  // node), with enable_local_combine, or where there are several GPUs, W * max_tokens rows are
  // 1 GiB or less, and (L - 1) * n rows 24 MiB or more, n the most of any rank (with
  // worst_case_rows: max_tokens). A layer that may push has W * max_tokens rows of memory more, and
  // what it pushes may lie anywhere, aligned to 16 bytes. An `out` that overlaps expert_output or
  // combine_buffer() is refused, since other ranks read there; so are a bias that overlaps `out`
  // without being it, and rows with gaps in combine_buffer().
  Tensor combine(const CombineArgs& args, const Descriptor& descriptor);

  // [R, H] of the layer's dtype in the arena, for the experts to write their outputs to. Belongs to
  // the descriptor and lasts as long; contents unspecified. Not collective. With copy_out it is the
  // memory in which the rows arrived. A combine with rows that lie elsewhere may copy them here.
  TensorView combine_buffer(const Descriptor& descriptor);

  // On the CPU returns when every rank (of this node) has called it. On a GPU returns at once, and
  // what is queued behind it on `stream` waits for them.
  void barrier(bool intra_node_only = false, Stream stream = {});

  // Leaves the layer. Idempotent, never throws, waits for nobody: memory that peers or borrowed
  // tensors still use, or work that is still queued, stays until the last of them lets go of it.
  void close() noexcept;

  // `config` with its defaults resolved (local_world_size, timeout, arena_rows).
  const Config& config() const;
  const Topology& topology() const;
  int rank() const;
  // Bytes of this rank's arena now, free or not.
  std::int64_t arena_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::expert_parallel
