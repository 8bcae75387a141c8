// Python binding of expert_parallel::layout.
#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/expert_parallel/layout/layout_fields.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<expert_parallel::LayoutArgs> kLayout(
    "expert_parallel::layout",
    "def layout(expert_indices: T, experts: int, world_size: int, local_world_size: int, "
    "*, out: tuple[T | None, T | None, T | None, T | None] | None = None, "
    "stream: Stream = None, backend: str | None = None) -> tuple[T, T, T, T]",
    "sizes: [world_size, local_world_size=world_size, experts=8*world_size], "
    "expert_indices: i32[0, topk=8], is_token_in_rank: u8[0, world_size]");

nb::object layout(const Arguments<kLayout>& given) {
  Call call = given.call();
  expert_parallel::LayoutArgs args = given.read(call);
  // Sizes that make no sense are the library's to refuse.
  const auto size = [](std::int64_t wanted) { return wanted > 0 ? wanted : 0; };
  const std::int64_t ranks = args.world_size, local = args.local_world_size;
  const std::int64_t nodes = local > 0 ? ranks / local : 0;
  auto [per_rank, per_node, per_expert, in_rank] =
      split_out<4>(kLayout.operation, given.get<"out">());
  args.tokens_per_rank = call.output("tokens_per_rank", per_rank, DType::i32, {size(ranks)});
  args.tokens_per_node = call.output("tokens_per_node", per_node, DType::i32, {size(nodes)});
  args.tokens_per_expert =
      call.output("tokens_per_expert", per_expert, DType::i32, {size(args.experts)});
  args.is_token_in_rank = call.output_flags("is_token_in_rank", in_rank,
                                            {size_of_dim(args.expert_indices, 0), size(ranks)});
  call.run([&](const RunOptions& options) { expert_parallel::layout(args, options); });
  return nb::make_tuple(per_rank, per_node, per_expert, in_rank);
}

constexpr const char* kDoc = R"(Counts the tokens that go to each rank, node and expert.

Expert x lives on rank x / (experts / world_size), rank r on node r / local_world_size. An index
equal to experts or to -1 is no expert. A token that names an expert twice counts twice for the
expert, once for rank and node.

Args:
    expert_indices: [n, K], int32, K from 1 to 32: the experts of each token.
    experts: E, a multiple of world_size.
    world_size: W, a multiple of local_world_size.
    local_world_size: L, ranks per node.
    out: None, or a tuple of the four results to write into, of which any may be None.
        They must not overlap the input or each other.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (tokens_per_rank [W], tokens_per_node [W/L], tokens_per_expert [E], is_token_in_rank [n, W]):
    int32, each token once per rank and node and each pair once per expert; the last is bool.

Raises:
    ValueError: an argument is not as described; on the CPU also any other index, with token, k and
        value. Nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kLayout, layout, kDoc, expert_parallel::layout> kRegistered;

}  // namespace
}  // namespace winnow::python
