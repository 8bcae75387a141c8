// The expert-parallel all-to-all: sends tokens to the ranks of their experts and returns the
// results.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/combine/combine.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/dispatch/dispatch.h"
#include "winnow/expert_parallel/layer/descriptor.h"
#include "winnow/expert_parallel/routing/topology.h"

namespace winnow::expert_parallel {

class AllToAllBackend;
class Store;
class Transport;

// One rank of the layer. Every rank creates its own object, and all ranks make the same calls in
// the same order: the constructor, dispatch(), combine() and barrier() are collective. The
// transport determines whether a rank is a thread or a process. Calls of one layer must not
// overlap; different layers, also on one transport, are independent.
//
// On the CPU a call runs on the calling thread and returns when its work is done; no stream is
// involved. On a GPU a call is queued on `stream` and returns; the host waits only in a dispatch
// that counts its rows, or for which the arena may have no room. The layer orders its calls on
// different streams, but not launches of recorded graphs. Ranks that share a GPU may not use the
// default stream: it is an error on that rank, while the others wait for it. A call occupies up to
// sm_count SMs while it waits for the other ranks, so calls of several layers that may run at the
// same time must fit a GPU together. Freed arena memory is reused by later calls; finish work on
// other streams first.
//
// Tensors: the call reads its inputs until its work is done, so on a GPU they must stay unchanged
// until the stream has completed that work. Every tensor has contiguous rows (stride 1 in the last
// dimension), an arbitrary stride between rows, and naturally aligned elements. `out` and
// `expert_output` of different ranks must not share memory.
//
// Errors are winnow::Error whose operation is "expert_parallel::AllToAll" (constructor),
// "expert_parallel::dispatch", "expert_parallel::combine", "expert_parallel::combine_buffer" or
// "expert_parallel::barrier":
// - Refusals (invalid_argument, resource). A rank reports an error in its own arguments to the
//   others, and every rank throws the same text: "expert_parallel::dispatch: rank 1: input: want
//   [n, 64], got ...", for the lowest such rank. A caller that finds an error itself passes it as
//   `refusal` instead of omitting a call in which the other ranks wait. An invalid expert index
//   reads "rank 1: expert_indices: want -1 to 8, got 12 for token 3" (8 = E). Options
//   that differ read "expert_alignment differs: 1 on rank 0, 16 on rank 2". No row has moved, and
//   the next call works.
// - timeout: a wait reached its deadline or a peer is known to be gone. The text names the
//   operation, the rank, the awaited event and the peer; every rank that is alive throws it. The
//   layer is then broken: later calls throw the same error at once, and close() returns. A new
//   layer can be created.
// - resource: if a rank runs out of memory in the middle of a call, the layer is broken on every
//   rank: "rank 1: out of memory in the call".
// - unsupported (constructor): no backend supports config.device, or the forced backend does not,
//   with the reason; on that rank, while the others wait for it.
// - internal: CUDA has failed; the layer is broken.
// - "the layer is closed" (invalid_argument): a call after close(), on this rank alone.
// On a GPU a combine, and a dispatch whose host does not wait, cannot throw the errors of other
// ranks or of the kernels. Asynchronous errors surface at the next call that observes them,
// possibly a different call on each rank, after that call has been queued as well. Errors in a
// rank's own arguments are thrown at once. The results of the failed call are unspecified. To
// observe errors at a known place, synchronise the stream and call barrier().
class WINNOW_EXPORT AllToAll {
 public:
  // Joins the other ranks: compares `config` through `store` within the timeout and allocates the
  // control memory and the arena. The layer keeps the transport for its life and uses the store
  // only during this call. Errors, on every rank: a field in which ranks differ (with the values
  // and their ranks), a size that the comments of Config exclude, a rank that does not arrive, a
  // failed allocation.
  AllToAll(std::shared_ptr<Transport> transport, std::shared_ptr<Store> store,
           const Config& config);
  // Closes. Never throws.
  ~AllToAll();
  AllToAll(const AllToAll&) = delete;
  AllToAll& operator=(const AllToAll&) = delete;

