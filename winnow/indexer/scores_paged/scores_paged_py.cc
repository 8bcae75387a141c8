// Python binding of indexer::scores_paged.

#include "winnow/indexer/scores_paged/scores_paged.h"
#include "winnow/indexer/scores_paged/scores_paged_contract.h"
#include "winnow/indexer/topk_paged/pages_py.h"

namespace winnow::python {
namespace {

constexpr Declaration<indexer::kScoresPaged> kScoresPaged(
    "def scores_paged(q: T, pages: T, weights: T, block_tables: T, context_lens: T, "
    "max_context: int, *, clean: bool = True, out: T | None = None, stream: Stream = None, "
    "backend: str | None = None) -> T");

nb::object scores_paged(const Arguments<kScoresPaged>& given) {
  Call call = given.call();
  indexer::ScoresPagedArgs args = given.read(call);
  const auto columns = given.get<"max_context", std::int64_t>();
  if (columns < 0 || columns > indexer::kMostPages * indexer::kPageRows) {
    throw Error(ErrorCode::invalid_argument, kScoresPaged.operation, "max_context",
                "0 to 2^31 - 128", std::to_string(columns));
  }
  nb::object out = given.get<"out">();
  args.scores = call.output("scores", out, DType::f32,
                            {size_of_dim(args.q, 0), size_of_dim(args.q, 1), columns});
  given.run(call, args, indexer::scores_paged);
  return out;
}

constexpr const char* kDoc =
    R"(The scores that topk_paged() compares, of all positions below max_context.

    scores[i,j,t] = I[i,j,t] with the score I and the visible positions of topk_paged()

It is -inf where the page of a position is absent and, unless clean is False, behind the positions
that the query sees. The bits are those of topk_paged() and of scores() of the same keys.

Args:
    max_context: columns of the result, 0 or more; it may be more or less than the tables have
        room for.
    out: [b, s_q, max_context], float32, to write into; new if None. It must not overlap an input.
    stream, backend: as in topk_paged().

Returns:
    scores, [b, s_q, max_context], float32. If clean is False, entries behind the positions that a
    query sees are left as they are: those of a new result hold anything.

Raises:
    ValueError, winnow.Error: as topk_paged().)";

const Operation<kScoresPaged, scores_paged, kDoc, indexer::scores_paged, pages_for_supports>
    kRegistered;

}  // namespace
}  // namespace winnow::python
