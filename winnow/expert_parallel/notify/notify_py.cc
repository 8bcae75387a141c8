// Python binding of expert_parallel::Notifier.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/all_to_all/collective_py.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/python/bindings.h"
#include "winnow/python/call.h"

namespace winnow::python {
namespace {

namespace ep = expert_parallel;

constexpr const char* kOperation = "expert_parallel::notify";

// The tensors that notify() returns, which a later call may write into.
struct Notified {
  nb::any node_channel_prefix_matrix = absent(), rank_channel_prefix_matrix = absent();
  nb::any recv_node_prefix_sum = absent(), recv_rank_prefix_sum = absent();
  nb::any num_recv_tokens = absent(), num_forward_tokens = absent();
  nb::any recv_pairs_per_expert = absent();

  std::array<nb::object*, 7> members() {
    return {&node_channel_prefix_matrix,
            &rank_channel_prefix_matrix,
            &recv_node_prefix_sum,
            &recv_rank_prefix_sum,
            &num_recv_tokens,
            &num_forward_tokens,
            &recv_pairs_per_expert};
  }

 private:
  static nb::any absent() { return nb::borrow<nb::any>(nb::none()); }
};

struct BoundNotifier {
  BoundNotifier(std::shared_ptr<ep::Transport> transport, std::shared_ptr<ep::Store> store,
                const ep::NotifierConfig& config)
      : notifier(std::move(transport), std::move(store), config) {}
  ep::Notifier notifier;
  OneCall one_call;
  Number number;
};

void make_notifier(nb::pointer_and_handle<BoundNotifier> self,
                   std::shared_ptr<ep::Transport> transport, nb::handle store, nb::handle experts,
                   nb::handle local_world_size, nb::handle timeout, nb::handle device) {
  ep::NotifierConfig config;
  make_on_all_ranks("expert_parallel::Notifier", self.p, std::move(transport), store, config,
                    timeout, device,
                    Option{config.local_world_size, "local_world_size", local_world_size},
                    Option{config.experts, "experts", experts});
  self.h.attr("_traced") = self.p->number.give(self.h);  // where torch.compile can read it
}

constexpr Declared kDeclared(
    "def notify(self, tokens_per_rank: T, tokens_per_node: T, tokens_per_expert: T, "
    "is_token_in_rank: T, *, channels: int = 1, expert_alignment: int = 1, "
    "worst_case_rows: int = 0, queues: QueueBuffers | None = None, "
    "out: Notified[T] | None = None, stream: Stream = None) -> Notified[T]");

Notified notify(BoundNotifier& self, nb::handle tokens_per_rank, nb::handle tokens_per_node,
                nb::handle tokens_per_expert, nb::handle is_token_in_rank, const nb::args& extra,
                nb::handle channels, nb::handle expert_alignment, nb::handle worst_case_rows,
                nb::handle queues, nb::handle out, nb::handle stream, const nb::kwargs& unknown) {
  const OneCall::Turn turn(self.one_call, kOperation);
  Call call(kOperation);
  call.on(self.notifier.config().device);
  Notified result;
  ep::NotifyArgs args;
  const std::exception_ptr refused = caught([&] {
    Signature(kDeclared).check(extra, unknown);
    call.use_stream(stream);
    const auto number = [](const char* name, nb::handle value) {
      return value_argument<std::int64_t>(kOperation, name, value);
    };
    args = {.tokens_per_rank = call.input("tokens_per_rank", tokens_per_rank),
            .tokens_per_node = call.input("tokens_per_node", tokens_per_node),
            .tokens_per_expert = call.input("tokens_per_expert", tokens_per_expert),
            .is_token_in_rank = call.input_flags("is_token_in_rank", is_token_in_rank),
            .channels = number("channels", channels),
            .expert_alignment = number("expert_alignment", expert_alignment),
            .worst_case_rows = number("worst_case_rows", worst_case_rows)};
    const auto* buffers = value_argument<ep::QueueBuffers*>(kOperation, "queues", queues);
    if (buffers != nullptr) args.queues = *buffers;
    const auto* earlier = value_argument<Notified*>(kOperation, "out", out);
    if (earlier != nullptr) result = *earlier;
    const ep::Topology& topology = self.notifier.topology();
    const std::int64_t slices = std::max<std::int64_t>(args.channels, 0);
    const std::int64_t ranks = topology.world_size, nodes = topology.nodes();
    const std::int64_t local_experts = self.notifier.config().experts / topology.world_size;
    const auto output = [&](const char* name, nb::object& tensor, auto... shape) {
      return call.output(name, tensor, DType::i32, {shape...});
    };
    args.node_channel_prefix_matrix =
        output("node_channel_prefix_matrix", result.node_channel_prefix_matrix, nodes, slices);
    args.rank_channel_prefix_matrix =
        output("rank_channel_prefix_matrix", result.rank_channel_prefix_matrix, ranks, slices);
    args.recv_node_prefix_sum = output("recv_node_prefix_sum", result.recv_node_prefix_sum, nodes);
    args.recv_rank_prefix_sum = output("recv_rank_prefix_sum", result.recv_rank_prefix_sum, ranks);
    args.num_recv_tokens = output("num_recv_tokens", result.num_recv_tokens, std::int64_t{1});
    args.num_forward_tokens =
        output("num_forward_tokens", result.num_forward_tokens, std::int64_t{1});
    args.recv_pairs_per_expert =
        output("recv_pairs_per_expert", result.recv_pairs_per_expert, local_experts);
  });
  run_collective(kOperation, refused, args, [&] {
    call.run([&](const RunOptions& options) {
      args.stream = options.stream;
      self.notifier.notify(args);
    });
  });
  return result;
}

void make_buffers(ep::QueueBuffers* self, std::int64_t bytes_per_token,
                  std::int64_t node_recv_tokens, std::int64_t local_recv_tokens,
                  std::int64_t node_buffer_bytes, std::int64_t local_buffer_bytes) {
  new (self) ep::QueueBuffers{bytes_per_token, node_recv_tokens, local_recv_tokens,
                              node_buffer_bytes, local_buffer_bytes};
}

constexpr const char* kClassDoc =
    R"(One rank of the count exchange, for engines that move tokens themselves.

Every rank creates its own object, and all ranks make the same calls in the same order. Expert x
lives on rank x / (experts / W), rank r on node r / local_world_size; W is the transport's world
size. The interpreter lock is released in every wait.

Args:
    transport: one rank of a world.
    store: where the ranks meet, as in create_shared_memory(), or the store of an InProcessWorld.
    experts: E, a multiple of W.
    local_world_size: L, ranks per node, a divisor of W; 0: all.
    timeout: seconds of each call; None: default_timeout().
    device: where tensors are, as in AllToAll. On a GPU notify() is queued on its stream and waits
        for the totals only, not at all with worst_case_rows.

Raises:
    ValueError: sizes do not divide or differ between ranks. Every rank raises it. If an argument
        has the wrong type, only its own rank describes it; the others report that its experts
        differ.
    winnow.Error: a timeout that names the ranks that did not arrive.)";

constexpr const char* kNotifyDoc = R"(Exchanges token counts between all ranks.


Collective. A channel is a slice of the tokens: with per = ceil(n / C), channel c is
[min(per*c, n), min(per*(c+1), n)).

Args:
    tokens_per_rank, tokens_per_node, tokens_per_expert, is_token_in_rank: [W], [W/L] and [E],
        int32, and [n, W], bool or uint8: the results of layout().
    channels: C, the same on every rank, at least 1.
    expert_alignment: pairs per expert are rounded up to a multiple.
    worst_case_rows: above 0, the host does not learn the totals.
    queues: QueueBuffers of the engine, checked to be large enough.
    out: the result of an earlier call, to write into. Its tensors must not overlap inputs or each
        other.
    stream: for CUDA tensors.

Returns:
    An object with int32 tensors: node_channel_prefix_matrix [W/L, C], rank_channel_prefix_matrix
    [W, C], recv_node_prefix_sum [W/L], recv_rank_prefix_sum [W], num_recv_tokens [1],
    num_forward_tokens [1], recv_pairs_per_expert [E/W].

Raises:
    ValueError: an argument is not as described, contradicts another or differs between ranks. Every
        rank raises it and names the rank at fault; no output was written, and the next call works.
    TypeError: an unknown keyword; the other ranks raise a ValueError.
    winnow.Error: a timeout; the notifier is broken then.)";

}  // namespace

