// Python binding of expert_parallel::LowLatency.
#include <array>
#include <memory>
#include <string>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "winnow/expert_parallel/all_to_all/collective_py.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/expert_parallel/transport/transport.h"
#include "winnow/python/bindings.h"
#include "winnow/python/call.h"
#include "winnow/python/signature.h"

namespace winnow::python {
namespace {

namespace ep = expert_parallel;

constexpr const char* kDispatch = "expert_parallel::low_latency_dispatch";
constexpr const char* kCombine = "expert_parallel::low_latency_combine";

// What dispatch() gives; the results of a first half are written by the second.
struct Arrived {
  nb::any output = absent(), scales = absent(), counts = absent();
  nb::any source_tokens = absent(), source_pairs = absent(), pair_rows = absent();
  nb::any ranges = absent();
  ep::RowFormat format = ep::RowFormat::fp8;
  ep::LowLatencySent sent = ep::LowLatencySent::none;

  std::array<nb::object*, 7> members() {
    return {&output, &scales, &counts, &source_tokens, &source_pairs, &pair_rows, &ranges};
  }

 private:
  static nb::any absent() { return nb::borrow<nb::any>(nb::none()); }
};

// What combine() gives for a first half.
struct Combining {
  nb::any out;
  ep::LowLatencySent sent = ep::LowLatencySent::none;