  // Sends every token to the ranks of its experts.
  //
  // A pair (t, k) with expert index E or -1 is dropped. If a token names an expert twice,
  // both pairs count. R rows arrive at this rank:
  // - expert_major: one per kept pair whose expert lives here, by local expert, then source rank,
  //   token and k. With expert_alignment a each expert's rows are followed by zero rows up to a
  //   multiple of a; their weights and scales are 0.
  // - token_major: one per token with an expert here, by source rank, then token; expert_ids and
  //   weights [R, K] identify its pairs (pairs on other ranks have weight 0). expert_alignment is
  //   1.
  // Rows, weights and scales are copied bit for bit.
  //
  // scatter_indices (expert_major with expert_alignment 1 and without worst_case_rows only): the
  // row of each pair as a position in the concatenation of all ranks' outputs; entries of dropped
  // pairs are ignored. Either the whole table in rank order or this rank's part; the number of rows
  // distinguishes them. Each kept pair must name a row of its expert's rank and no row may be named
  // twice; else every rank refuses: "rank 0: scatter_indices: want 6 to 9, got 12 for token 3, k 1"
  // or "rank 0: scatter_indices: want every row once, got row 7 again for token 3, k 1".
  //
  // worst_case_rows w: the output has w rows. Rows from w on are dropped and rows from the true
  // count on are unspecified (their weights 0, expert_ids -1). Dropped rows, and expert indices out
  // of range, whose pairs are dropped, do not fail the call. A later dispatch(), combine() or
  // barrier() throws, on every rank: "dispatch: rank 2: worst_case_rows: want 9 or more, got 6"
  // (the operation is that of the call that throws). On the CPU that is the next one, instead of
  // running; on a GPU see the class. The call after it works.
  //
  // cached: repeats the routing of the descriptor, with the same n. expert_indices and
  // scatter_indices are absent; order, expert_alignment and worst_case_rows are as before, or left
  // at their defaults. input, weights and scales are new. The result has a new descriptor, which
  // shares the routing. Every rank must pass the descriptor of the same dispatch.
  //
  // Ownership: output, weights, scales and expert_ids borrow the arena, whose rows are reused when
  // the tensors are destroyed; they may outlive the layer. With copy_out they own their memory. The
  // arena grows automatically, on all ranks at once; no row is dropped for lack of memory.
  //
  // out: its first R rows receive the output, and the rows after them are not written. Otherwise
  // the call is one with copy_out; one rank may pass `out` and another copy_out. If it has fewer
  // than R rows, every rank refuses the call before a row has moved, also if R is known only from
  // the counts of all ranks: "out: want 9 rows or more on rank 1, got 6". An `out` that overlaps
  // another tensor of this rank's call is refused too.
  //
  // Also refused: n > T, wrong shapes or dtypes, options that differ between ranks, more than
  // 2^31 - 1 rows on one rank (token-major (2^31 - 1) / K).
  Dispatched dispatch(const DispatchArgs& args);

  // Sums the experts' rows of each token of this rank: out[t] = sum over kept k of row(t, k), times
  // weight(t, k) if weighted, plus bias[t], plus second_bias[t]. Returns [n, H] that owns its
  // memory, or an empty tensor if `out` is given. A token without kept pairs gets zeros, plus bias.
  // In token-major order `expert_output` has one row per (token, rank), already summed over that
  // rank's experts; `weighted` and `weights` are refused then.
  //
  // weights: rows are multiplied by these where they are added up, on this rank or, on another
  // node, on the rank of its local index; enable_local_combine has no effect then.
  //
  // pair_values: pair_values_out[t, k] is the value of the row of pair (t, k); it is 0 for a
  // dropped pair and for a pair whose row did not fit into worst_case_rows. Without expert_output
  // only the values are sent, and the result is empty.
  //
  // Arithmetic: sums are accumulated in f32 from +0, and products are rounded before they are
  // added. The order is k ascending within a rank, ranks ascending within a node, nodes ascending,
  // then the biases; the result is rounded to the dtype once. Partial sums are rounded to the dtype
  // only when they are sent: the sum of another node, and with enable_local_combine the sum of each
  // rank other than the one of that node that has this rank's local index. The result does not
  // depend on timing.
  //
  // expert_output that already lies in this rank's arena (combine_buffer(), or a borrowed output of
  // the layer's dtype overwritten in place), with dense rows, is read in place; any other is
  // copied first. On a GPU the ranks of a node may push rows to each other: in expert-major order
  // sums of rows, with enable_local_combine; in token-major order the rows themselves, if sm_count
  // is 20 or more (24 with 2 ranks per node) and either enable_local_combine is set or, on several
  // GPUs, W * max_tokens rows take up to 1 GiB and (L - 1) * n rows 24 MiB or more, where n is the
  // largest of any rank (max_tokens with worst_case_rows). Such a layer has memory for W *
  // max_tokens more rows, and pushes rows from any address that is a multiple of 16. An `out` that
  // overlaps expert_output or combine_buffer() is refused, since other ranks read there; so are a
  // bias that overlaps `out` without being it, and rows with gaps in combine_buffer().
  Tensor combine(const CombineArgs& args, const Descriptor& descriptor);

  // [R, H] of the layer's dtype in the arena, to which the experts write their outputs. It belongs
  // to the descriptor and lives as long; its contents are unspecified. Not collective. With
  // copy_out it is the memory in which the rows arrived. A combine of rows in other memory may copy
  // them here.
  TensorView combine_buffer(const Descriptor& descriptor);

  // On the CPU the call returns when every rank (of this node) has called it. On a GPU it returns
  // at once, and later work on `stream` waits for the other ranks.
  void barrier(bool intra_node_only = false, Stream stream = {});

  // Leaves the layer. Idempotent; never throws and never waits. Memory that peers, borrowed tensors
  // or queued work still use stays allocated until the last of them releases it.
  void close() noexcept;

  // `config` with its defaults resolved (local_world_size, timeout, arena_rows).
  const Config& config() const;
  const Topology& topology() const;
  int rank() const;
  Backend backend() const;  // the backend that runs the calls
  // The current size of this rank's arena in bytes, used or free.
  std::int64_t arena_bytes() const;

 private:
  AllToAllBackend& open(std::string_view operation) const;

  Config config_;
  Topology topology_;
  int rank_ = 0;
  Backend which_ = Backend::cpu;
  std::unique_ptr<AllToAllBackend> backend_;  // null: closed
};

}  // namespace winnow::expert_parallel
