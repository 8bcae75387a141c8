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
    R"(One rank of an expert-parallel layer: carries tokens to their experts and back.

Every rank makes its own, and all ranks make the same calls in the same order: the constructor,
dispatch(), combine() and barrier() are collective. A rank is a thread or a process, as its
transport says. W is the transport's world size, rank r lives on node r / local_world_size, expert x
on rank x / (experts / W). The interpreter lock is released while the library works or waits. A
context manager: leaving it closes the layer.

On a GPU (compute capability 9.0) a call is queued on its stream and comes back, except that
dispatch() waits for the number of rows, unless worst_case_rows or cached tell it before. What other
ranks or the kernels find wrong in a call that came back, a later call raises: combine() says how to
hear of it at a known place. Memory of the results is used again in the order of the layer's calls.
What a CUDA graph has recorded of dispatch() and combine() keeps its memory until the layer is
closed or gone; do not launch the graph after that. Ranks that are threads on one GPU, at most 8,
need a stream each, which is not the default one, and CUDA_DEVICE_MAX_CONNECTIONS=32 in the
environment.

Args, the same on every rank but for the first two and the device's index:
    transport: one rank of a world: InProcessWorld.transport(), create_shared_memory() or, of GPUs,
        create_nvshmem().
    store: where the ranks meet: as in create_shared_memory(), or the store of an InProcessWorld.
    max_tokens: T, most tokens that one rank dispatches, 1 or more.
    hidden: H, elements of a row, which is a multiple of 16 bytes.
    topk: K, experts per token, 1 to 32.
    experts: E, a multiple of W.
    dtype: of rows: "bfloat16", "float16", "float32", or a dtype of numpy or torch.
    weight_dtype: of routing weights, the same.
    local_world_size: L, ranks per node, a divisor of W; 0: all, one node.
    enable_local_combine: sums cross once per rank, rounded there.
    sm_count: SMs that a GPU layer uses at most; on the CPU only compared. From 20 on a layer on
        several GPUs may take W * T rows of memory more, up to 1 GiB: combine then pushes rows.
    arena_rows: rows that the arena begins with; 0: chosen. It grows by itself.
    timeout: seconds of every wait; None: default_timeout().
    device: where tensors are: "cpu", "cuda" (torch's current one), "cuda:1", a device of torch.

Raises:
    ValueError: a size that is excluded, or in which ranks differ: on every rank. What is of another
        type only its own rank describes; the others hear of a size in which it differs.
    winnow.Error: timeout, naming the ranks that do not come; memory; a GPU or a transport that
        cannot do it.)";

constexpr const char* kDispatchDoc = R"(Carries every token to the ranks of its experts.

Pairs (t, k) with expert index -1 or E are dropped. R rows arrive here: expert-major one per kept
pair whose expert lives here, by local expert, source rank, token and k; token-major one per token
with an expert here, by source rank, then token. Rows, weights and scales are copied bit for bit.

Args:
    input: [n, H], the layer's dtype, n from 0 to T; or float8_e4m3fn with scales.
    expert_indices: [n, K], int32; None with cached.
    weights: [n, K], the layer's weight_dtype.
    scales: with float8_e4m3fn, [n, S] of any dtype and strides, usually float32 [n, ceil(H / 128)]:
        bytes that travel beside the rows, a multiple of 4 a row and at most 4 * ceil(H / 32).
    scatter_indices: [n, K] or [sum of n over ranks, K], int32: the row of each pair as a position
        in the concatenation of all ranks' outputs; entries of dropped pairs are ignored.
    order: "expert_major" or "token_major".
    expert_alignment: each expert's rows are followed by zero rows up to a multiple.
    worst_case_rows: the output has as many rows; rows from the true count on are unspecified, those
        beyond are dropped, which a later call reports. 0: as many as arrive. With it, or cached,
        a CUDA graph can record the call, if arena_rows were enough.
    copy_out: results in memory of their own, which the framework of input allocates. Otherwise they borrow the arena, whose rows are used
        again when the tensors are gone; they may outlive the layer.
    cached: the descriptor of an earlier dispatch, whose routing is repeated.
    out: [R or more, H], input's dtype, for the output; otherwise as copy_out. With fewer than R
        rows, or memory that an input shares, it is refused before a row has moved.
    sm_count: SMs of this call, at most the layer's, alike on every rank; 0: the layer's.
    stream: for CUDA tensors.

