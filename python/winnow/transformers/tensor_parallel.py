"""Attention heads that tensor parallelism divides over processes.

transformers shards the weights of q_b_proj, kv_b_proj and o_proj; a process then has some of the
heads, all rows and the whole indexer.
"""

from typing import Optional

import torch
from torch import Tensor, nn


def group_of(attention: nn.Module, heads: int) -> Optional["torch.distributed.ProcessGroup"]:
    """The processes that share the heads, of which this one has some; None where it has all: what
    shards weights then is not tensor parallelism."""
    if heads == attention.num_heads:
        return None
    from torch.distributed.tensor import DTensor

    for parameter in attention.kv_b_proj.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return None


def sum_over_heads(of_own_heads: Tensor, group) -> Tensor:
    """Adds what the other processes have, in place."""
    if group is not None:
        torch.distributed.all_reduce(of_own_heads, group=group)
    return of_own_heads


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, d_rows):
        return sum_over_heads(d_rows.clone(), ctx.group), None


def read_by_heads(rows: Tensor, group) -> Tensor:
    """The same rows; their gradient is the sum of those that the heads of all processes have."""
    return rows if group is None else _SummedGradient.apply(rows, group)
