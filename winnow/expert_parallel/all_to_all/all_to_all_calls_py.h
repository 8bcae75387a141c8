// The calls of expert_parallel::AllToAll from Python, which all_to_all_py.cc binds.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/all_to_all/collective_py.h"
#include "winnow/expert_parallel/layer/descriptor_py.h"
#include "winnow/python/call.h"

namespace winnow::python {

inline constexpr Declared kDispatchDeclared(
    "def dispatch(self, input: T, expert_indices: T | None = None, *, "
    "weights: T | None = None, scales: T | None = None, "
    "scatter_indices: T | None = None, "
    "order: typing.Literal['expert_major', 'token_major'] = 'expert_major', "
    "expert_alignment: int = 1, worst_case_rows: int = 0, copy_out: bool = False, "
    "cached: Descriptor | None = None, out: T | None = None, "
    "sm_count: int = 0, stream: Stream = None) -> Dispatched[T]");
inline constexpr Declared kCombineDeclared(
    "def combine(self, expert_output: T | None, descriptor: Descriptor, *, "
    "bias: T | None = None, second_bias: T | None = None, weighted: bool = False, "
    "weights: T | None = None, pair_values: T | None = None, add_values: bool = False, "
    "pair_columns: int = 0, out: T | None = None, sm_count: int = 0, stream: Stream = None) "
    "-> tuple[T | None, T] if pair_values else T");

namespace ep = expert_parallel;

// What dispatch() returns.
struct BoundDispatched {
  nb::any output, weights, scales, expert_ids;
  nb::object descriptor;

  std::array<nb::object*, 5> members() {
    return {&output, &weights, &scales, &expert_ids, &descriptor};
  }
};

struct BoundAllToAll {
  BoundAllToAll(std::shared_ptr<ep::Transport> transport, std::shared_ptr<ep::Store> store,
                const ep::Config& config)
      : layer(std::move(transport), std::move(store), config) {}

  ep::AllToAll layer;
  OneCall one_call;
  Number number;
  // A CUDA graph uses the memory of the calls that it has recorded whenever it is launched:
  // nothing else may use it before the layer is closed. (What combine() makes is memory of the
  // caller's framework, which keeps it for the graph as all that it allocates meanwhile.)
  std::vector<nb::object> recorded;
};

// Each takes its arguments as they come from Python. What this rank finds wrong with them, it has
// all ranks refuse.
void make_layer(nb::pointer_and_handle<BoundAllToAll> self,
                std::shared_ptr<ep::Transport> transport, nb::handle store, nb::handle max_tokens,
                nb::handle hidden, nb::handle topk, nb::handle experts, nb::handle dtype,
                nb::handle weight_dtype, nb::handle local_world_size,
                nb::handle enable_local_combine, nb::handle sm_count, nb::handle arena_rows,
                nb::handle timeout, nb::handle device);
BoundDispatched dispatch(BoundAllToAll& self, nb::handle input, nb::handle expert_indices,
                         const nb::args& extra, nb::handle weights, nb::handle scales,
                         nb::handle scatter_indices, nb::handle order, nb::handle expert_alignment,
                         nb::handle worst_case_rows, nb::handle copy_out, nb::handle cached,
                         nb::handle out, nb::handle sm_count, nb::handle stream,
                         const nb::kwargs& unknown);
// Take part in a call only to refuse it on all ranks.
void refuse_dispatch(BoundAllToAll& self, const std::string& text);
void refuse_combine(BoundAllToAll& self, const std::string& text);
nb::object combine(BoundAllToAll& self, nb::handle expert_output, nb::handle descriptor,
                   const nb::args& extra, nb::handle bias, nb::handle second_bias,
                   nb::handle weighted, nb::handle weights, nb::handle pair_values,
                   nb::handle add_values, nb::handle pair_columns, nb::object out,
                   nb::handle sm_count, nb::handle stream, const nb::kwargs& unknown);
nb::object combine_buffer(BoundAllToAll& self, const BoundDescriptor& descriptor);
void barrier(BoundAllToAll& self, nb::handle intra_node_only, nb::handle stream);
void close(BoundAllToAll& self);

}  // namespace winnow::python
