// Python binding of compressor::step.
#include "winnow/compressor/step/step.h"
#include "winnow/compressor/step/step_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<compressor::kStep> kStep(
    "def step(kv: T, gate: T, position_bias: T, cu_seqlens: T, first_position: T, "
    "state: T, state_slots: T, *, overlap: bool = False, norm_weight: T | None = None, "
    "eps: float | None = None, cos: T | None = None, sin: T | None = None, "
    "hadamard: bool = False, cache: T | None = None, pages: T | None = None, "
    "slots: T | None = None, power_of_two: bool = False, out: T | None = None, "
    "stream: Stream = None, backend: str | None = None) -> None if slots else T");

nb::object step(const Arguments<kStep>& given) {
  Call call = given.call();
  compressor::StepArgs args = given.read(call);
  nb::object out = given.get<"out">(), cache = given.get<"cache">(), pages = given.get<"pages">();
  args.cache = call.in_out("cache", cache);
  args.pages = call.in_out("pages", pages);
  const bool stored = args.slots.present();
  if (stored) {
    args.rows = call.in_out("out", out);
  } else {
    args.rows =
        call.output("out", out, args.kv.dtype(),
                    {size_of_dim(args.kv, 0), size_of_dim(args.kv, 1) / (args.overlap ? 2 : 1)},
                    Call::Fill::zero);
  }
  given.run(call, args, compressor::step);
  return stored ? nb::none() : out;
}

constexpr const char* kDoc = R"(forward() for tokens that come one by one, or some at a time.

Where a new token is the last of its window, its place in the result is the window's row, with the
bits that forward() gives for the whole sequence; other rows are not written. The token at position
p leaves its kv and its gate with position_bias at state[slot, p % ring]. A state needs no
initialisation. Tokens are undone by a first_position that is not behind them in the next call, up
to ring - (tokens of a window) + 1 at a time.

With slots, rows are stored in the same call, with the bytes that sparse_mla.store() writes to cache
for the rows in bfloat16, or indexer.quantize() to pages for the rows. Slots of tokens that complete
no window are not looked at.

Args:
    out: [tokens, d], as kv or float32, to write into; if None, new, as kv and of zeros, or with
        slots none.
    stream, backend: as in forward().

Returns:
    rows: [tokens, d]; None with slots.

Raises:
    ValueError, winnow.Error: as forward().)";

// cu_seqlens has a number more than sequences in the call that winnow.supports() asks about.
constexpr auto sequences_for_supports = [](Shape& shape, compressor::StepArgs& args) {
  args.cu_seqlens = shape.view(DType::i32, {shape.size("n") + 1});
};

const Operation<kStep, step, kDoc, compressor::step, sequences_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
