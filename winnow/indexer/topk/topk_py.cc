// Python binding of indexer::topk.

#include "winnow/indexer/scale_py.h"
#include "winnow/indexer/ties_py.h"
#include "winnow/indexer/topk/topk.h"
#include "winnow/indexer/topk/topk_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<indexer::kTopk> kTopk(
    "def topk(q: T, k: T, weights: T, topk: int, *, k_scale: T | None = None, "
    "key_start: T | None = None, key_end: T | None = None, q_start: int | None = None, "
    "k_stride: int = 1, ties: str = 'smaller', return_scores: bool = False, "
    "out: tuple[T | None, T | None, T | None] | None = None, workspace: T | None = None, "
    "stream: Stream = None, backend: str | None = None) "
    "-> tuple[T, T, T] if return_scores or out else tuple[T, T]");

nb::object topk(const Arguments<kTopk>& given) {
  Call call = given.call();
  indexer::TopkArgs args = given.read(call);
  const std::int64_t count = topk_argument(given);
  auto [indices, length, scores] = split_out<3>(kTopk.operation, given.get<"out">());
  args.indices = call.output("indices", indices, DType::i32, {size_of_dim(args.q, 0), count});
  given.output<&indexer::TopkArgs::length>(call, args, length);
  const bool scored = given.get<"return_scores", bool>() || !scores.is_none();
  if (scored) given.output<&indexer::TopkArgs::scores>(call, args, scores);
  given.run(call, args, indexer::topk, indexer::topk_workspace_bytes);
  if (!scored) return nb::make_tuple(indices, length);
  return nb::make_tuple(indices, length, scores);
}

constexpr const char* kDoc =
    R"(The topk rows with the largest scores of the lightning indexer, for every query.

    I[i,t] = k_scale[t] * sum over h of weights[i,h] * max(0, dot(q[i,h,:], k[t,:]))

The choice is exact for the computed scores and the same in every run. Memory is bounded
whatever s_q * s_k is.
Query i sees rows [max(0, key_start[i]), min(s_k, key_end[i])) that, with q_start, satisfy
(t + 1) * k_stride <= q_start + i + 1.

Args:
    topk: rows to choose, 1 or more.
    return_scores: also return the scores of the chosen rows.
    out: a tuple (indices, length, scores) to write into, of which any may be None. They must not
        overlap inputs or each other.
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes, at
        most 256 MiB where topk is at most 2**19; the error for too few gives the exact number. None
        takes them from torch's allocator for tensors of torch, else from the stream's memory pool.
        The CPU does not use it.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (indices, length), with return_scores (indices, length, scores). indices is [s_q, topk], int32:
    the chosen rows in ascending order, then -1; length is [s_q], int32: the smaller of topk and the
    number of visible rows; scores is [s_q, topk], float32, followed by -inf.

Raises:
    ValueError: an argument is not as described; nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kTopk, topk, kDoc, indexer::topk, scale_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
