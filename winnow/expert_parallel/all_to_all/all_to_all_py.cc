// Python bindings of expert_parallel::AllToAll.
#include <chrono>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "winnow/expert_parallel/all_to_all/all_to_all_calls_py.h"
#include "winnow/expert_parallel/transport/transport.h"
#include "winnow/python/bindings.h"
#include "winnow/python/framework.h"

namespace winnow::python {
namespace {

constexpr const char* kClassDoc =
    R"(One rank of an expert-parallel layer: sends tokens to their experts and returns the results.

Every rank creates its own object, and all ranks make the same calls in the same order: the
constructor, dispatch(), combine() and barrier() are collective. The transport determines whether a
rank is a thread or a process. W is the transport's world size, rank r lives on node r /
local_world_size, expert x on rank x / (experts / W). The interpreter lock is released while the
library works or waits. The object is a context manager, which closes the layer.

On a GPU (compute capability 9.0) a call is queued on its stream and returns; only dispatch() waits,
for the number of rows, unless worst_case_rows or cached make it known. Errors of other ranks or of
the kernels are then raised by a later call; combine() says how to observe them at a known place.
The memory of results is reused in the order of the layer's calls. Calls that a CUDA graph has
captured keep their memory until the layer is closed; do not launch the graph after that. Ranks that
are threads on one GPU, at most 8, need a stream each that is not the default one, and
CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment.

Args, the same on every rank except for the first two and the device's index:
    transport: one rank of a world: InProcessWorld.transport(), create_shared_memory() or, of GPUs,
        create_nvshmem().
    store: where the ranks meet: as in create_shared_memory(), or the store of an InProcessWorld.
    max_tokens: T, the largest number of tokens that one rank dispatches, 1 or more.
    hidden: H, elements of a row, which is a multiple of 16 bytes.
    topk: K, experts per token, 1 to 32.
    experts: E, a multiple of W.
    dtype: of rows: "bfloat16", "float16", "float32", or a dtype of numpy or torch.
    weight_dtype: of routing weights, the same.
    local_world_size: L, ranks per node, a divisor of W; 0: all, one node.
    enable_local_combine: every rank sums its rows of a token, and rounds, before it sends them.
    sm_count: the largest number of SMs that a GPU layer uses; without effect on the CPU. From 20 on
        a layer on several GPUs may allocate W * T more rows, up to 1 GiB: combine then pushes rows.
    arena_rows: the initial rows of the arena, which grows automatically; 0: a default.
    timeout: seconds of every wait; None: default_timeout().
    device: where tensors are: "cpu", "cuda" (torch's current one), "cuda:1", a device of torch.

Raises:
    ValueError: a size is invalid or differs between ranks. Every rank raises it. If an argument has
        the wrong type, only its own rank describes it; the others report a size that differs.
    winnow.Error: a timeout that names the ranks that did not arrive; an allocation failed; the GPU
        or the transport does not support the layer.)";

constexpr const char* kDispatchDoc = R"(Sends every token to the ranks of its experts.

Pairs (t, k) with expert index -1 or E are dropped. R rows arrive here: expert-major one per kept
pair whose expert lives here, by local expert, source rank, token and k; token-major one per token
with an expert here, by source rank, then token. Rows, weights and scales are copied bit for bit.

Args:
    input: [n, H], the layer's dtype, n from 0 to T; or float8_e4m3fn with scales.
    expert_indices: [n, K], int32 or int64; None with cached.
    weights: [n, K], the layer's weight_dtype.
    scales: with float8_e4m3fn, [n, S] of any dtype and strides, usually float32 [n, ceil(H / 128)]:
        they are sent as bytes with the rows, a multiple of 4 bytes and at most 4 * ceil(H / 32)
        per row.
    scatter_indices: [n, K] or [sum of n over ranks, K], int32: the row of each pair as a position
        in the concatenation of all ranks' outputs; entries of dropped pairs are ignored.
    order: "expert_major" or "token_major".
    expert_alignment: each expert's rows are followed by zero rows up to a multiple.
    worst_case_rows: the number of rows of the output. Rows from the true count on are unspecified;
        rows that do not fit are dropped, which a later call reports. 0: as many as arrive. With it,
        or with cached, a CUDA graph can capture the call if arena_rows is large enough.
    copy_out: the results own their memory, which the framework of input allocates. Otherwise they
        borrow the arena, whose rows are reused when the tensors are freed; they may outlive the
        layer.
    cached: the descriptor of an earlier dispatch, whose routing is repeated.
    out: [R or more, H], input's dtype, receives the output; the other results are as with copy_out.
        If it has fewer than R rows or overlaps an input, it is refused before a row has moved.
    sm_count: SMs of this call, at most the layer's, the same on every rank; 0: the layer's.
    stream: for CUDA tensors.

Returns:
    An object with output [R, H], or the first R rows of out; weights [R], or [R, K] in token-major
    order, or None; scales [R, S] or None; expert_ids [R, K], int32, the local expert of
    each pair or -1, in token-major order, else None; descriptor. Tensors are of the kind of input.

Raises:
    ValueError: an argument of some rank is not as described. Every rank raises it and names that
        rank; no row has moved, and the next call works.
    TypeError: an unknown keyword; the other ranks raise a ValueError.
    winnow.Error: a timeout, which names the rank that was waited for, or code "internal": CUDA has
        failed. The layer is broken then.
    On a GPU with worst_case_rows or cached, errors of other ranks or of the kernels are raised by a
    later call, as combine() says.)";

constexpr const char* kCombineDoc =
    R"(Sums the experts' rows of each token and returns the sums to its rank.