void bind_expert_parallel_notify(nb::module_& m) {
  using namespace nb::literals;

  nb::class_<ep::QueueBuffers> buffers(m, "QueueBuffers",
                                       "The queue buffers that an engine has, in bytes.");
  define<
      "def __init__(self, *, bytes_per_token: int, node_recv_tokens: int, "
      "local_recv_tokens: int, node_buffer_bytes: int, local_buffer_bytes: int) "
      "-> None">(buffers, make_buffers);

  nb::class_<Notified> notified(m, "Notified", "The result of Notifier.notify(): int32 tensors.",
                                nb::type_slots(Collected<Notified>::kSlots), nb::is_generic(),
                                nb::sig("class Notified(typing.Generic[T])"));
  define_member<&Notified::node_channel_prefix_matrix>(
      notified, "[W/L, C]: this rank's tokens that go to a node, each once, over channels 0 to c.");
  define_member<&Notified::rank_channel_prefix_matrix>(notified, "[W, C]: the same for ranks.");
  define_member<&Notified::recv_node_prefix_sum>(
      notified, "[W/L]: tokens that come here to be forwarded, over source nodes 0 to j.");
  define_member<&Notified::recv_rank_prefix_sum>(
      notified, "[W]: tokens received in the end, over source ranks 0 to r.");
  define_member<&Notified::num_recv_tokens>(notified, "[1]: all that are received.");
  define_member<&Notified::num_forward_tokens>(notified, "[1]: all to be forwarded.");
  define_member<&Notified::recv_pairs_per_expert>(
      notified, "[E/W]: pairs for each local expert, rounded up to expert_alignment.");

  nb::class_<ep::NotifyTotals>(m, "NotifyTotals", "The totals on the host; -1 if unknown.")
      .def_ro("recv_tokens", &ep::NotifyTotals::recv_tokens)
      .def_ro("forward_tokens", &ep::NotifyTotals::forward_tokens)
      .def_ro("recv_pairs_per_expert", &ep::NotifyTotals::recv_pairs_per_expert);

  nb::class_<BoundNotifier> type(m, "Notifier", kClassDoc, nb::dynamic_attr());
  define<
      "def __init__(self, transport: Transport, store: typing.Any, *, experts: int, "
      "local_world_size: int = 0, timeout: float | None = None, "
      "device: typing.Any = 'cpu') -> None">(type, make_notifier);
  define_collective<kDeclared>(type, notify, kNotifyDoc);
  type.def_prop_ro(
          "totals",
          [](BoundNotifier& self) {
            const OneCall::Turn turn(self.one_call, kOperation);
            return self.notifier.totals();
          },
          "The totals of the last call, -1 where the host does not know them.")
      .def_prop_ro("rank", [](const BoundNotifier& self) { return self.notifier.rank(); })
      .def_prop_ro("world_size",
                   [](const BoundNotifier& self) { return self.notifier.topology().world_size; })
      .def_prop_ro("local_world_size", [](const BoundNotifier& self) {
        return self.notifier.topology().local_world_size;
      });
}

