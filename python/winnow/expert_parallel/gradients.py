"""How dispatch and combine are each other's backward, in eager and in compiled code.

Both make their call first and then record it with the Functions of this file. A Function gets the
leaves (the arguments that have gradients), the results, and a `way`. The way carries values between
a rank's tokens and its experts' rows along the call's routing, without counting the rows again.
Eager code has a way that calls layers with descriptors (autograd.py), compiled code has one that
calls the operators (operators.py):

    way.combine(rows [R, H]) -> [n, H]
    way.repeat(tokens [n, H]) -> [R, H], zero in rows without a token
    way.weight_gradient(values, as dispatch gave weights) -> [n, K], recorded by WeightGradient
    way.kept(rows) -> the rows, copied if a later call might overwrite their memory
"""

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Descriptor


def _refuse_tangents(operation):
    name = f"winnow.expert_parallel: {operation}"
    raise RuntimeError(f"{name} has no forward-mode derivative; use reverse mode")


class Dispatch(torch.autograd.Function):
    """results: output, weights and what has no gradient"""

    @staticmethod
    def forward(ctx, input, weights, results, way):
        ctx.way = way
        return results

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangents("dispatch")

    @staticmethod
    def backward(ctx, d_output, d_weights, *others):
        d_input = d_sent = None
        if ctx.needs_input_grad[0]:
            d_input = ctx.way.combine(d_output.contiguous())
        if ctx.needs_input_grad[1]:
            d_sent = ctx.way.weight_gradient(d_weights)
        return d_input, d_sent, None, None


class Combine(torch.autograd.Function):
    """results: ([n, H],), a tuple, lest autograd see an input; weights: None for a plain sum"""

    @staticmethod
    def forward(ctx, expert_output, weights, bias, results, way):
        ctx.way = way
        if weights is not None:
            rows = way.kept(expert_output) if ctx.needs_input_grad[1] else None
            ctx.save_for_backward(rows, weights)
        return results[0]

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangents("combine")

    @staticmethod
    def backward(ctx, d_out):
        expert_output, weights = ctx.saved_tensors or (None, None)
        d_rows = d_weights = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            d_rows = ctx.way.repeat(d_out.contiguous())
        if weights is not None:
            if ctx.needs_input_grad[1]:
                products = d_rows.float() * expert_output
                d_weights = products.sum(1).to(weights.dtype)
            if ctx.needs_input_grad[0]:
                d_rows = (d_rows.float() * weights.float()[:, None]).to(d_rows.dtype)
        return (
            d_rows if ctx.needs_input_grad[0] else None,
            d_weights,
            d_out if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class WeightGradient(torch.autograd.Function):
    """results: [n, K], in a tuple"""

    @staticmethod
    def forward(ctx, values, results):
        return results[0]

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangents("the gradient of weights")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        raise RuntimeError("winnow.expert_parallel: the gradient of weights has no gradient")


def used_rows(rows: Tensor, descriptor: Descriptor) -> Tensor:
    """The rows, with zeros in those that hold no token."""
    if descriptor.worst_case_rows == 0:
        return rows
    used = descriptor.skipped_token_mapping_indices >= 0
    return torch.where(used[:, None], rows, rows.new_zeros(()))


def weight_gradient(values: Tensor, layer: AllToAll, descriptor: Descriptor) -> Tensor:
    """Carries a number per pair from the expert's rank back to the token's, bit for bit: [n, K]."""
    return layer.combine(None, descriptor, pair_values=values.contiguous())[1]
