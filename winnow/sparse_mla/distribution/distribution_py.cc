// Python binding of sparse_mla::distribution.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/distribution/distribution_contract.h"
#include "winnow/sparse_mla/problem_py.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::kDistribution> kDistribution(
    "def distribution(q: T, kv: T, indices: T | None, lse: T, *, "
    "scale: float | None = None, topk_length: T | None = None, key_start: T | None = None, "
    "key_end: T | None = None, q_start: int | None = None, k_stride: int = 1, "
    "extra_kv: T | None = None, extra_indices: T | None = None, "
    "extra_topk_length: T | None = None, extra_key_start: T | None = None, "
    "extra_key_end: T | None = None, extra_k_stride: int = 1, "
    "out: T | tuple[T | None, T | None] | None = None, stream: Stream = None, "
    "backend: str | None = None) -> tuple[T, T] if extra_kv else T");

nb::object distribution(const Arguments<kDistribution>& given) {
  Call call = given.call();
  sparse_mla::DistributionArgs args = given.read(call);
  auto [out, extra] = split_out<2>(kDistribution.operation, given.get<"out">());
  given.output<&sparse_mla::DistributionArgs::attn_sum>(call, args, out, {}, "out");
  const bool with_extra = args.extra_kv.present() || !extra.is_none();
  if (with_extra) given.output<&sparse_mla::DistributionArgs::extra_attn_sum>(call, args, extra);
  given.run(call, args, sparse_mla::distribution);
  return with_extra ? nb::object(nb::make_tuple(out, extra)) : out;
}

constexpr const char* kDoc = R"(The attention weight of each chosen row, summed over all heads.

    attn_sum[i,j] = sum over h of exp(x[i,h,j] - lse[i,h]),  0 for entries that are not visible

with x and visibility as in forward(). If lse is the result of forward() on the same entries, each
row sums to h_q. DeepSeek Sparse Attention trains its indexer to reproduce this distribution.

Args:
    out: [s_q, topk], float32, to write into, or with extra_kv a tuple (attn_sum, extra_attn_sum),
        of which any may be None; new if None. It must not overlap an input.
    stream, backend: as in forward().

Returns:
    attn_sum, [s_q, topk], float32; without indices [s_q, s_kv], 0 for rows that are not visible.
    With extra_kv (attn_sum, extra_attn_sum); the second is that of its entries. A call with one of
    the sources alone and the lse of both gives the same part.

Raises:
    ValueError, winnow.Error: as forward().)";

const Operation<kDistribution, distribution, kDoc, sparse_mla::distribution, extra_for_supports>
    kRegistered;

}  // namespace
}  // namespace winnow::python
