// Python binding of sparse_mla::backward.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/backward/backward_fields.h"
#include "winnow/sparse_mla/forward/forward.h"  // kValueDim

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::BackwardArgs> kBackward(
    "sparse_mla::backward",
    "def backward(q: T, kv: T, indices: T, out: T | None, lse: T, d_out: T, *, "
    "delta: T | None = None, scale: float | None = None, topk_length: T | None = None, "
    "attn_sink: T | None = None, q_start: int | None = None, k_stride: int = 1, "
    "deterministic: bool = False, dq: T | None = None, dkv: T | None = None, "
    "d_sink: T | None = None, workspace: T | None = None, stream: Stream = None, "
    "backend: str | None = None) -> tuple[T, T, T] if attn_sink or d_sink else tuple[T, T]",
    "q: T[s_q, h_q=64, d_qk=576], kv: T[s_kv, 1, d_qk], indices: i32[s_q, 1, topk=64], "
    "out: T[s_q, h_q, 512], lse: R[s_q, h_q], d_out: T[s_q, h_q, 512], "
    "dq: R[s_q, h_q, d_qk], dkv: R[s_kv, 1, d_qk]");

nb::object backward(const Arguments<kBackward>& given) {
  Call call = given.call();
  sparse_mla::BackwardArgs args = given.read(call);
  const std::int64_t h_q = size_of_dim(args.q, 1), d_qk = size_of_dim(args.q, 2);
  const DType real = accumulator_of(args.q.dtype());
  nb::object dq = given.get<"dq">(), dkv = given.get<"dkv">(), d_sink = given.get<"d_sink">();
  args.dq = call.output("dq", dq, args.q.dtype(), {size_of_dim(args.q, 0), h_q, d_qk});
  args.dkv = call.output("dkv", dkv, real, {size_of_dim(args.kv, 0), 1, d_qk});
  const bool with_sink = args.attn_sink.present() || !d_sink.is_none();
  if (with_sink) args.d_sink = call.output("d_sink", d_sink, real, {h_q});
  nb::object workspace = given.get<"workspace">();
  args.workspace = call.workspace(workspace, [&](const RunOptions& options) {
    return sparse_mla::backward_workspace_bytes(args, options);
  });
  call.run([&](const RunOptions& options) { sparse_mla::backward(args, options); });
  return with_sink ? nb::make_tuple(dq, dkv, d_sink) : nb::make_tuple(dq, dkv);
}

constexpr const char* kDoc = R"(Gradients of forward()'s out.

    P = exp(x - lse'),  dP[i,h,j] = dot(d_out[i,h,:], kv[indices[i,j], :512])
    dS = P * (dP - delta) * scale,  delta[i,h] = dot(out[i,h,:], d_out[i,h,:])
    dq[i,h,:] = sum_j dS * kv[indices[i,j], :]
    dkv[t,:] = sum over all (i,h,j) with indices[i,j] = t of dS * q[i,h,:],
               and on its first 512 columns + P * d_out[i,h,:]
    d_sink[h] = -sum_i exp(attn_sink[h] - lse'[i,h]) * delta[i,h]

Args:
    q, kv, indices, scale, topk_length, attn_sink, q_start, k_stride, stream, backend: as in
        forward().
    out: [s_q, h_q, 512], as q: the result of forward(); may be None if delta is given.
    lse: [s_q, h_q], float32, natural logarithm, without the sink: the result of forward().
    d_out: [s_q, h_q, 512], as q.
    delta: [s_q, h_q], float32; computed if None.
    deterministic: bitwise equal results run after run (on the CPU they always are).
    dq: [s_q, h_q, d_qk], as q or float32, to write into; new, as q, if None.
    dkv: [s_kv, 1, d_qk], float32 or as q (rounded once, at the end); new, float32, if None.
    d_sink: [h_q], float32; new if None and attn_sink is given.
        dq, dkv and d_sink must not overlap inputs or each other.
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes,
        about s_kv * d_qk * 4 + s_q * (topk + h_q) * 4 and 39 MB, with more than 64 heads or
        deterministic at most 1.1 GB and two float32 copies of dkv; the error for a smaller one
        gives the exact number. If None, it is allocated by torch for torch tensors, else from the
        stream's memory pool. The CPU does not use it.

Returns:
    (dq, dkv), or (dq, dkv, d_sink) if a sink is given. Every element is written.

Raises:
    ValueError, winnow.Error: as forward().)";

const Operation<kBackward, backward, kDoc, sparse_mla::backward> kRegistered;

}  // namespace
}  // namespace winnow::python
