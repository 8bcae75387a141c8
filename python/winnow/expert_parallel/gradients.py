"""How dispatch and combine are each other's backward, whoever calls them.

A `way` goes between a rank's tokens and its experts' rows along one routing, without counting:
combine(rows [R, H]) -> [n, H]; repeat(tokens [n, H]) -> [R, H], zero in rows without a token;
weight_gradient(values, as dispatch gave weights) -> [n, K], recorded by WeightGradient; and
kept(rows): the rows in memory that later calls leave alone.
"""

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Descriptor


def _refuse_tangents(operation):
    name = f"winnow.expert_parallel: {operation}"
    raise RuntimeError(f"{name} has no forward-mode derivative; use reverse mode")


class Dispatch(torch.autograd.Function):
    """call() -> ((output, weights, what has no gradient), way)"""

    @staticmethod
    def forward(ctx, input, weights, call):
        results, ctx.way = call()
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
        return d_input, d_sent, None


class Combine(torch.autograd.Function):
    """By way.call(expert_output, weights, bias) -> [n, H]; weights: None for a plain sum."""

    @staticmethod
    def forward(ctx, expert_output, weights, bias, way):
        ctx.way = way
        combined = way.call(expert_output, weights, bias)
        if weights is not None:
            rows = way.kept(expert_output) if ctx.needs_input_grad[1] else None
            ctx.save_for_backward(rows, weights)
        return combined

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
        )


class WeightGradient(torch.autograd.Function):
    """By call(values)."""

    @staticmethod
    def forward(ctx, values, call):
        return call(values)

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangents("the gradient of weights")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        raise RuntimeError("winnow.expert_parallel: the gradient of weights has no gradient")


def used_rows(rows: Tensor, descriptor: Descriptor) -> Tensor:
    """The rows with zeros where no token stands."""
    if descriptor.worst_case_rows == 0:
        return rows
    used = descriptor.skipped_token_mapping_indices >= 0
    return torch.where(used[:, None], rows, rows.new_zeros(()))


def weight_gradient(values: Tensor, layer: AllToAll, descriptor: Descriptor) -> Tensor:
    """Carries a number per pair from the expert's rank back to the token's, bit for bit: [n, K]."""
    return layer.combine(None, descriptor, pair_values=values.contiguous())[1]
