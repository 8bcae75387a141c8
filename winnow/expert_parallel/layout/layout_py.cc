// Python binding of expert_parallel::layout.
#include <algorithm>

#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/expert_parallel/layout/layout_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<expert_parallel::kLayout> kLayout(
    "def layout(expert_indices: T, experts: int, world_size: int, local_world_size: int, "
    "*, out: tuple[T | None, T | None, T | None, T | None] | None = None, "
    "stream: Stream = None, backend: str | None = None) -> tuple[T, T, T, T]");

nb::object layout(const Arguments<kLayout>& given) {
  Call call = given.call();
  expert_parallel::LayoutArgs args = given.read(call);
  using Args = expert_parallel::LayoutArgs;
  auto [per_rank, per_node, per_expert, in_rank] =
      split_out<4>(kLayout.operation, given.get<"out">());
  given.output<&Args::tokens_per_rank>(call, args, per_rank);
  given.output<&Args::tokens_per_node>(call, args, per_node);
  given.output<&Args::tokens_per_expert>(call, args, per_expert);
  // No negative extent here: the library refuses such a world size in the call.
  args.is_token_in_rank = call.output_flags(
      "is_token_in_rank", in_rank,
      {size_of_dim(args.expert_indices, 0), std::max<std::int64_t>(args.world_size, 0)});
  given.run(call, args, expert_parallel::layout);
  return nb::make_tuple(per_rank, per_node, per_expert, in_rank);
}

constexpr const char* kDoc = R"(Counts the tokens that go to each rank, node and expert.

Expert x lives on rank x / (experts / world_size), rank r on node r / local_world_size. An index
equal to experts or to -1 is no expert. A token that names an expert twice counts twice for the
expert, once for rank and node.

Args:
    out: None, or a tuple of the four results to write into, of which any may be None.
        They must not overlap the input or each other.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (tokens_per_rank [W], tokens_per_node [W/L], tokens_per_expert [E], is_token_in_rank [n, W]):
    the counts are int32: of a token once per rank and node, and of each of its pairs once per
    expert; is_token_in_rank is bool.

Raises:
    ValueError: an argument is not as described; on the CPU, and in checking mode on a GPU, also an
        index below -1 or above experts, with its token, k and value. Nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kLayout, layout, kDoc, expert_parallel::layout> kRegistered;

}  // namespace
}  // namespace winnow::python