  std::array<nb::object*, 1> members() { return {&out}; }
};

struct BoundLowLatency {
  BoundLowLatency(std::shared_ptr<ep::Transport> transport, std::shared_ptr<ep::Store> store,
                  const ep::LowLatencyConfig& config)
      : layer(std::move(transport), std::move(store), config) {}
  ep::LowLatency layer;
  OneCall one_call;
};

void make_low_latency(BoundLowLatency* self, std::shared_ptr<ep::Transport> transport,
                      nb::handle store, nb::handle max_tokens, nb::handle hidden, nb::handle topk,
                      nb::handle experts, nb::handle enable_shrink, nb::handle sm_count,
                      nb::handle timeout, nb::handle device) {
  ep::LowLatencyConfig config;
  make_on_all_ranks("expert_parallel::LowLatency", self, std::move(transport), store, config,
                    timeout, device, Option{config.enable_shrink, "enable_shrink", enable_shrink},
                    Option{config.sm_count, "sm_count", sm_count},
                    Option{config.max_tokens, "max_tokens", max_tokens},
                    Option{config.hidden, "hidden", hidden}, Option{config.topk, "topk", topk},
                    Option{config.experts, "experts", experts});
}

template <class T>
T named(const char* operation, const char* argument, nb::handle value, const std::string& wanted,
        std::initializer_list<std::pair<const char*, T>> names) {
  std::string name;
  if (nb::try_cast(value, name)) {
    for (const auto& [known, meaning] : names) {
      if (name == known) return meaning;
    }
  }
  refuse_argument(operation, argument, wanted, value);
}

ep::CallPart part_argument(const char* operation, nb::handle part) {
  return named<ep::CallPart>(operation, "part", part, "both, send or receive",
                             {{"both", ep::CallPart::both},
                              {"send", ep::CallPart::send},
                              {"receive", ep::CallPart::receive}});
}

ep::RowFormat format_argument(nb::handle format) {
  return named<ep::RowFormat>(kDispatch, "format", format,
                              "bfloat16, fp8, fp8_power_of_two or fp8_ue8m0",
                              {{"bfloat16", ep::RowFormat::bf16},
                               {"fp8", ep::RowFormat::fp8},
                               {"fp8_power_of_two", ep::RowFormat::fp8_power_of_two},
                               {"fp8_ue8m0", ep::RowFormat::fp8_ue8m0}});
}

// The results that are not there yet, made; all of them as the library takes them.
void take_results(Call& call, const BoundLowLatency& self, Arrived& result,
                  ep::LowLatencyDispatchArgs& args) {
  const ep::LowLatencyConfig& config = self.layer.config();
  const std::int64_t world = self.layer.world_size(), experts = config.experts / world;
  const std::int64_t rows = world * config.max_tokens, hidden = config.hidden;
  const bool fp8 = result.format != ep::RowFormat::bf16;
  args.output = call.output("output", result.output, fp8 ? DType::f8_e4m3 : DType::bf16,
                            {experts, rows, hidden});
  if (fp8 && result.scales.is_none()) {
    const bool packed = result.format == ep::RowFormat::fp8_ue8m0;
    nb::object turned = nb::none();
    const TensorView view = call.output("scales", turned, packed ? DType::i32 : DType::f32,
                                        {experts, hidden / (packed ? 512 : 128), rows});
    args.scales = view.transpose(1, 2);
    result.scales = nb::borrow<nb::any>(turned.attr("swapaxes")(1, 2));
  } else if (fp8) {
    args.scales = call.in_out("scales", result.scales);
  }
  args.counts = call.output("counts", result.counts, DType::i32, {experts});
  args.source_tokens =
      call.output("source_tokens", result.source_tokens, DType::i32, {experts, rows});
  args.source_pairs = call.output("source_pairs", result.source_pairs, DType::i32, {experts, rows});
  args.pair_rows = call.output("pair_rows", result.pair_rows, DType::i32,
                               {world, config.max_tokens, config.topk});
  args.ranges = call.output("ranges", result.ranges, DType::i64, {experts, world});
}

// As in run_collective(), but the other ranks do not wait in a call that only receives, which can
// be made again.
template <class Args, class Function>
void run_part(const char* operation, ep::CallPart part, const std::exception_ptr& refused,
              Args& args, const Function& run) {
  if (refused && part == ep::CallPart::receive) std::rethrow_exception(refused);
  run_collective(operation, refused, args, run);
}

constexpr Declared kDispatchDeclared(
    "def dispatch(self, input: T | None = None, expert_indices: T | None = None, *, "
    "format: str | None = None, part: str = 'both', out: LowLatencyDispatched[T] | None = None, "
    "expert_statistics: T | None = None, wait_statistics: T | None = None, "
    "stream: Stream = None) -> LowLatencyDispatched[T]");
constexpr Declared kCombineDeclared(
    "def combine(self, expert_output: T | None, dispatched: LowLatencyDispatched[T], "
    "expert_indices: T, weights: T, *, part: str = 'both', "
    "out: T | LowLatencyCombining[T] | None = None, "
    "wait_statistics: T | None = None, stream: Stream = None) -> typing.Any");

Arrived dispatch(BoundLowLatency& self, nb::handle input, nb::handle expert_indices,
                 const nb::args& extra, nb::handle format, nb::handle part, nb::handle out,
                 nb::handle expert_statistics, nb::handle wait_statistics, nb::handle stream,
                 const nb::kwargs& unknown) {
  const OneCall::Turn turn(self.one_call, kDispatch);
  Call call(kDispatch);
  call.on(self.layer.config().device);
  Arrived result;
  ep::LowLatencyDispatchArgs args;
  ep::CallPart half = ep::CallPart::both;
  const std::exception_ptr refused = caught([&] {
    half = part_argument(kDispatch, part);
    Signature(kDispatchDeclared).check(extra, unknown);
    const auto* earlier = value_argument<Arrived*>(kDispatch, "out", out);
    if (earlier != nullptr) result = *earlier;
    if (!format.is_none()) {
      const ep::RowFormat wanted = format_argument(format);
      if (earlier != nullptr && wanted != result.format) {
        refuse_argument(kDispatch, "format", "that of out", format);
      }
      result.format = wanted;
    }
    call.use_stream(stream);
    args.input = call.input("input", input);
    args.expert_indices = call.input("expert_indices", expert_indices);
    take_results(call, self, result, args);
    args.expert_statistics = call.in_out("expert_statistics", expert_statistics);
    args.wait_statistics = call.in_out("wait_statistics", wait_statistics);
  });
  run_part(kDispatch, half, refused, args, [&] {
    args.part = half;
    args.format = result.format;
    args.sent = result.sent;
    call.run([&](const RunOptions& options) {
      args.stream = options.stream;
      result.sent = self.layer.dispatch(args);
    });
  });
  return result;
}

nb::object combine(BoundLowLatency& self, nb::handle expert_output, nb::handle dispatched,
                   nb::handle expert_indices, nb::handle weights, const nb::args& extra,
                   nb::handle part, nb::object out, nb::handle wait_statistics, nb::handle stream,
                   const nb::kwargs& unknown) {
  const OneCall::Turn turn(self.one_call, kCombine);
  Call call(kCombine);
  call.on(self.layer.config().device);
  ep::LowLatencyCombineArgs args;
  ep::CallPart half = ep::CallPart::both;
  ep::LowLatencySent sent = ep::LowLatencySent::none;
  const std::exception_ptr refused = caught([&] {
    half = part_argument(kCombine, part);
    Signature(kCombineDeclared).check(extra, unknown);
    const auto* arrived = value_argument<Arrived*>(kCombine, "dispatched", dispatched);
    if (arrived == nullptr) {
      refuse_argument(kCombine, "dispatched", "the result of dispatch()", dispatched);
    }
    if (half == ep::CallPart::receive) {
      const auto* first = value_argument<Combining*>(kCombine, "out", out);
      if (first == nullptr) {
        refuse_argument(kCombine, "out", "the result of the call with part \"send\"", out);
      }
      sent = first->sent;
      out = first->out;
    }
    call.use_stream(stream);
    args.expert_output = call.input("expert_output", expert_output);
    args.pair_rows = call.input("pair_rows", arrived->pair_rows);
    args.dispatched = arrived->sent;
    args.expert_indices = call.input("expert_indices", expert_indices);
    args.weights = call.input("weights", weights);
    args.out = call.output("out", out, DType::bf16,
                           {size_of_dim(args.expert_indices, 0), self.layer.config().hidden});
    args.wait_statistics = call.in_out("wait_statistics", wait_statistics);
  });
  run_part(kCombine, half, refused, args, [&] {
    args.part = half;
    args.sent = sent;
    call.run([&](const RunOptions& options) {
      args.stream = options.stream;
      sent = self.layer.combine(args);
    });
  });
  if (half != ep::CallPart::send) return out;
  return nb::cast(Combining{nb::borrow<nb::any>(out), sent});
}

void refuse_dispatch(BoundLowLatency& self, const std::string& text) {
  refuse_on_all_ranks<ep::LowLatencyDispatchArgs>(
      kDispatch, self, text,
      [&](const ep::LowLatencyDispatchArgs& args) { self.layer.dispatch(args); });
}

void refuse_combine(BoundLowLatency& self, const std::string& text) {
  refuse_on_all_ranks<ep::LowLatencyCombineArgs>(
      kCombine, self, text,
      [&](const ep::LowLatencyCombineArgs& args) { self.layer.combine(args); });
}

constexpr const char* kClassDoc =
    R"(One rank of the low-latency all-to-all: few tokens, a fixed place for every row.

Every rank creates its own object, and all ranks make the same calls in the same order. W is the
transport's world size; expert x lives on rank x / (experts / W). All ranks are on one host.

Args:
    transport, store: as in AllToAll.
    max_tokens: M, the largest number of tokens of a rank in a call.
    hidden: H, a multiple of 8; topk: K, the largest number of experts of a token; experts: E, a
        multiple of W.
    enable_shrink: a rank that does not take part within the timeout is masked, and the others
        continue.
    sm_count: SMs of a call on a GPU; 0: all.
    timeout: seconds of each wait; None: default_timeout().
    device: where tensors are.

Raises:
    ValueError: a size is invalid or differs between ranks. winnow.Error: as in AllToAll.)";

constexpr const char* kDispatchDoc =
    R"(Sends every token to its experts, without counting first. Collective.

Args:
    input: [n, H], bfloat16, n from 0 to M; expert_indices: [n, k], int32 or int64, k from 1 to K,
        -1 or E for none. None with part "receive".
    format: of the rows: "bfloat16"; "fp8", float8_e4m3fn with a float32 scale for each 128 columns;
        "fp8_power_of_two"; "fp8_ue8m0", whose scales are exponents, four in an int32. None: that
        of `out`, or "fp8".
    part: "both", or "send" and later "receive" with the result of the first as `out`. At most two
        calls may be sent and not yet received.
    out: the result of an earlier call, to write into; with part "receive" that of the call to
        receive, whichever of them was sent first.
    expert_statistics: [E / W], int32; the counts are added to it. wait_statistics: [W], int64; the
        nanoseconds of waiting for each rank are added to it.
    stream: for CUDA tensors.

Returns:
    An object with output [E / W, W * M, H], whose rows from counts[x] on are not written; scales
    [E / W, W * M, H / 128], int32 [.., H / 512], stored column by column, or None; counts [E / W],
    source_tokens and source_pairs [E / W, W * M], int32; ranges [E / W, W], int64: first row of a
    source rank << 32 | its number of rows; pair_rows [W, M, K], int32, with which combine() finds
    the rows of every pair: expert * W * M + row, -1 of a pair without an expert here. The rows of a
    source rank are contiguous.

Raises:
    ValueError, TypeError, winnow.Error: as AllToAll.dispatch(). Every rank raises the error of any
    rank when it receives, on a GPU in a later call. What is wrong in a call that only receives
    stays on its rank, which can make it again.)";

