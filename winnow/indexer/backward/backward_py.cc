// Python binding of indexer::backward.

#include "winnow/indexer/backward/backward.h"
#include "winnow/indexer/backward/backward_contract.h"
#include "winnow/indexer/scale_py.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<indexer::kBackward> kBackward(
    "def backward(q: T, k: T, weights: T, indices: T | None, d_scores: T, *, "
    "k_scale: T | None = None, key_start: T | None = None, key_end: T | None = None, "
    "q_start: int | None = None, k_stride: int = 1, deterministic: bool = False, "
    "dq: T | None = None, dk: T | None = None, d_weights: T | None = None, "
    "workspace: T | None = None, stream: Stream = None, backend: str | None = None) "
    "-> tuple[T, T, T]");

nb::object backward(const Arguments<kBackward>& given) {
  Call call = given.call();
  indexer::BackwardArgs args = given.read(call);
  using Args = indexer::BackwardArgs;
  const DType dtype = args.q.dtype() == DType::f8_e4m3 ? DType::f32 : args.q.dtype();
  nb::object dq = given.get<"dq">(), dk = given.get<"dk">(), d_weights = given.get<"d_weights">();
  given.output<&Args::dq>(call, args, dq, dtype);
  given.output<&Args::dk>(call, args, dk);  // a new one has the first dtype of the contract, f32
  given.output<&Args::d_weights>(call, args, d_weights, DType::f32);
  given.run(call, args, indexer::backward, indexer::backward_workspace_bytes);
  return nb::make_tuple(dq, dk, d_weights);
}

constexpr const char* kDoc =
    R"(Gradients of scores() with the same inputs, given those of its result.

    dot[i,h,j] = dot(q[i,h,:], k[t,:]),  t = indices[i,j], or j where indices is None
    d_dot[i,h,j] = d_scores[i,j] * k_scale[t] * weights[i,h] where dot > 0, otherwise 0
    dq[i,h,:] = sum over j of d_dot[i,h,j] * k[t,:]
    dk[t,:] = sum over all (i,h,j) that name row t of d_dot[i,h,j] * q[i,h,:]
    d_weights[i,h] = sum over j of d_scores[i,j] * k_scale[t] * max(0, dot)

An entry whose index is outside of [0, s_k), or whose row the query does not see, contributes
nothing, and its d_scores are ignored. A row that occurs several times in indices contributes each
time.

Args:
    workspace: scratch memory for a GPU: bytes (uint8) on the device of q, aligned to 256 bytes; the
        error for a smaller one says how many it takes. If None, it is allocated by torch for torch
        tensors, else from the stream's memory pool. The CPU does not use it.
    stream, backend: as in topk().

Returns:
    (dq, dk, d_weights). Every element is written; rows that no query sees get 0.

Raises:
    ValueError, winnow.Error: as topk().)";

const Operation<kBackward, backward, kDoc, indexer::backward, scale_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