Returns:
    An object with output [R, H], or the first R rows of out; weights [R], or [R, K] in token-major
    order, or None; scales [R, S] or None; expert_ids [R, K], int32, the local expert of
    each pair or -1, in token-major order, else None; descriptor. Tensors are of the kind of input.

Raises:
    ValueError: arguments that are not as described, on any rank: on every rank, no row has moved,
        and the next call works. All name the rank at fault.
    TypeError: a keyword that there is not; a ValueError on the other ranks.
    winnow.Error: timeout, naming the rank that was waited for; the layer is broken then. So it is
        after code "internal": CUDA has failed.
    On a GPU with worst_case_rows or cached, what other ranks or the kernels find comes from a later
    call, as combine() says.)";

constexpr const char* kCombineDoc =
    R"(Sums the experts' rows of each token: the way back of a dispatch.

    out[t] = sum over kept k of row(t, k) [* weight(t, k)] [+ bias[t] [+ second_bias[t]]]

A token without kept pairs gets zeros, plus bias. In token-major order a row is what one rank's
experts give for a token in sum. Sums are in f32, over k, then ranks, then nodes, and rounded to the
dtype at the end, and where they cross between nodes; with enable_local_combine also between ranks.

Args:
    expert_output: [R, H], the layer's dtype; None with pair_values alone. Rows in combine_buffer(), or in a borrowed output that
        was overwritten, are read where they are; others are copied first.
    descriptor: of the dispatch: the Descriptor, not what dispatch() returned with it.
    bias, second_bias: [n, H], the layer's dtype, each added once.
    weighted: multiply by the weights sent at dispatch; not in token-major order.
    weights: [n, K], weight_dtype: multiply by these instead, where the rows are added up, without
        the roundings of enable_local_combine; not in token-major order.
    pair_values: [R], in token-major order [R, K], weight_dtype: a value of each row's pairs, which
        travels home bit for bit.
    add_values: in token-major order: the pair_values of all rows of a token are added instead.
    out: [n, H], the layer's dtype, to write into; new, of expert_output's kind, if None. It shares
        no memory with expert_output, with combine_buffer(), or with bias unless it is bias.
    sm_count: as of dispatch().
    stream: for CUDA tensors.

Returns:
    out, [n, H]. With pair_values (out, or None without expert_output; the values [n, K], 0 for
    dropped pairs).

Raises:
    ValueError, TypeError, winnow.Error: as dispatch(). On a GPU the call comes back when it is
        queued. What is wrong with this rank's own arguments it raises itself; what other ranks or
        the kernels find, also a timeout, the first later call on the layer that sees it raises,
        after that call has been queued as well: it may be another one on each rank. What the failed
        call returned is unspecified. To hear of it at a known place, synchronise the stream and
        call barrier().)";

constexpr const char* kBufferDoc = R"(Memory in the arena for the experts to write their outputs to.

[R, H] of the layer's dtype, of the kind of the dispatch's input; contents unspecified. It belongs
to the descriptor and keeps it alive. After a dispatch with copy_out it is where the rows arrived. A
combine of the descriptor with rows that lie elsewhere, that of a backward pass too, copies them here.
Not collective.

Raises:
    ValueError: another layer's descriptor, or the layer is closed.)";

constexpr const char* kBarrierDoc =
    R"(Returns when every rank, or every rank of this node, has called it.

On a GPU it returns at once, and what is queued on the stream behind it waits for them.

Args:
    intra_node_only: the ranks of this node.
    stream: of a GPU layer.

Raises:
    winnow.Error: timeout; on a GPU from a later call, as combine() says. There barrier() raises
        what calls before it have found by now, and all of it if their stream is synchronised.
    ValueError: the same of a refusal; an argument that is nothing of the kind, after this rank has
        taken part in the barrier of all ranks.)";

