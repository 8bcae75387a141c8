// Python binding of compressor::backward.
#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/backward/backward_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<compressor::kBackward> kBackward(
    "def backward(kv: T, gate: T, position_bias: T, cu_seqlens: T, cu_rows: T, "
    "rows: T | None, rstd: T | None, d_rows: T, *, "
    "overlap: bool = False, norm_weight: T | None = None, eps: float | None = None, "
    "cos: T | None = None, sin: T | None = None, first_position: T | None = None, "
    "hadamard: bool = False, d_kv: T | None = None, d_gate: T | None = None, "
    "d_position_bias: T | None = None, d_norm_weight: T | None = None, "
    "workspace: T | None = None, stream: Stream = None, backend: str | None = None) "
    "-> tuple[T, T, T, T] if norm_weight else tuple[T, T, T]");

nb::object backward(const Arguments<kBackward>& given) {
  Call call = given.call();
  compressor::BackwardArgs args = given.read(call);
  const std::int64_t tokens = size_of_dim(args.kv, 0), columns = size_of_dim(args.kv, 1);
  const DType dtype = args.kv.dtype(), real = accumulator_of(dtype);
  nb::object d_kv = given.get<"d_kv">(), d_gate = given.get<"d_gate">();
  nb::object d_bias = given.get<"d_position_bias">(), d_norm = given.get<"d_norm_weight">();
  args.d_kv = call.output("d_kv", d_kv, dtype, {tokens, columns});
  args.d_gate = call.output("d_gate", d_gate, dtype, {tokens, columns});
  args.d_position_bias =
      call.output("d_position_bias", d_bias, real, {size_of_dim(args.position_bias, 0), columns});
  const bool norm = args.norm_weight.present();
  if (norm || !d_norm.is_none()) {
    args.d_norm_weight =
        call.output("d_norm_weight", d_norm, real, {columns / (args.overlap ? 2 : 1)});
  }
  given.run(call, args, compressor::backward, compressor::backward_workspace_bytes);
  return norm ? nb::make_tuple(d_kv, d_gate, d_bias, d_norm) : nb::make_tuple(d_kv, d_gate, d_bias);
}

constexpr const char* kDoc = R"(Gradients of forward()'s rows.

With sum[w] a row before norm, rotation and transform, G[w] the gradient of it, and P the softmax:

    d_kv[j] = P[j] * G[w]
    d_gate[j] = P[j] * G[w] * (kv[j] - sum[w])
    d_position_bias[j % ratio] = sum over all windows of d_gate[j]

Results are bitwise equal run after run, for any number of threads.

Args:
    workspace: scratch memory for a GPU: bytes (uint8) on the device of kv, aligned to 256 bytes;
        the error for a smaller one gives the exact number. If None, it is allocated by torch for
        torch tensors. The CPU does not use it.
    stream, backend: as in forward().

Returns:
    (d_kv, d_gate, d_position_bias), or with norm_weight (d_kv, d_gate, d_position_bias,
    d_norm_weight). Every element is written.

Raises:
    ValueError, winnow.Error: as forward().)";

const Operation<kBackward, backward, kDoc, compressor::backward> kRegistered;

}  // namespace
}  // namespace winnow::python