constexpr const char* kCombineDoc =
    R"(Sums the experts' rows of each token, multiplied by weights. Collective.

    out[t] = sum over k of weights[t, k] * row(t, k)

Args:
    expert_output: [E / W, W * M, H], bfloat16, in the order of the rows that dispatch() returned.
    dispatched: the result of dispatch(), of which its pair_rows are read. One with part "send" is
        refused until it is received.
    expert_indices: as passed to dispatch(); weights: [n, k], float32.
    part, wait_statistics, stream: as in dispatch().
    out: [n, H], bfloat16, to write into; new if None. With part "receive" the result of the call
        with part "send".

Returns:
    out; with part "send" an object whose `out` it is, for the call with part "receive". Sums are in float32, of each rank with k ascending and then of the ranks, and rounded
    once. Pairs of masked ranks are omitted.

Raises:
    ValueError, winnow.Error: as dispatch().)";

}  // namespace

void bind_expert_parallel_low_latency(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Arrived> dispatched(m, "LowLatencyDispatched", "The result of LowLatency.dispatch().",
                                 nb::type_slots(Collected<Arrived>::kSlots), nb::is_generic(),
                                 nb::sig("class LowLatencyDispatched(typing.Generic[T])"));
  define_member<&Arrived::output>(dispatched, "[E / W, W * M, H].");
  define_member<&Arrived::scales>(dispatched, "[E / W, W * M, columns], or None.", "T | None");
  define_member<&Arrived::counts>(dispatched, "[E / W], int32.");
  define_member<&Arrived::source_tokens>(dispatched, "[E / W, W * M], int32.");
  define_member<&Arrived::source_pairs>(dispatched, "[E / W, W * M], int32: token * K + k.");
  define_member<&Arrived::pair_rows>(dispatched, "[W, M, K], int32: expert * W * M + row, or -1.");
  define_member<&Arrived::ranges>(dispatched, "[E / W, W], int64: first row << 32 | rows.");

  nb::class_<Combining> combining(m, "LowLatencyCombining",
                                  "The result of a LowLatency.combine() that sends.",
                                  nb::type_slots(Collected<Combining>::kSlots), nb::is_generic(),
                                  nb::sig("class LowLatencyCombining(typing.Generic[T])"));
  define_member<&Combining::out>(combining, "[n, H], which the call that receives writes.");

  nb::class_<BoundLowLatency> type(m, "LowLatency", kClassDoc);
  define<
      "def __init__(self, transport: Transport, store: typing.Any, *, "
      "max_tokens: int, hidden: int, topk: int, experts: int, "
      "enable_shrink: bool = False, sm_count: int = 0, timeout: float | None = None, "
      "device: typing.Any = 'cpu') -> None">(type, make_low_latency);
  define_collective<kDispatchDeclared>(type, dispatch, kDispatchDoc);
  define_collective<kCombineDeclared>(type, combine, kCombineDoc);
  type.def("_refuse_dispatch", refuse_dispatch, "text"_a)
      .def("_refuse_combine", refuse_combine, "text"_a)
      .def(
          "mask",
          [](BoundLowLatency& self) {
            const OneCall::Turn turn(self.one_call, kDispatch);
            return self.layer.mask();
          },
          "Of each rank 1 where it is masked here. On a GPU waits for the last call.",
          nb::sig("def mask(self) -> list[int]"))
      .def(
          "set_mask",
          [](BoundLowLatency& self, int rank, bool masked) {
            const OneCall::Turn turn(self.one_call, kDispatch);
            self.layer.set_mask(rank, masked);
          },
          "rank"_a, "masked"_a, "Masks another rank, or no longer. Only with enable_shrink.")
      .def(
          "close",
          [](BoundLowLatency& self) {
            const OneCall::Turn turn(self.one_call, "expert_parallel::close");
            const Unlocked unlocked;
            self.layer.close();
          },
          "Leaves the world. Idempotent; never waits for other ranks.")
      .def_prop_ro("rank", [](const BoundLowLatency& self) { return self.layer.rank(); })
      .def_prop_ro("world_size",
                   [](const BoundLowLatency& self) { return self.layer.world_size(); })
      .def_prop_ro("topk", [](const BoundLowLatency& self) { return self.layer.config().topk; })
      .def_prop_ro(
          "bytes", [](const BoundLowLatency& self) { return self.layer.bytes(); },
          "The memory that this rank has taken.");
}

// A world of one rank.
Backend supports_expert_parallel_low_latency(Shape& shape, const RunOptions& options) {
  ep::LowLatencyConfig config;
  config.max_tokens = shape.take<int>("max_tokens", 8);
  config.hidden = shape.take("hidden", 128);
  config.topk = shape.take<int>("topk", 1);
  config.experts = shape.take<int>("experts", 8);
  shape.done();
  config.device = shape.device;
  config.backend = options.backend;
  const Unlocked unlocked;
  ep::InProcessWorld world(1);
  return ep::LowLatency(world.transport(0), world.store(), config).backend();
}

}  // namespace winnow::python