void bind_layer(nb::module_& m) {
  using namespace nb::literals;
  const auto config = [](auto field) {
    return [field](const BoundAllToAll& self) { return self.layer.config().*field; };
  };
  nb::class_<BoundAllToAll> type(m, "AllToAll", kClassDoc, nb::dynamic_attr());
  define(type, "__init__", make_layer, "transport"_a, "store"_a, nb::kw_only(),
         "max_tokens"_a.none(), "hidden"_a.none(), "topk"_a.none(), "experts"_a.none(),
         "dtype"_a.none() = "bfloat16", "weight_dtype"_a.none() = "float32",
         "local_world_size"_a.none() = 0, "enable_local_combine"_a.none() = false,
         "sm_count"_a.none() = 20, "arena_rows"_a.none() = 0, "timeout"_a = nb::none(),
         "device"_a.none() = "cpu",
         nb::sig("def __init__(self, transport: Transport, store: typing.Any, *, "
                 "max_tokens: int, hidden: int, topk: int, experts: int, "
                 "dtype: typing.Any = 'bfloat16', weight_dtype: typing.Any = 'float32', "
                 "local_world_size: int = 0, enable_local_combine: bool = False, "
                 "sm_count: int = 20, arena_rows: int = 0, timeout: float | None = None, "
                 "device: typing.Any = 'cpu') -> None"));
  type.def("dispatch", dispatch, "input"_a = nb::none(), "expert_indices"_a = nb::none(), "extra"_a,
           nb::kw_only(), "weights"_a = nb::none(), "scales"_a = nb::none(),
           "scatter_indices"_a = nb::none(), "order"_a.none() = "expert_major",
           "expert_alignment"_a.none() = 1, "worst_case_rows"_a.none() = 0,
           "copy_out"_a.none() = false, "cached"_a = nb::none(), "out"_a = nb::none(),
           "sm_count"_a.none() = 0, "stream"_a = nb::none(), "unknown"_a, kDispatchDoc,
           nb::sig(kDispatchSignature))
      .def("_refuse_dispatch", refuse_dispatch, "text"_a)
      .def("_refuse_combine", refuse_combine, "text"_a)
      .def("combine", combine, "expert_output"_a = nb::none(), "descriptor"_a = nb::none(),
           "extra"_a, nb::kw_only(), "bias"_a = nb::none(), "second_bias"_a = nb::none(),
           "weighted"_a.none() = false, "weights"_a = nb::none(), "pair_values"_a = nb::none(),
           "add_values"_a.none() = false, "out"_a = nb::none(), "sm_count"_a.none() = 0,
           "stream"_a = nb::none(), "unknown"_a, kCombineDoc, nb::sig(kCombineSignature));
  define(type, "combine_buffer", combine_buffer, "descriptor"_a, kBufferDoc,
         nb::sig("def combine_buffer(self, descriptor: Descriptor) -> typing.Any"));
  define(type, "barrier", barrier, "intra_node_only"_a.none() = false, nb::kw_only(),
         "stream"_a = nb::none(), kBarrierDoc,
         nb::sig("def barrier(self, intra_node_only: bool = False, *, stream: Stream = None) "
                 "-> None"));
  type.def(
          "close", close,
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
  nb::class_<BoundDispatched>(m, "Dispatched", "What AllToAll.dispatch() returns.",
                              nb::type_slots(Collected<BoundDispatched>::kSlots), nb::is_generic(),
                              nb::sig("class Dispatched(typing.Generic[T])"))
      .def_ro("output", &BoundDispatched::output, "[R, H], as input.",
              nb::for_getter(nb::sig("def output(self) -> T")))
      .def_ro("weights", &BoundDispatched::weights,
              "[R], in token-major order [R, K], of weight_dtype; None without weights.",
              nb::for_getter(nb::sig("def weights(self) -> T | None")))
      .def_ro("scales", &BoundDispatched::scales,
              "[R, S], of the dtype that was given; None without.",
              nb::for_getter(nb::sig("def scales(self) -> T | None")))
      .def_ro("expert_ids", &BoundDispatched::expert_ids,
              "[R, K], int32, in token-major order: the local expert of each pair, -1 if it lives\n"
              "elsewhere or was dropped; else None.",
              nb::for_getter(nb::sig("def expert_ids(self) -> T | None")))
      .def_ro("descriptor", &BoundDispatched::descriptor, "For combine().",
              nb::for_getter(nb::sig("def descriptor(self) -> Descriptor")));
  bind_layer(m);
  m.def("_numbered", Number::find, nb::arg("number"),
        nb::sig("def _numbered(number: int) -> typing.Any"));
}

}  // namespace winnow::python
