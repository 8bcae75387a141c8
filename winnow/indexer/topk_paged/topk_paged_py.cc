// Python binding of indexer::topk_paged.

#include "winnow/indexer/ties_py.h"
#include "winnow/indexer/topk_paged/pages_py.h"
#include "winnow/indexer/topk_paged/topk_paged.h"
#include "winnow/indexer/topk_paged/topk_paged_contract.h"

namespace winnow::python {
namespace {

constexpr Declaration<indexer::kTopkPaged> kTopkPaged(
    "def topk_paged(q: T, pages: T, weights: T, block_tables: T, context_lens: T, "
    "topk: int, *, positions: bool = False, ties: str = 'smaller', "
    "return_scores: bool = False, out: tuple[T | None, T | None, T | None] | None = None, "
    "workspace: T | None = None, stream: Stream = None, backend: str | None = None) "
    "-> tuple[T, T, T] if return_scores or out else tuple[T, T]");

nb::object topk_paged(const Arguments<kTopkPaged>& given) {
  Call call = given.call();
  indexer::TopkPagedArgs args = given.read(call);
  const std::int64_t count = topk_argument(given);
  const std::int64_t b = size_of_dim(args.q, 0), s_q = size_of_dim(args.q, 1);
  auto [indices, length, scores] = split_out<3>(kTopkPaged.operation, given.get<"out">());
  args.indices = call.output("indices", indices, DType::i32, {b, s_q, count});
  given.output<&indexer::TopkPagedArgs::length>(call, args, length);
  const bool scored = given.get<"return_scores", bool>() || !scores.is_none();
  if (scored) given.output<&indexer::TopkPagedArgs::scores>(call, args, scores);
  given.run(call, args, indexer::topk_paged, indexer::topk_paged_workspace_bytes);
  if (!scored) return nb::make_tuple(indices, length);
  return nb::make_tuple(indices, length, scores);
}

constexpr const char* kDoc =
    R"(topk() for decode steps, over a paged cache of 8-bit keys.

    I[i,j,t] = k_scale[t] * sum over h of weights[i,j,h] * max(0, dot(q[i,j,h,:], k[t,:]))

k[t] and k_scale[t] are row t % 64 of page block_tables[i, t // 64], as quantize() writes them.
Query j of sequence i sees the positions t < context_lens[i] - s_q + j + 1: the queries are the last
rows of their sequence. If context_lens is [b, s_q], it sees the positions t < context_lens[i,j], as
where a row stands for several tokens. Lengths are clamped to those of the table; the rows of a page
outside of [0, num_pages) are absent. The choice is exact and does not depend on the rest of the
batch.

Args:
    topk: rows to choose, 1 or more.
    return_scores: also return the scores of the chosen rows.
    out: a tuple (indices, length, scores) to write into, of which any may be None. They must not
        overlap inputs or each other.
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes; the
        error for a smaller one gives the exact number. If None, it is allocated by torch for torch
        tensors. The CPU does not use it.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (indices, length), with return_scores (indices, length, scores). indices is [b, s_q, topk],
    int32: slots, page * 64 + row of the page, in ascending order of position, then -1; length is
    [b, s_q], int32: the smaller of topk and the number of visible rows; scores is [b, s_q, topk],
    float32, followed by -inf.

Raises:
    ValueError: an argument is not as described; nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kTopkPaged, topk_paged, kDoc, indexer::topk_paged, pages_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
