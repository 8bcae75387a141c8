// Python binding of compressor::step.
#include "winnow/compressor/step/step.h"
#include "winnow/compressor/step/step_fields.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<compressor::StepArgs> kStep(
    "compressor::step",
    "def step(kv: T, gate: T, position_bias: T, cu_seqlens: T, first_position: T, "
    "state: T, state_slots: T, *, overlap: bool = False, norm_weight: T | None = None, "
    "eps: float | None = None, cos: T | None = None, sin: T | None = None, "
    "hadamard: bool = False, out: T | None = None, stream: Stream = None, "
    "backend: str | None = None) -> T",
    "kv: T[num_tokens, d=512], gate: T[num_tokens, d], position_bias: R[4, d], "
    "cu_seqlens: i32[2], first_position: i32[1], state_slots: i32[1], state: R[1, 4, 2*d], "
    "rows: T[num_tokens, d]");

nb::object step(const Arguments<kStep>& given) {
  Call call = given.call();
  compressor::StepArgs args = given.read(call);
  nb::object out = given.get<"out">();
  args.rows =
      call.output("out", out, args.kv.dtype(),
                  {size_of_dim(args.kv, 0), size_of_dim(args.kv, 1) / (args.overlap ? 2 : 1)},
                  Call::Fill::zero);
  call.run([&](const RunOptions& options) { compressor::step(args, options); });
  return out;
}

constexpr const char* kDoc = R"(forward() for tokens that come one by one, or some at a time.

Where a new token is the last of its window, its place in the result is the window's row, with the
bits that forward() gives for the whole sequence; other rows are not written. The token at position
p leaves its kv and its gate with position_bias at state[slot, p % ring]. A state needs no
initialisation. Tokens are undone by a first_position that is not behind them in the next call, up
to ring - (tokens of a window) + 1 at a time.

Args:
    kv, gate: [tokens, d], or [tokens, 2 * d] with overlap: the new tokens, as in forward().
    cu_seqlens: [n + 1], int32: where the new tokens of each sequence begin, and their number.
    first_position: [n], int32: the position of the first of them; the first token ever has 0.
    state: [states, ring, 2 * columns of kv], float32 (float64 with float64), read and written;
        ring is at least the tokens of a window: ratio, or 2 * ratio with overlap.
    state_slots: [n], int32: the state of each sequence; with a negative one it is left out.
    position_bias, overlap, norm_weight, eps, cos, sin, hadamard, stream, backend: as in forward().
    out: [tokens, d], as kv or float32, to write into; new, as kv and of zeros, if None.

Returns:
    rows: [tokens, d].

Raises:
    ValueError, winnow.Error: as forward().)";

const Operation<kStep, step, kDoc, compressor::step> kRegistered;

}  // namespace
}  // namespace winnow::python
