// Python binding of indexer::scores.

#include "winnow/indexer/scale_py.h"
#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/scores/scores_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<indexer::kScores> kScores(
    "def scores(q: T, k: T, weights: T, indices: T | None = None, *, "
    "k_scale: T | None = None, key_start: T | None = None, key_end: T | None = None, "
    "q_start: int | None = None, k_stride: int = 1, clean: bool = True, width: int | None = None, "
    "out: T | None = None, stream: Stream = None, backend: str | None = None) -> T");

nb::object scores(const Arguments<kScores>& given) {
  Call call = given.call();
  indexer::ScoresArgs args = given.read(call);
  indexer::check_range_of_width(Check(kScores.operation), args.width);
  nb::object out = given.get<"out">();
  given.output<&indexer::ScoresArgs::scores>(call, args, out);
  given.run(call, args, indexer::scores);
  return out;
}

constexpr const char* kDoc = R"(The lightning indexer's scores, for chosen rows or for all rows.

    scores[i,j] = I[i, indices[i,j]], or I[i,t] of every row without indices, or with a width
    scores[i,c] = I[i, key_start[i] + c]

with the score I and the visibility of topk(). The score is -inf if the row is outside of [0, s_k)
or the query does not see it. Dense scores are bitwise those that topk() compares.

Args:
    out: [s_q, topk], [s_q, width] or [s_q, s_k], float32, to write into; new if None. It must not
        overlap an input.
    stream, backend: as in topk().

Returns:
    scores, float32. No gradient is recorded. If clean is False, dense scores of rows that a query
    does not see are -inf or, in a new result, anything.

Raises:
    ValueError, winnow.Error: as topk().)";

const Operation<kScores, scores, kDoc, indexer::scores, scale_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