// A world of one rank, and counts of no tokens.
Backend supports_expert_parallel_notify(Shape& shape, const RunOptions& options) {
  const int experts = shape.take<int>("experts", 8);
  const std::int64_t channels = shape.take("channels", 1);
  shape.done();
  const Unlocked unlocked;
  ep::InProcessWorld world(1);
  ep::Notifier notifier(world.transport(0), world.store(),
                        {.experts = experts, .device = shape.device, .backend = options.backend});
  const std::int64_t bytes = size_of(DType::i32) * std::max(experts, 1);
  const std::unique_ptr<void, std::function<void(void*)>> zeros(
      allocate_on(shape.device, static_cast<std::size_t>(bytes)),
      [&](void* memory) { free_on(shape.device, memory); });
  fill_zero(shape.device, zeros.get(), static_cast<std::size_t>(bytes));
  const auto counts = [&](std::int64_t size) {
    return ConstTensorView(zeros.get(), DType::i32, {size}, shape.device);
  };
  return notifier.notify({.tokens_per_rank = counts(1),
                          .tokens_per_node = counts(1),
                          .tokens_per_expert = counts(experts),
                          .is_token_in_rank = without_memory(DType::u8, {0, 1}, shape.device),
                          .channels = channels});
}

}  // namespace winnow::python
