// Python binding of paged_xl::position_term.
#include "winnow/paged_xl/position_term/position_term.h"
#include "winnow/paged_xl/position_term/position_term_fields.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<paged_xl::PositionTermArgs> kPositionTerm(
    "paged_xl::position_term",
    "def position_term(query: T, pos_bias_v: T, r: T, context_lens: T, *, "
    "out: T | None = None, check: bool = False, stream: Stream = None, "
    "backend: str | None = None) -> T",
    "query: T[num_seqs, num_heads=16, head_size=128], pos_bias_v: T[num_heads, head_size], "
    "r: T[num_heads, 1, head_size], context_lens: i32[num_seqs], "
    "matrix_bd: T[num_seqs, num_heads, 1]");

nb::object position_term(const Arguments<kPositionTerm>& given) {
  Call call = given.call();
  paged_xl::PositionTermArgs args = given.read(call);
  nb::object out = given.get<"out">();
  // The library leaves columns past a context as they are, so new memory starts as zeros.
  args.matrix_bd =
      call.output("matrix_bd", out, args.query.dtype(),
                  {size_of_dim(args.query, 0), size_of_dim(args.query, 1), size_of_dim(args.r, 1)},
                  Call::Fill::zero);
  call.run([&](const RunOptions& options) { paged_xl::position_term(args, options); });
  return out;
}

constexpr const char* kDoc = R"(The position term of one decode step, as attention() takes it.

    matrix_bd[s,h,j] = dot(query[s,h] + pos_bias_v[h], r[h, context_lens[s] - 1 - j])

for every token j < context_lens[s]; unscaled. The step's own key has been appended already and has
distance 0.

Args:
    query: [num_seqs, num_heads, head_size], float32, float16, bfloat16 or, on the CPU, float64.
    pos_bias_v: [num_heads, head_size] or [num_seqs, num_heads, head_size], as query.
    r: [num_heads, max_distance, head_size], as query: projected embedding of each distance.
    context_lens: [num_seqs], int32: cached tokens, the step's own included.
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
