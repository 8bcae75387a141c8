// Python bindings of expert_parallel::AllToAll.
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/all_to_all/collective_py.h"
#include "winnow/expert_parallel/layer/descriptor_py.h"
#include "winnow/expert_parallel/transport/arguments_py.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/python/bindings.h"
#include "winnow/python/call.h"

namespace winnow::python {
namespace {

namespace ep = expert_parallel;

constexpr const char* kDispatch = "expert_parallel::dispatch";
constexpr const char* kCombine = "expert_parallel::combine";

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
  // A CUDA graph uses the memory of the calls that it has recorded whenever it is launched: nobody
  // else may have it before the layer is closed. (What combine() makes is memory of the caller's
  // framework, which keeps it for the graph as all that it allocates meanwhile.)
  std::vector<nb::object> recorded;
};

ep::RowOrder order_argument(nb::handle order) {
  std::string name;
  if (nb::try_cast(order, name)) {
    if (name == "expert_major") return ep::RowOrder::expert_major;
    if (name == "token_major") return ep::RowOrder::token_major;
  }
  refuse_argument(kDispatch, "order", "expert_major or token_major", order);
}

// A layer of one rank, and calls of it without tokens.
class LoneLayer {
 public:
  explicit LoneLayer(const ep::Config& config)
      : config_(config), layer_(world_.transport(0), world_.store(), config) {}

  ep::Dispatched dispatch() {
    return layer_.dispatch({.input = no_rows(config_.dtype, config_.hidden),
                            .expert_indices = no_rows(DType::i32, config_.topk)});
  }
  Backend combine(const ep::Descriptor& descriptor) {
    layer_.combine({.expert_output = no_rows(config_.dtype, config_.hidden)}, descriptor);
    return layer_.backend();
  }

 private:
  ConstTensorView no_rows(DType dtype, std::int64_t columns) const {
    return without_memory(dtype, {0, columns}, config_.device);
  }

