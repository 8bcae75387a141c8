// The routing of a dispatch, for the combine that returns its rows and for a dispatch that repeats
// it.
#pragma once

#include <cstdint>
#include <memory>

#include "winnow/core/export.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/config.h"

namespace winnow::expert_parallel {

// Everything that combine() and a cached dispatch() need: a snapshot of the routing, so that the
// caller may overwrite its tensors, and the arena rows of combine_buffer(). dispatch() creates
// it, the caller owns it, and it never changes. Descriptors may be used and destroyed in any order
// and by any thread. A descriptor may outlive its layer's close(): its rows and fields stay valid,
// but calls that take it fail. The views below live as long as the descriptor and are dense tensors
// on the layer's device; on a GPU they are filled in the order of the dispatch's stream.
//
// W ranks, L per node, NN = W / L nodes, T = max_tokens, K = topk, E experts, R = rows(). "Rail
// source j" is the rank of node j with this rank's local index: rank j * L + local. This rank
// forwards the tokens of its rail sources inside this node, in both directions.
//
// Names and layouts: EPAllToAllLayoutDesc of Triton-distributed.
class WINNOW_EXPORT Descriptor {
 public:
  // A descriptor without a dispatch: it has no rows, and every layer refuses it. A rank that
  // rejects a combine() (CombineArgs::refusal) and has no other descriptor passes this one.
  Descriptor();
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  // R: rows of the output on this rank, including alignment padding; worst_case_rows if given.
  std::int64_t rows() const;
  // The rows that the routing needs. More than rows() means that worst_case_rows was too small and
  // rows were dropped, which a later call reports. -1 on a GPU with worst_case_rows, since the host
  // does not wait for the count.
  std::int64_t wanted_rows() const;
  // i64 [W]: wanted_rows() of every rank, on the layer's device in every mode.
  ConstTensorView wanted_rows_per_rank() const;
  RowOrder order() const;
  std::int64_t expert_alignment() const;
  std::int64_t worst_case_rows() const;  // 0: none was given
  bool has_weights() const;              // weights were dispatched: combine may be weighted

  // n: tokens that this rank dispatched.
  std::int64_t num_dispatch_token_cur_rank() const;
  // i32 [W]: n of every rank.
  ConstTensorView num_input_tokens_per_rank() const;

  // i32 [W + 1], absent in expert-major order: the first row of each source rank in the output
  // here, and then the row after the last one; at most worst_case_rows.
  ConstTensorView source_begins() const;

  // i32 [NN, 2, T], absent on one node. The runs of consecutive tokens that rail source j sent to
  // this node: run i is [first, last) = ([j, 0, i], [j, 1, i]). Runs end at multiples of 64; those
  // that begin in the 64 tokens from t on are stored from slot t on; -1 in every other slot.
  ConstTensorView send_reqs_recv() const;

  // i32 [NN, T, K]: the expert indices of rail source j as they were given; -1 beyond its n tokens.
  ConstTensorView topk_indices() const;

  // i32 [NN, T, K]: the row of pair (t, k) of rail source j in the output of the expert's rank; -1
  // where that rank is not on this node, for dropped pairs and beyond n.
  ConstTensorView token_dst_scatter_idx() const;

  // i64 [R]: for each row of the output here the row of the first pair (lowest k) of the same token
  // here, which is the row itself for a first one; -1 for padding.
  ConstTensorView skipped_token_mapping_indices() const;

  // i64 [R, K]: for the first row of a token, [r, k] is the row of pair k of that token if its
  // expert lives here, else -1. All -1 for other rows.
  ConstTensorView skipped_token_topk_mapping_indices() const;

  // i32 [E/W]: pairs of each local expert, without padding; the true counts in worst-case mode too.
  ConstTensorView expert_counts() const;
  // i32 [E/W + 1]: the first row of each local expert, including padding. In token-major order the
  // exclusive sums of expert_counts, for a caller that gathers its own rows. With worst_case_rows
  // the offsets may exceed rows() after an overflow; callers must clamp to rows().
  ConstTensorView expert_offsets() const;
  // The same two on the host; absent on a GPU with worst_case_rows.
  ConstTensorView host_expert_counts() const;
  ConstTensorView host_expert_offsets() const;

  struct State;  // internal
  explicit Descriptor(std::unique_ptr<State> state);
  const State& state() const { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

}  // namespace winnow::expert_parallel
