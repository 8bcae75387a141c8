// Python binding of indexer::scores.

#include "winnow/indexer/scores/scores.h"
#include "winnow/indexer/scores/scores_fields.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<indexer::ScoresArgs> kScores(
    "indexer::scores",
    "def scores(q: T, k: T, weights: T, indices: T | None = None, *, "
    "k_scale: T | None = None, key_start: T | None = None, key_end: T | None = None, "
    "q_start: int | None = None, k_stride: int = 1, out: T | None = None, "
    "stream: Stream = None, backend: str | None = None) -> T");

nb::object scores(const Arguments<kScores>& given) {
  Call call = given.call();
  indexer::ScoresArgs args = given.read(call);
  const std::int64_t columns =
      args.indices.present() ? size_of_dim(args.indices, 1) : size_of_dim(args.k, 0);
  nb::object out = given.get<"out">();
  args.scores = call.output("scores", out, DType::f32, {size_of_dim(args.q, 0), columns});
  call.run([&](const RunOptions& options) { indexer::scores(args, options); });
  return out;
}

constexpr const char* kDoc = R"(The lightning indexer's scores, at chosen rows or of all of them.

    scores[i,j] = I[i, indices[i,j]], or I[i,t] of every row without indices

with the score I and the visibility of topk(); -inf where an index names no row or one that the
query does not see. Dense scores are those that topk() compares, bit for bit.

Args:
    q, k, weights, k_scale, key_start, key_end, q_start, k_stride, stream, backend: as in topk().
    indices: [s_q, topk], int32: the rows to score; None for all.
    out: [s_q, topk] or [s_q, s_k], float32, to write into; new if None. It shares memory with no
        input.

Returns:
    scores, float32. No gradient is recorded.

Raises:
    ValueError, winnow.Error: as topk().)";

Backend supports(Shape& shape, const RunOptions& options) {
  const std::int64_t s_q = shape.take("s_q", 1), h = shape.take("h", 64);
  const std::int64_t s_k = shape.take("s_k", 1), d = shape.take("d", 128);
  shape.done();
  const bool scaled = shape.dtype == DType::f8_e4m3;
  return indexer::scores({.q = shape.view(shape.dtype, {s_q, h, d}),
                          .k = shape.view(shape.dtype, {s_k, d}),
                          .weights = shape.view(DType::f32, {s_q, h}),
                          .k_scale = scaled ? shape.view(DType::f32, {s_k}) : TensorView(),
                          .scores = shape.view(DType::f32, {s_q, s_k})},
                         options);
}

const Operation<kScores, scores, kDoc> kRegistered(supports);

}  // namespace
}  // namespace winnow::python
