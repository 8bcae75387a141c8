// Python binding of sparse_mla::distribution.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/distribution/distribution_contract.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::kDistribution> kDistribution(
    "def distribution(q: T, kv: T, indices: T | None, lse: T, *, "
    "scale: float | None = None, topk_length: T | None = None, key_start: T | None = None, "
    "key_end: T | None = None, q_start: int | None = None, k_stride: int = 1, "
    "out: T | None = None, stream: Stream = None, backend: str | None = None) -> T");

nb::object distribution(const Arguments<kDistribution>& given) {
  Call call = given.call();
  sparse_mla::DistributionArgs args = given.read(call);
  nb::object out = given.get<"out">();
  given.output<&sparse_mla::DistributionArgs::attn_sum>(call, args, out, {}, "out");
  call.run([&](const RunOptions& options) { sparse_mla::distribution(args, options); });
  return out;
}

constexpr const char* kDoc = R"(The attention weight of each chosen row, summed over all heads.

    attn_sum[i,j] = sum over h of exp(x[i,h,j] - lse[i,h]),  0 for entries that are not visible

with x and visibility as in forward(). If lse is the result of forward() on the same entries, each
row sums to h_q. DeepSeek Sparse Attention trains its indexer to reproduce this distribution.

Args:
    out: [s_q, topk], float32, to write into; new if None. It must not overlap an input.
    stream, backend: as in forward().

Returns:
    attn_sum, [s_q, topk], float32; without indices [s_q, s_kv], 0 for rows that are not visible.

Raises:
    ValueError, winnow.Error: as forward().)";

const Operation<kDistribution, distribution, kDoc, sparse_mla::distribution> kRegistered;

}  // namespace
}  // namespace winnow::python