  ep::InProcessWorld world_{1};
  ep::Config config_;
  ep::AllToAll layer_;
};

// Of another layer, which every layer refuses.
std::shared_ptr<const ep::Descriptor> foreign_descriptor() {
  return LoneLayer({.max_tokens = 1, .hidden = 8, .topk = 1, .experts = 1, .arena_rows = 1})
      .dispatch()
      .descriptor;
}

void make_layer(nb::pointer_and_handle<BoundAllToAll> self,
                std::shared_ptr<ep::Transport> transport, nb::handle store, nb::handle max_tokens,
                nb::handle hidden, nb::handle topk, nb::handle experts, nb::handle dtype,
                nb::handle weight_dtype, nb::handle local_world_size,
                nb::handle enable_local_combine, nb::handle sm_count, nb::handle arena_rows,
                nb::handle timeout, nb::handle device) {
  constexpr const char* operation = "expert_parallel::AllToAll";
  std::shared_ptr<ep::Store> meeting = store_argument(operation, store);
  ep::Config config;
  const auto read = [&]<class T>(T& field, const char* name, nb::handle value) {
    field = value_argument<T>(operation, name, value);
  };
  // Those without a default last: if anything cannot be read, one of them is 0, which every rank
  // refuses when it hears of it.
  const std::exception_ptr refused = caught([&] {
    config.timeout = timeout_argument(operation, timeout);
    config.device = device_argument(operation, device);
    config.dtype = dtype_argument(operation, "dtype", dtype);
    config.weight_dtype = dtype_argument(operation, "weight_dtype", weight_dtype);
    read(config.local_world_size, "local_world_size", local_world_size);
    read(config.enable_local_combine, "enable_local_combine", enable_local_combine);
    read(config.sm_count, "sm_count", sm_count);
    read(config.arena_rows, "arena_rows", arena_rows);
    read(config.max_tokens, "max_tokens", max_tokens);
    read(config.hidden, "hidden", hidden);
    read(config.topk, "topk", topk);
    read(config.experts, "experts", experts);
  });
  run_collective(refused, [&] {
    const nb::gil_scoped_release unlocked;
    new (self.p) BoundAllToAll(std::move(transport), std::move(meeting), config);
  });
  // In the object's own dictionary, where torch.compile can read it: number, W, NN, T, K, E / W.
  const ep::Topology& topology = self.p->layer.topology();
  self.h.attr("_traced") =
      nb::make_tuple(self.p->number.give(self.h), topology.world_size, topology.nodes(),
                     config.max_tokens, config.topk, config.experts / topology.world_size);
}

BoundDispatched dispatch(BoundAllToAll& self, nb::handle input, nb::handle expert_indices,
                         nb::handle weights, nb::handle scales, nb::handle scatter_indices,
                         nb::handle order, nb::handle expert_alignment, nb::handle worst_case_rows,
                         nb::handle copy_out, nb::handle cached, nb::handle out, nb::handle stream,
                         const nb::kwargs& unknown) {
  const OneCall::Turn turn(self.one_call, kDispatch);
  Call call(kDispatch);
  call.on(self.layer.config().device);
  ep::DispatchArgs args;
  Exporter exporter;
  const std::exception_ptr refused = caught([&] {
    check_none("dispatch", unknown);
    call.use_stream(stream);
    args = {.input = call.input("input", input),
            .expert_indices = call.input("expert_indices", expert_indices),
            .weights = call.input("weights", weights),
            .scales = call.input("scales", scales),
            .scatter_indices = call.input("scatter_indices", scatter_indices),
            .order = order_argument(order),
            .expert_alignment =
                value_argument<std::int64_t>(kDispatch, "expert_alignment", expert_alignment),
            .worst_case_rows =
                value_argument<std::int64_t>(kDispatch, "worst_case_rows", worst_case_rows),
            .copy_out = value_argument<bool>(kDispatch, "copy_out", copy_out),
            .out = call.in_out("out", out),
            .cached = descriptor_argument(kDispatch, "cached", cached)};
    exporter = call.exporter();
  });
  ep::Dispatched got;
  bool recorded = false;
  run_collective(kDispatch, refused, args, [&] {
    call.run([&](const RunOptions& options) {
      args.stream = options.stream;
      got = self.layer.dispatch(args);
      recorded = in_capture(self.layer.config().device, args.stream);
    });
  });
  const auto give = [&](Tensor& tensor) {
    return nb::borrow<nb::any>(exporter(std::move(tensor)));
  };
  const auto written = [&] {
    const std::int64_t rows = got.descriptor->rows();
    return args.out.size(0) == rows ? nb::borrow(out)
                                    : out[nb::slice(nb::int_(0), nb::int_(rows), nb::none())];
  };
  BoundDispatched result{
      .output = out.is_none() ? give(got.output) : nb::borrow<nb::any>(written()),
      .weights = give(got.weights),
      .scales = give(got.scales),
      .expert_ids = give(got.expert_ids),
      .descriptor = nb::cast(BoundDescriptor{std::move(got.descriptor), exporter})};
  if (recorded) self.recorded.push_back(nb::cast(result));
  return result;
}

// Takes part in a dispatch only to refuse it on all ranks.
void refuse_dispatch(BoundAllToAll& self, const std::string& text) {
  const OneCall::Turn turn(self.one_call, kDispatch);
  Call call(kDispatch);
  call.on(self.layer.config().device);
  const Error refusal(ErrorCode::invalid_argument, kDispatch, text);
  call.run([&](const RunOptions& options) {
    self.layer.dispatch({.stream = options.stream, .refusal = &refusal});
  });
}

nb::object combine(BoundAllToAll& self, nb::handle expert_output, nb::handle descriptor,
                   nb::handle bias, nb::handle weighted, nb::object out, nb::handle stream,
                   const nb::kwargs& unknown) {
  const OneCall::Turn turn(self.one_call, kCombine);
  Call call(kCombine);
  call.on(self.layer.config().device);
  ep::CombineArgs args;
  std::shared_ptr<const ep::Descriptor> made;
  bool recorded = false;
  const std::exception_ptr refused = caught([&] {
    made = descriptor_argument(kCombine, "descriptor", descriptor);
    if (made == nullptr) refuse_argument(kCombine, "descriptor", "a Descriptor", descriptor);
    check_none("combine", unknown);
    call.use_stream(stream);
    args.expert_output = call.input("expert_output", expert_output);
    args.bias = call.input("bias", bias);
    args.weighted = value_argument<bool>(kCombine, "weighted", weighted);
    // Rows of another dtype are the library's to refuse: their framework may not have the layer's.
    const DType dtype = self.layer.config().dtype;
    if (args.expert_output.dtype() == dtype || !out.is_none()) {
      args.out = call.output("out", out, dtype,
                             {made->num_dispatch_token_cur_rank(), self.layer.config().hidden});
    }
  });
  if (made == nullptr) made = foreign_descriptor();
  run_collective(kCombine, refused, args, [&] {
    call.run([&](const RunOptions& options) {
      args.stream = options.stream;
      self.layer.combine(args, *made);
      recorded = in_capture(self.layer.config().device, args.stream);
    });
  });
  if (recorded) self.recorded.push_back(nb::borrow(descriptor));
  return out;
}

nb::object combine_buffer(BoundAllToAll& self, const BoundDescriptor& descriptor) {
  const OneCall::Turn turn(self.one_call, "expert_parallel::combine_buffer");
  return descriptor.exporter(self.layer.combine_buffer(*descriptor.descriptor),
                             descriptor.descriptor);
}

void barrier(BoundAllToAll& self, nb::handle intra_node_only, nb::handle stream) {
  constexpr const char* operation = "expert_parallel::barrier";
  const OneCall::Turn turn(self.one_call, operation);
  Call call(operation);
  call.on(self.layer.config().device);
  bool of_node = false;
  const std::exception_ptr refused = caught([&] {
    of_node = value_argument<bool>(operation, "intra_node_only", intra_node_only);
    call.use_stream(stream);
  });
  run_collective(refused, [&] {
    call.run([&](const RunOptions& options) { self.layer.barrier(of_node, options.stream); });
  });
}

void close(BoundAllToAll& self) {
  const OneCall::Turn turn(self.one_call, "expert_parallel::close");
  {
    const nb::gil_scoped_release unlocked;
    self.layer.close();
  }
  self.recorded.clear();
}

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
    scales: [n, ceil(H / 128)], float32, with float8_e4m3fn.
    scatter_indices: [n, K] or [sum of n over ranks, K], int32: the row of each pair as a position
        in the concatenation of all ranks' outputs; entries of dropped pairs are ignored.
    order: "expert_major" or "token_major".
    expert_alignment: each expert's rows are followed by zero rows up to a multiple.
    worst_case_rows: the output has as many rows; rows from the true count on are unspecified, those
        beyond are dropped, which a later call reports. 0: as many as arrive. With it, or cached,
        a CUDA graph can record the call, if arena_rows were enough.
    copy_out: results in memory of their own. Otherwise they borrow the arena, whose rows are used
        again when the tensors are gone; they may outlive the layer.
    cached: the descriptor of an earlier dispatch, whose routing is repeated.
    out: [R or more, H], input's dtype, for the output; otherwise as copy_out. With fewer than R
        rows it is refused before a row has moved.
    stream: for CUDA tensors.

Returns:
    An object with output [R, H], or the first R rows of out; weights [R], or [R, K] in token-major
    order, or None; scales [R, ceil(H / 128)] or None; expert_ids [R, K], int32, the local expert of
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

