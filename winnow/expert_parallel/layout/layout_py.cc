// Python binding of expert_parallel::layout.
#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/python/bindings.h"
#include "winnow/python/call.h"

namespace winnow::python {
namespace {

constexpr const char* kOperation = "expert_parallel::layout";

nb::tuple layout(nb::handle expert_indices, std::int64_t experts, std::int64_t world_size,
                 std::int64_t local_world_size, nb::handle out, nb::handle stream,
                 nb::handle backend) {
  Call call(kOperation, stream, backend);
  expert_parallel::LayoutArgs args{.expert_indices = call.input("expert_indices", expert_indices),
                                   .experts = experts,
                                   .world_size = world_size,
                                   .local_world_size = local_world_size};
  // Sizes that make no sense are the library's to refuse.
  const auto size = [](std::int64_t wanted) { return wanted > 0 ? wanted : 0; };
  const std::int64_t nodes = local_world_size > 0 ? world_size / local_world_size : 0;
  auto [ranks, node_tokens, pairs, in_rank] = split_out<4>(kOperation, out);
  args.tokens_per_rank = call.output("tokens_per_rank", ranks, DType::i32, {size(world_size)});
  args.tokens_per_node = call.output("tokens_per_node", node_tokens, DType::i32, {size(nodes)});
  args.tokens_per_expert = call.output("tokens_per_expert", pairs, DType::i32, {size(experts)});
  args.is_token_in_rank = call.output_flags(
      "is_token_in_rank", in_rank, {size_of_dim(args.expert_indices, 0), size(world_size)});
  call.run([&](const RunOptions& options) { expert_parallel::layout(args, options); });
  return nb::make_tuple(ranks, node_tokens, pairs, in_rank);
}

constexpr const char* kDoc = R"(How many tokens go to each rank, node and expert, and which where.

Expert x lives on rank x / (experts / world_size), rank r on node r / local_world_size. An index
equal to experts or to -1 is no expert. A token that names an expert twice counts twice for the
expert, once for rank and node.

Args:
    expert_indices: [n, K], int32, K from 1 to 32: the experts of each token.
    experts: E, a multiple of world_size.
    world_size: W, a multiple of local_world_size.
    local_world_size: L, ranks per node.
    out: None, or a tuple of the four results to write into, of which any may be None.
        They share memory with no input and not with each other.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (tokens_per_rank [W], tokens_per_node [W/L], tokens_per_expert [E], is_token_in_rank [n, W]):
    int32, each token once per rank and node and each pair once per expert; the last is bool.

Raises:
    ValueError: an argument is not as described; on the CPU also any other index, with token, k and
        value. Nothing was written.
    winnow.Error: no backend can do it here.)";

}  // namespace

void bind_expert_parallel_layout(nb::module_& m) {
  using namespace nb::literals;
  define(m, "layout", layout, "expert_indices"_a.none(), "experts"_a, "world_size"_a,
         "local_world_size"_a, nb::kw_only(), "out"_a = nb::none(), "stream"_a = nb::none(),
         "backend"_a = nb::none(), kDoc,
         nb::sig("def layout(expert_indices: T, experts: int, world_size: int, "
                 "local_world_size: int, *, "
                 "out: tuple[T | None, T | None, T | None, T | None] | None = None, "
                 "stream: Stream = None, backend: str | None = None) -> tuple[T, T, T, T]"));
}

Backend supports_expert_parallel_layout(Shape& shape, const RunOptions& options) {
  const std::int64_t topk = shape.take("topk", 8), world_size = shape.take("world_size", 1);
  const std::int64_t local = shape.take("local_world_size", world_size);
  const std::int64_t experts = shape.take("experts", 8 * world_size);
  shape.done();
  return expert_parallel::layout({.expert_indices = shape.view(DType::i32, {0, topk}),
                                  .experts = experts,
                                  .world_size = world_size,
                                  .local_world_size = local,
                                  .is_token_in_rank = shape.view(DType::u8, {0, world_size})},
                                 options);
}

}  // namespace winnow::python
