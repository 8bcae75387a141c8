// Python binding of sparse_mla::forward.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/sparse_mla/forward/forward_contract.h"
#include "winnow/sparse_mla/problem_py.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::kForward> kForward(
    "def forward(q: T, kv: T, indices: T | None, *, scale: float | None = None, "
    "topk_length: T | None = None, attn_sink: T | None = None, key_start: T | None = None, "
    "key_end: T | None = None, q_start: int | None = None, k_stride: int = 1, "
    "extra_kv: T | None = None, extra_indices: T | None = None, "
    "extra_topk_length: T | None = None, extra_key_start: T | None = None, "
    "extra_key_end: T | None = None, extra_k_stride: int = 1, "
    "in_list_order: bool = False, flash_mla_lse: bool = False, "
    "out: T | tuple[T | None, T | None, T | None] | None = None, workspace: T | None = None, "
    "stream: Stream = None, backend: str | None = None) -> tuple[T, T, T]");

nb::object forward(const Arguments<kForward>& given) {
  Call call = given.call();
  sparse_mla::ForwardArgs args = given.read(call);
  auto [result, max_logits, lse] = split_out<3>(kForward.operation, given.get<"out">());
  given.output<&sparse_mla::ForwardArgs::out>(call, args, result);
  given.output<&sparse_mla::ForwardArgs::max_logits>(call, args, max_logits);
  given.output<&sparse_mla::ForwardArgs::lse>(call, args, lse);
  given.run(call, args, sparse_mla::forward, sparse_mla::forward_workspace_bytes);
  return nb::make_tuple(result, max_logits, lse);
}

constexpr const char* kDoc = R"(Attention of every query over the cache rows chosen for it.

    x[i,h,j] = scale * dot(q[i,h,:], kv[indices[i,j],:])     over the visible entries j
    max_logits = max_j x,  lse = log sum_j exp(x)            natural logarithm, without the sink
    out = sum_j exp(x - lse') * kv[indices[i,j], :512]       lse' = log(exp(lse) + exp(sink))

An entry is visible if j < topk_length[i], 0 <= t = indices[i,j] < s_kv and, with q_start,
(t + 1) * k_stride <= q_start + i + 1. A query with nothing visible gets out = 0,
max_logits = -inf and lse = -inf, or with flash_mla_lse +inf. With extra_kv the sums run over its
visible entries, too, which follow the same rules.

Args:
    out: [s_q, h_q, 512] as q to write into, or a tuple (out, max_logits, lse) of which any may
        be None. Results that are not passed are allocated, of q's kind and on q's device. Outputs
        that overlap inputs or each other are refused.
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes,
        that make calls faster whose queries do not share out evenly. New memory for torch's
        tensors if None; none for others. The results are the same, bit for bit.
    stream: for CUDA tensors: a handle or an object with __cuda_stream__, cuda_stream or ptr;
        None is torch's current stream for its tensors, else the default stream. New tensors of
        torch belong to that stream, as if it were the current one.
    backend: forces one of winnow.backends() by name.

Returns:
    (out, max_logits, lse); the last two are [s_q, h_q], float32.

Raises:
    ValueError: an argument is not as described; nothing was written.
    winnow.Error: no backend can run it here.

The last dimension is contiguous, the other strides are arbitrary; tensors are never copied. On a
GPU the call returns when the work is queued, without synchronisation. No gradient is recorded:
see winnow.torch.sparse_mla_attention.)";

const Operation<kForward, forward, kDoc, sparse_mla::forward, extra_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
