// Python binding of indexer::quantize.
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/quantize/quantize_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<indexer::kQuantize> kQuantize(
    "def quantize(x: T, *, power_of_two: bool = False, pages: T | None = None, "
    "slots: T | None = None, out: tuple[T | None, T | None] | None = None, "
    "check: bool = False, stream: Stream = None, backend: str | None = None) "
    "-> None if pages and slots else tuple[T, T]");

nb::object quantize(const Arguments<kQuantize>& given) {
  Call call = given.call();
  indexer::QuantizeArgs args = given.read(call);
  nb::object out = given.get<"out">(), pages = given.get<"pages">();
  auto [rows, scale] = split_out<2>(kQuantize.operation, out);
  const bool paged = !pages.is_none() || args.slots.present();
  args.pages = call.in_out("pages", pages);
  const std::int64_t n = size_of_dim(args.x, 0), inner = size_of_dim(args.x, 1);
  const auto outputs = [&](std::initializer_list<std::int64_t> shape,
                           std::initializer_list<std::int64_t> scales) {
    args.rows = call.output("rows", rows, DType::f8_e4m3, shape);
    args.scale = call.output("scale", scale, DType::f32, scales);
  };
  if (paged && (!rows.is_none() || !scale.is_none())) {
    refuse_argument(kQuantize.operation, "out", "None, with pages to write to", out);
  }
  if (!paged && args.x.rank() == 3) {
    outputs({n, inner, size_of_dim(args.x, 2)}, {n, inner});
  } else if (!paged) {
    outputs({n, inner}, {n});
  }
  given.run(call, args, indexer::quantize);
  if (paged) return nb::none();
  return nb::make_tuple(rows, scale);
}

constexpr const char* kDoc =
    R"(Converts rows to float8_e4m3fn with one scale per row, as indexer keys and queries.

    scale = max(amax, 1e-4) / 448          amax: the largest magnitude of the row
    rows = round(x / scale)                to nearest even, saturating at 448

If a row contains a NaN or an infinity, the whole row and its scale become NaN, and topk() ranks it
last. Pass rows and scales of keys to topk() as k and k_scale; multiply the scales of queries into
the weights.

Args:
    out: a tuple (rows, scale) to write into, of which any may be None; rows are float8_e4m3fn,
        or uint8 with the same bits, as numpy needs, which has no such dtype.
    check: makes a GPU, too, refuse slots outside of the pages and slots of several rows, as in
        winnow.paged_xl.append(). Otherwise it skips the former and leaves a mixture in the latter.
    stream, backend: as in winnow.sparse_mla.forward().

Returns:
    (rows, scale): as x, float8_e4m3fn, and as x without its last dimension, float32; None with
    pages. No gradient is recorded.

Raises:
    ValueError: an argument is not as described; nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kQuantize, quantize, kDoc, indexer::quantize> kRegistered;

}  // namespace
}  // namespace winnow::python
