// Python binding of paged_xl::position_term.
#include "winnow/paged_xl/position_term/position_term.h"
#include "winnow/paged_xl/position_term/position_term_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<paged_xl::kPositionTerm> kPositionTerm(
    "def position_term(query: T, pos_bias_v: T, r: T, context_lens: T, *, "
    "out: T | None = None, check: bool = False, stream: Stream = None, "
    "backend: str | None = None) -> T");

nb::object position_term(const Arguments<kPositionTerm>& given) {
  Call call = given.call();
  paged_xl::PositionTermArgs args = given.read(call);
  nb::object out = given.get<"out">();
  // The library leaves columns past a context as they are, so new memory starts as zeros.
  args.matrix_bd =
      call.output("matrix_bd", out, args.query.dtype(),
                  {size_of_dim(args.query, 0), size_of_dim(args.query, 1), size_of_dim(args.r, 1)},
                  Call::Fill::zero);
  given.run(call, args, paged_xl::position_term);
  return out;
}

constexpr const char* kDoc = R"(The position term of one decode step, as attention() takes it.

    matrix_bd[s,h,j] = dot(query[s,h] + pos_bias_v[h], r[h, context_lens[s] - 1 - j])

for every token j < context_lens[s]; unscaled. The step's own key has been appended already and has
distance 0.

Args:
    out: [num_seqs, num_heads, columns], as query or float32 (not with float64), to write into;
        columns past a context keep their values. New, as query, with max_distance columns, zero
        past each context, if None. It must not overlap an input.
    check: refuse a length that r or out do not hold also on a GPU, as in attention().
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    matrix_bd.

Raises:
    ValueError: an argument is not as described; on the CPU and with check also a length that r
        or out do not hold. Nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kPositionTerm, position_term, kDoc, paged_xl::position_term> kRegistered;

}  // namespace
}  // namespace winnow::python
