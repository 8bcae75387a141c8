// Python binding of sparse_mla::backward.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/backward/backward_contract.h"
#include "winnow/sparse_mla/problem_py.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::kBackward> kBackward(
    "def backward(q: T, kv: T, indices: T | None, out: T | None, lse: T, d_out: T, *, "
    "delta: T | None = None, scale: float | None = None, topk_length: T | None = None, "
    "attn_sink: T | None = None, key_start: T | None = None, key_end: T | None = None, "
    "q_start: int | None = None, k_stride: int = 1, extra_kv: T | None = None, "
    "extra_indices: T | None = None, extra_topk_length: T | None = None, "
    "extra_key_start: T | None = None, extra_key_end: T | None = None, extra_k_stride: int = 1, "
    "deterministic: bool = False, dq: T | None = None, dkv: T | None = None, "
    "d_sink: T | None = None, dextra_kv: T | None = None, workspace: T | None = None, "
    "stream: Stream = None, backend: str | None = None) "
    "-> tuple[T, ...] if attn_sink or d_sink or extra_kv else tuple[T, T]");

nb::object backward(const Arguments<kBackward>& given) {
  Call call = given.call();
  sparse_mla::BackwardArgs args = given.read(call);
  using Args = sparse_mla::BackwardArgs;
  nb::object dq = given.get<"dq">(), dkv = given.get<"dkv">(), d_sink = given.get<"d_sink">();
  nb::object dextra_kv = given.get<"dextra_kv">();
  given.output<&Args::dq>(call, args, dq);
  given.output<&Args::dkv>(call, args, dkv, accumulator_of(args.q.dtype()));
  const bool with_sink = args.attn_sink.present() || !d_sink.is_none();
  if (with_sink) given.output<&Args::d_sink>(call, args, d_sink);
  const bool with_extra = args.extra_kv.present() || !dextra_kv.is_none();
  if (with_extra) {
    given.output<&Args::dextra_kv>(call, args, dextra_kv, accumulator_of(args.q.dtype()));
  }
  given.run(call, args, sparse_mla::backward, sparse_mla::backward_workspace_bytes);
  if (with_sink && with_extra) return nb::make_tuple(dq, dkv, d_sink, dextra_kv);
  if (with_sink || with_extra) return nb::make_tuple(dq, dkv, with_sink ? d_sink : dextra_kv);
  return nb::make_tuple(dq, dkv);
}

constexpr const char* kDoc = R"(Gradients of forward()'s out.

    P = exp(x - lse'),  dP[i,h,j] = dot(d_out[i,h,:], kv[indices[i,j], :512])
    dS = P * (dP - delta) * scale,  delta[i,h] = dot(out[i,h,:], d_out[i,h,:])
    dq[i,h,:] = sum_j dS * kv[indices[i,j], :]
    dkv[t,:] = sum over all (i,h,j) with indices[i,j] = t of dS * q[i,h,:],
               and on its first 512 columns + P * d_out[i,h,:]
    d_sink[h] = -sum_i exp(attn_sink[h] - lse'[i,h]) * delta[i,h]

Args:
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes,
        about s_kv * d_qk * 4 + s_q * (topk + h_q) * 4 and 39 MB, with more than 64 heads or
        deterministic at most 1.1 GB and two float32 copies of dkv; the error for a smaller one
        gives the exact number. If None, it is allocated by torch for torch tensors, else from the
        stream's memory pool. The CPU does not use it.
    stream, backend: as in forward().

Returns:
    (dq, dkv), with d_sink after them if a sink is given, and dextra_kv at the end if extra_kv is.
    Every element is written.

Raises:
    ValueError, winnow.Error: as forward().)";

const Operation<kBackward, backward, kDoc, sparse_mla::backward, extra_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