    out[t] = sum over kept k of row(t, k) [* weight(t, k)] [+ bias[t] [+ second_bias[t]]]

A token without kept pairs gets zeros, plus bias. In token-major order a row is the sum
over one rank's experts. Sums are accumulated in f32 over k, then ranks, then nodes. They are
rounded to the dtype at the end and when they are sent between nodes; with enable_local_combine also
when they are sent between ranks.

Args:
    expert_output: [R, H], the layer's dtype; None to send pair_values only. Rows in
        combine_buffer(), or in a borrowed output that was overwritten, are read in place; others
        are copied first.
    descriptor: of the dispatch: the Descriptor, not what dispatch() returned with it.
    bias, second_bias: [n, H], the layer's dtype, each added once.
    weighted: multiply by the weights sent at dispatch; not in token-major order.
    weights: [n, K], weight_dtype: multiply by these instead, where the rows are added up, without
        the roundings of enable_local_combine; not in token-major order.
    pair_values: [R], in token-major order [R, K], weight_dtype: one value per pair, which is
        returned to the token's rank bit for bit.
    add_values: in token-major order: the pair_values of all rows of a token are added instead.
    pair_columns: of the table of which pair_values are one of several parts: a number that all
        ranks must say, so that they make as many calls.
    out: [n, H], the layer's dtype, to write into; new, of expert_output's kind, if None. It shares
        no memory with expert_output, with combine_buffer(), or with bias unless it is bias.
    sm_count: as of dispatch().
    stream: for CUDA tensors.

Returns:
    out, [n, H]. With pair_values (out, or None without expert_output; the values [n, K], 0 for
    dropped pairs).

Raises:
    ValueError, TypeError, winnow.Error: as dispatch(). On a GPU the call returns when it is queued
        and raises errors in this rank's own arguments. Errors of other ranks or of the kernels,
        including timeouts, are raised by the first later call that observes them, after that call
        has been queued as well; it may be a different call on each rank. The results of the failed
        call are unspecified. To observe errors at a known place, synchronise the stream and call
        barrier().)";

constexpr const char* kBufferDoc = R"(Memory in the arena for the experts to write their outputs to.

[R, H] of the layer's dtype, of the kind of the dispatch's input; its contents are unspecified. It
belongs to the descriptor and keeps it alive. After a dispatch with copy_out it is the memory in
which the rows arrived. A combine of the descriptor with rows in other memory, also that of a
backward pass, copies them here. Not collective.

Raises:
    ValueError: another layer's descriptor, or the layer is closed.)";

constexpr const char* kBarrierDoc =
    R"(Returns when every rank, or every rank of this node, has called it.

On a GPU it returns at once, and later work on the stream waits for the other ranks.

Args:
    intra_node_only: the ranks of this node.
    stream: of a GPU layer.

Raises:
    winnow.Error: a timeout; on a GPU a later call raises it, as combine() says. On a GPU barrier()
        raises the errors that earlier calls have found by now; after the stream has been
        synchronised these are all of them.
    ValueError: the same for a refusal; an argument of the wrong type, after this rank has taken
        part in the barrier of all ranks.)";

