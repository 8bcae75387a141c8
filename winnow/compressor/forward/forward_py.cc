// Python binding of compressor::forward.
#include "winnow/compressor/forward/forward.h"
#include "winnow/compressor/forward/forward_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<compressor::kForward> kForward(
    "def forward(kv: T, gate: T, position_bias: T, cu_seqlens: T, cu_rows: T, *, "
    "overlap: bool = False, norm_weight: T | None = None, eps: float | None = None, "
    "cos: T | None = None, sin: T | None = None, first_position: T | None = None, "
    "hadamard: bool = False, num_rows: int | None = None, return_rstd: bool = False, "
    "out: T | tuple[T | None, T | None] | None = None, stream: Stream = None, "
    "backend: str | None = None) -> tuple[T, T] if return_rstd else T");

nb::object forward(const Arguments<kForward>& given) {
  Call call = given.call();
  compressor::ForwardArgs args = given.read(call);
  const std::int64_t ratio = std::max<std::int64_t>(size_of_dim(args.position_bias, 0), 1);
  const auto num_rows = given.get<"num_rows", std::optional<std::int64_t>>();
  // The table refuses a kv of another rank, whatever num_rows says.
  const std::int64_t tokens = args.kv.rank() == 2 ? args.kv.size(0) : 0;
  if (args.kv.rank() == 2 && num_rows.has_value() && (*num_rows < 0 || *num_rows > tokens)) {
    throw Error(ErrorCode::invalid_argument, kForward.operation, "num_rows",
                "0 to " + std::to_string(tokens) + ", the tokens of kv", std::to_string(*num_rows));
  }
  const std::int64_t rows = args.kv.rank() == 2 ? num_rows.value_or(tokens / ratio) : 0;
  auto [out, rstd] = split_out<2>(kForward.operation, given.get<"out">());
  const bool made = out.is_none();
  args.rows = call.output("out", out, args.kv.dtype(),
                          {rows, size_of_dim(args.kv, 1) / (args.overlap ? 2 : 1)});
  const bool returned = given.get<"return_rstd", bool>();
  if (returned || !rstd.is_none()) given.output<&compressor::ForwardArgs::rstd>(call, args, rstd);
  try {
    given.run(call, args, compressor::forward);
  } catch (const Error& error) {
    if (!made || error.argument() != "rows") throw;
    const ErrorDetails& details = error.details();  // of rows that only num_rows says
    throw Error(error.code(), kForward.operation, "num_rows", details.wanted, details.got);
  }
  return returned ? nb::object(nb::make_tuple(out, rstd)) : out;
}

constexpr const char* kDoc =
    R"(Compresses every few tokens to one row, as DeepSeek-V4 does.

A sequence of S tokens has S // ratio rows; the tokens behind them have none. In each column on its
own, with the tokens j of window w:

    g[j] = gate[j] + position_bias[j % ratio]
    row[w] = sum over j of softmax(g)[j] * kv[j]

With overlap, kv, gate and position_bias have 2 * d columns: the softmax of a window is over the
first d columns of the window before, if there is one, and the last d columns of its own. Then,
where asked for, and in this order: RMS norm with norm_weight; rotation of the last 2 * pairs
columns, neighbours as pairs, by cos and sin at the position of the window's first token; the
normalised Hadamard transform. Sums are formed in float32 and rounded once.

Args:
    num_rows: the last of cu_rows; tokens // ratio if None, which is right for one sequence.
    return_rstd: also return rstd, which backward() gets; only with norm_weight.
    out: rows to write into, [rows, d], as kv or float32, or a tuple (rows, rstd), of which either
        may be None; new, rows as kv, if None.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    rows: [rows, d], with return_rstd (rows, rstd). rstd is [rows], float32:
    1 / sqrt(mean(row^2) + eps) of each row before norm. No gradient is recorded.

Raises:
    ValueError: an argument is not as described; nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kForward, forward, kDoc, compressor::forward> kRegistered;

}  // namespace
}  // namespace winnow::python
