// Python binding of sparse_mla::distribution.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/distribution/distribution_fields.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::DistributionArgs> kDistribution(
    "sparse_mla::distribution",
    "def distribution(q: T, kv: T, indices: T | None, lse: T, *, "
    "scale: float | None = None, topk_length: T | None = None, key_start: T | None = None, "
    "key_end: T | None = None, q_start: int | None = None, k_stride: int = 1, "
    "out: T | None = None, stream: Stream = None, backend: str | None = None) -> T",
    "q: T[s_q, h_q=64, d_qk=576], kv: T[s_kv, 1, d_qk], indices: i32[s_q, 1, topk=64], "
    "lse: R[s_q, h_q], attn_sum: R[s_q, topk]");

nb::object distribution(const Arguments<kDistribution>& given) {
  Call call = given.call();
  sparse_mla::DistributionArgs args = given.read(call);
  const std::int64_t columns = args.indices.present()
                                   ? size_of_dim(args.indices, args.indices.rank() - 1)
                                   : size_of_dim(args.kv, 0);
  nb::object out = given.get<"out">();
  args.attn_sum =
      call.output("out", out, accumulator_of(args.q.dtype()), {size_of_dim(args.q, 0), columns});
  call.run([&](const RunOptions& options) { sparse_mla::distribution(args, options); });
  return out;
}

constexpr const char* kDoc = R"(The attention weight of each chosen row, summed over all heads.

    attn_sum[i,j] = sum over h of exp(x[i,h,j] - lse[i,h]),  0 for entries that are not visible

with x and visibility as in forward(). If lse is the result of forward() on the same entries, each
row sums to h_q. DeepSeek Sparse Attention trains its indexer to reproduce this distribution.

Args:
    q, kv, indices, scale, topk_length, key_start, key_end, q_start, k_stride, stream, backend: as
        in forward().
    lse: [s_q, h_q], float32, natural logarithm, as forward() returns it; one in base 2 must be
        multiplied by ln 2 first.
    out: [s_q, topk], float32, to write into; new if None. It must not overlap an input.

Returns:
    attn_sum, [s_q, topk], float32; without indices [s_q, s_kv], 0 for rows that are not visible.

Raises:
    ValueError, winnow.Error: as forward().)";

const Operation<kDistribution, distribution, kDoc, sparse_mla::distribution> kRegistered;

}  // namespace
}  // namespace winnow::python