void bind_layer(nb::module_& m) {
  using namespace nb::literals;
  const auto config = [](auto field) {
    return [field](const BoundAllToAll& self) { return self.layer.config().*field; };
  };
  nb::class_<BoundAllToAll> type(m, "AllToAll", kClassDoc, nb::dynamic_attr());
  define<
      "def __init__(self, transport: Transport, store: typing.Any, *, "
      "max_tokens: int, hidden: int, topk: int, experts: int, "
      "dtype: typing.Any = 'bfloat16', weight_dtype: typing.Any = 'float32', "
      "local_world_size: int = 0, enable_local_combine: bool = False, "
      "sm_count: int = 20, arena_rows: int = 0, timeout: float | None = None, "
      "device: typing.Any = 'cpu') -> None">(type, make_layer);
  define_collective<kDispatchDeclared>(type, dispatch, kDispatchDoc);
  type.def("_refuse_dispatch", refuse_dispatch, "text"_a)
      .def("_refuse_combine", refuse_combine, "text"_a);
  define_collective<kCombineDeclared>(type, combine, kCombineDoc);
  define<"def combine_buffer(self, descriptor: Descriptor) -> typing.Any">(type, combine_buffer,
                                                                           kBufferDoc);
  define<
      "def barrier(self, intra_node_only: bool = False, *, stream: Stream = None) "
      "-> None">(type, barrier, kBarrierDoc);
  type.def("close", close,
           "Leaves the layer. Idempotent; never waits. ValueError while another thread is in a "
           "call.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> AllToAll"))
      .def(
          "__exit__", [](BoundAllToAll& self, const nb::args&) { close(self); },
          nb::sig("def __exit__(self, *arguments: object) -> None"))
      .def_prop_ro("rank", [](const BoundAllToAll& self) { return self.layer.rank(); })
      .def_prop_ro("world_size",
                   [](const BoundAllToAll& self) { return self.layer.topology().world_size; })
      .def_prop_ro("max_tokens", config(&ep::Config::max_tokens))
      .def_prop_ro("hidden", config(&ep::Config::hidden))
      .def_prop_ro("topk", config(&ep::Config::topk))
      .def_prop_ro("experts", config(&ep::Config::experts))
      .def_prop_ro("local_world_size", config(&ep::Config::local_world_size))
      .def_prop_ro("enable_local_combine", config(&ep::Config::enable_local_combine))
      .def_prop_ro("sm_count", config(&ep::Config::sm_count))
      .def_prop_ro("arena_rows", config(&ep::Config::arena_rows))
      .def_prop_ro("dtype",
                   [](const BoundAllToAll& self) { return dtype_name(self.layer.config().dtype); })
      .def_prop_ro(
          "device", [](const BoundAllToAll& self) { return to_string(self.layer.config().device); },
          "\"cpu\" or \"cuda:0\".")
      .def_prop_ro(
          "weight_dtype",
          [](const BoundAllToAll& self) { return dtype_name(self.layer.config().weight_dtype); })
      .def_prop_ro(
          "timeout",
          [](const BoundAllToAll& self) {
            return std::chrono::duration<double>(self.layer.config().timeout).count();
          },
          "Seconds.")
      .def_prop_ro(
          "arena_bytes",
          [](BoundAllToAll& self) {
            const OneCall::Turn turn(self.one_call, "expert_parallel::arena_bytes");
            return self.layer.arena_bytes();
          },
          "Of this rank's arena now, free or not.");
}

}  // namespace

void bind_expert_parallel_all_to_all(nb::module_& m) {
  nb::class_<BoundDispatched> dispatched(m, "Dispatched", "The result of AllToAll.dispatch().",
                                         nb::type_slots(Collected<BoundDispatched>::kSlots),
                                         nb::is_generic(),
                                         nb::sig("class Dispatched(typing.Generic[T])"));
  define_member<&BoundDispatched::output>(dispatched, "[R, H], as input.");
  define_member<&BoundDispatched::weights>(
      dispatched, "[R], in token-major order [R, K], of weight_dtype; None without weights.",
      "T | None");
  define_member<&BoundDispatched::scales>(
      dispatched, "[R, S], of the dtype that was given; None without.", "T | None");
  define_member<&BoundDispatched::expert_ids>(
      dispatched,
      "[R, K], int32, in token-major order: the local expert of each pair, -1 if it lives\n"
      "elsewhere or was dropped; else None.",
      "T | None");
  define_member<&BoundDispatched::descriptor>(dispatched, "For combine().", "Descriptor");
  bind_layer(m);
  m.def("_numbered", Number::find, nb::arg("number"),
        nb::sig("def _numbered(number: int) -> typing.Any"));
}

}  // namespace winnow::python