    out[t] = sum over kept k of row(t, k) [* weight(t, k)] [+ bias[t]]

A token without kept pairs gets zeros, plus bias. In token-major order a row is what one rank's
experts give for a token in sum. Sums are in f32, over k, then ranks, then nodes, and rounded to the
dtype at the end, and where they cross between nodes; with enable_local_combine also between ranks.

Args:
    expert_output: [R, H], the layer's dtype. Rows in combine_buffer(), or in a borrowed output that
        was overwritten, are read where they are; others are copied first.
    descriptor: of the dispatch: the Descriptor, not what dispatch() returned with it.
    bias: [n, H], the layer's dtype, added once.
    weighted: multiply by the weights sent at dispatch; not in token-major order.
    out: [n, H], the layer's dtype, to write into; new, of expert_output's kind, if None.
    stream: for CUDA tensors.

Returns:
    out, [n, H].

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
  nb::class_<BoundAllToAll>(m, "AllToAll", kClassDoc, nb::dynamic_attr())
      .def("__init__", make_layer, "transport"_a, "store"_a, nb::kw_only(), "max_tokens"_a.none(),
           "hidden"_a.none(), "topk"_a.none(), "experts"_a.none(), "dtype"_a.none() = "bfloat16",
           "weight_dtype"_a.none() = "float32", "local_world_size"_a.none() = 0,
           "enable_local_combine"_a.none() = false, "sm_count"_a.none() = 20,
           "arena_rows"_a.none() = 0, "timeout"_a = nb::none(), "device"_a.none() = "cpu",
           nb::sig("def __init__(self, transport: Transport, store: typing.Any, *, "
                   "max_tokens: int, hidden: int, topk: int, experts: int, "
                   "dtype: typing.Any = 'bfloat16', weight_dtype: typing.Any = 'float32', "
                   "local_world_size: int = 0, enable_local_combine: bool = False, "
                   "sm_count: int = 20, arena_rows: int = 0, timeout: float | None = None, "
                   "device: typing.Any = 'cpu') -> None"))
      .def("dispatch", dispatch, "input"_a.none(), "expert_indices"_a = nb::none(), nb::kw_only(),
           "weights"_a = nb::none(), "scales"_a = nb::none(), "scatter_indices"_a = nb::none(),
           "order"_a.none() = "expert_major", "expert_alignment"_a.none() = 1,
           "worst_case_rows"_a.none() = 0, "copy_out"_a.none() = false, "cached"_a = nb::none(),
           "out"_a = nb::none(), "stream"_a = nb::none(), "unknown"_a, kDispatchDoc,
           nb::sig("def dispatch(self, input: T, expert_indices: T | None = None, *, "
                   "weights: T | None = None, scales: T | None = None, "
                   "scatter_indices: T | None = None, "
                   "order: typing.Literal['expert_major', 'token_major'] = 'expert_major', "
                   "expert_alignment: int = 1, worst_case_rows: int = 0, copy_out: bool = False, "
                   "cached: Descriptor | None = None, out: T | None = None, "
                   "stream: Stream = None) -> Dispatched"))
      .def("_refuse_dispatch", refuse_dispatch, "text"_a)
      .def("combine", combine, "expert_output"_a.none(), "descriptor"_a.none(), nb::kw_only(),
           "bias"_a = nb::none(), "weighted"_a.none() = false, "out"_a = nb::none(),
           "stream"_a = nb::none(), "unknown"_a, kCombineDoc,
           nb::sig("def combine(self, expert_output: T, descriptor: Descriptor, *, "
                   "bias: T | None = None, weighted: bool = False, out: T | None = None, "
                   "stream: Stream = None) -> T"))
      .def("combine_buffer", combine_buffer, "descriptor"_a, kBufferDoc,
           nb::sig("def combine_buffer(self, descriptor: Descriptor) -> typing.Any"))
      .def("barrier", barrier, "intra_node_only"_a.none() = false, nb::kw_only(),
           "stream"_a = nb::none(), kBarrierDoc,
           nb::sig("def barrier(self, intra_node_only: bool = False, *, stream: Stream = None) "
                   "-> None"))
      .def(
          "close", close,
          "Leaves the layer. Idempotent, waits for nobody. ValueError while another thread is in a "
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

// Of one rank and of the sizes that were asked for.
ep::Config lone_config(Shape& shape, const RunOptions& options) {
  const ep::Config config{.max_tokens = shape.take("max_tokens", 1),
                          .hidden = shape.take("hidden", 128),
                          .topk = shape.take<int>("topk", 1),
                          .experts = shape.take<int>("experts", 8),
                          .dtype = shape.dtype,
                          .arena_rows = 1,
                          .device = shape.device,
                          .backend = options.backend};
  shape.done();
  return config;
}

}  // namespace

void bind_expert_parallel_all_to_all(nb::module_& m) {
  nb::class_<BoundDispatched>(m, "Dispatched", "What AllToAll.dispatch() returns.",
                              nb::type_slots(Collected<BoundDispatched>::kSlots))
      .def_ro("output", &BoundDispatched::output, "[R, H], as input.")
      .def_ro("weights", &BoundDispatched::weights,
              "[R], in token-major order [R, K], of weight_dtype; None without weights.")
      .def_ro("scales", &BoundDispatched::scales, "[R, ceil(H / 128)], float32; None without.")
      .def_ro("expert_ids", &BoundDispatched::expert_ids,
              "[R, K], int32, in token-major order: the local expert of each pair, -1 if it lives\n"
              "elsewhere or was dropped; else None.")
      .def_ro("descriptor", &BoundDispatched::descriptor, "For combine().",
              nb::for_getter(nb::sig("def descriptor(self) -> Descriptor")));
  bind_layer(m);
  m.def("_numbered", Number::find, nb::arg("number"),
        nb::sig("def _numbered(number: int) -> typing.Any"));
}

Backend supports_expert_parallel_dispatch(Shape& shape, const RunOptions& options) {
  const ep::Config config = lone_config(shape, options);
  const nb::gil_scoped_release unlocked;
  return LoneLayer(config).dispatch().backend;
}

Backend supports_expert_parallel_combine(Shape& shape, const RunOptions& options) {
  const ep::Config config = lone_config(shape, options);
  const nb::gil_scoped_release unlocked;
  LoneLayer layer(config);
  return layer.combine(*layer.dispatch().descriptor);
}

}  // namespace winnow::python
