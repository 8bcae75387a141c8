"""dispatch and combine with gradients: each is the other's backward.

Gradients travel like the values did, with the routing of the descriptor, so a backward pass counts
nothing and waits for no host. It is collective too: every rank runs it, also one without tokens.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Descriptor

__all__ = ["combine", "dispatch"]


def dispatch(
    layer: AllToAll,
    input: Tensor,
    expert_indices: Optional[Tensor] = None,
    *,
    weights: Optional[Tensor] = None,
    **options: Any,
) -> Tuple[Tensor, Optional[Tensor], Descriptor]:
    """AllToAll.dispatch(), differentiable in input and weights.

    Args:
        layer: the AllToAll of this rank.
        input: [n, H]; expert_indices: [n, K], int32; weights: [n, K]; options: as in
            AllToAll.dispatch(), but for scales.

    Returns:
        (output [R, H], weights [R], in token-major order [R, K], or None, descriptor).

    Raises:
        ValueError, winnow.Error: as AllToAll.dispatch(); the backward pass as AllToAll.combine().
    """
    return _Dispatch.apply(input, weights, layer, {"expert_indices": expert_indices, **options})


def combine(
    layer: AllToAll,
    expert_output: Tensor,
    descriptor: Descriptor,
    *,
    weights: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tensor:
    """AllToAll.combine(), differentiable in expert_output, weights and bias.

    Args:
        layer: the AllToAll of this rank.
        expert_output: [R, H]; descriptor: of the dispatch; bias: [n, H].
        weights: those that dispatch() returned with this descriptor, to weight the sum; None for a
            plain one. The library multiplies by what was sent, so no others are possible.

    Returns:
        [n, H].

    Raises:
        ValueError, winnow.Error: as AllToAll.combine(); the backward pass as AllToAll.dispatch().
    """
    return _Combine.apply(expert_output, weights, bias, layer, descriptor)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weights, layer, options):
        # torch's allocator serves a GPU better than the layer's memory: it knows other streams.
        clones = input.is_cuda and options.pop("copy_out", False)
        got = layer.dispatch(input, weights=weights, **options)
        own = [t.clone() if clones and t is not None else t for t in (got.output, got.weights)]
        ctx.layer, ctx.descriptor, ctx.expert_ids = layer, got.descriptor, got.expert_ids
        return *own, got.descriptor

    @staticmethod
    def backward(ctx, d_output, d_weights, _):
        d_input = d_sent = None
        if ctx.needs_input_grad[0]:
            d_input = combine(ctx.layer, d_output, ctx.descriptor)
        if ctx.needs_input_grad[1]:
            d_sent = _PairsBack.apply(d_weights, ctx.layer, ctx.descriptor, ctx.expert_ids)
        return d_input, d_sent, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, expert_output, weights, bias, layer, descriptor):
        ctx.layer, ctx.descriptor = layer, descriptor
        ctx.save_for_backward(expert_output if weights is not None else None, weights)
        return layer.combine(expert_output, descriptor, bias=bias, weighted=weights is not None)

    @staticmethod
    def backward(ctx, d_out):
        expert_output, weights = ctx.saved_tensors
        d_rows = d_weights = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            d_rows, _, _ = dispatch(ctx.layer, d_out.contiguous(), cached=ctx.descriptor)
            if ctx.descriptor.worst_case_rows > 0:  # no token stands in the rows beyond
                used = ctx.descriptor.skipped_token_mapping_indices >= 0
                d_rows = torch.where(used[:, None], d_rows, d_rows.new_zeros(()))
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


class _PairsBack(torch.autograd.Function):
    """Carries a number per pair from the expert's rank back to the token's: [n, K].

    The wire adds rows of the layer's dtype. A number travels bit for bit nevertheless: as bytes,
    which every dtype holds, in columns of its own, where zeros are added to it.
    """

    @staticmethod
    def forward(ctx, values, layer, descriptor, expert_ids):
        by_pair = _by_pair(values, descriptor, expert_ids)
        octets = by_pair.contiguous().view(torch.uint8)
        parts = []
        for part in octets.split(layer.hidden, 1):
            shape = (len(octets), layer.hidden)
            rows = torch.zeros(shape, dtype=getattr(torch, layer.dtype), device=values.device)
            rows[:, : part.shape[1]] = part
            parts.append(layer.combine(rows, descriptor)[:, : part.shape[1]])
        return torch.cat(parts, 1).to(torch.uint8).view(values.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        raise RuntimeError("winnow.expert_parallel: the gradient of weights has no gradient")


def _by_pair(values: Tensor, descriptor: Descriptor, expert_ids: Optional[Tensor]) -> Tensor:
    """[R, K], dense: the values of each row's pairs, +0 for pairs that it does not hold."""
    if expert_ids is not None:  # token-major
        return torch.where(expert_ids >= 0, values, values.new_zeros(()))
    copies = descriptor.skipped_token_topk_mapping_indices
    rows = torch.where(copies >= 0, copies, len(values))  # one more row takes what is no pair
    padded = torch.cat([values, values.new_zeros(1)])
    by_pair = values.new_zeros(len(values) + 1, copies.shape[1])
    return by_pair.scatter_(0, rows, padded[rows])[:-1]
