"""dispatch, combine and notify as torch operators, which compiled code calls.

An operator takes tensors and numbers. A layer, or a notifier, is the number that its constructor
gave it. A descriptor is a handle: an int64 tensor [1] on the CPU that holds a number, and whose
memory keeps the descriptor. So a handle may be saved for a backward pass, detached or returned from
a graph, and the descriptor goes with the last tensor on that memory.
"""

import array
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import SymInt, Tensor

from winnow import _operators
from winnow._winnow.expert_parallel import AllToAll, Descriptor, _numbered
from winnow.errors import InvalidArgument
from winnow.expert_parallel import gradients


class _Kept(array.array):
    """The memory of a handle, and what it keeps."""

    descriptor: Descriptor
    layer: AllToAll  # a backward pass may come when nobody else has it


_numbers = itertools.count(1)
_kept: "weakref.WeakValueDictionary[int, _Kept]" = weakref.WeakValueDictionary()


def handle_of(layer: AllToAll, descriptor: Descriptor) -> Tensor:
    """A new handle of the descriptor."""
    kept = _Kept("q", (next(_numbers),))
    kept.layer, kept.descriptor = layer, descriptor
    _kept[kept[0]] = kept
    return torch.frombuffer(kept, dtype=torch.int64)


def descriptor_of(handle: Tensor) -> Descriptor:
    """The descriptor of a handle, or of a copy of one that is still there."""
    kept = _kept.get(handle.item())
    if kept is None:
        text = "expert_parallel: descriptor: want one that somebody keeps, got one that is gone"
        raise InvalidArgument(text)
    return kept.descriptor


def _living(number: int) -> Any:
    """The AllToAll or Notifier of that number."""
    found = _numbered(number)
    if found is None:
        raise InvalidArgument("expert_parallel: want a layer that exists, got one that is gone")
    return found


@dataclass
class _Way:
    """See gradients. n `tokens` and R `rows`."""

    layer: int
    topk: int
    tokens: int
    rows: int
    handle: Tensor

    def combine(self, rows):
        return torch.ops.winnow.expert_parallel_combine(
            rows, None, None, None, self.layer, self.topk, self.tokens, self.handle
        )

    def repeat(self, tokens):
        return torch.ops.winnow.expert_parallel_dispatch(
            tokens, None, None, self.layer, self.topk, None, None, None, "expert_major", 1, 0,
            False, self.handle, self.rows, True,
        )[0]  # fmt: skip

    def kept(self, rows):
        return rows  # compiled code writes to no combine_buffer()

    def weight_gradient(self, values):
        return torch.ops.winnow.expert_parallel_weight_gradient(
            values, None, self.layer, self.topk, self.tokens, self.handle
        )


_apply_dispatch = _operators.recorded_by(gradients.Dispatch)
_apply_combine = _operators.recorded_by(gradients.Combine)
_apply_weight_gradient = _operators.recorded_by(gradients.WeightGradient)


# ---- dispatch


def _dispatch(
    input, weights, after, layer, topk, expert_indices, scales, scatter_indices, order,
    expert_alignment, worst_case_rows, copy_out, cached, rows=None, gradient=False,
):  # fmt: skip
    layer = _living(layer)
    clones = copy_out and input.is_cuda  # torch's allocator knows streams
    got = layer.dispatch(
        input,
        expert_indices,
        weights=weights,
        scales=scales,
        scatter_indices=scatter_indices,
        order=order,
        expert_alignment=expert_alignment,
        worst_case_rows=worst_case_rows,
        copy_out=copy_out and not clones,
        cached=None if cached is None else descriptor_of(cached),
    )
    tensors = [got.output, got.weights, got.scales, got.expert_ids]
    if gradient:
        tensors = [gradients.used_rows(got.output, got.descriptor), None, None, None]
    elif clones:
        tensors = [None if t is None else t.clone() for t in tensors]
    handle = handle_of(layer, got.descriptor)
    return *(input.new_empty(0) if t is None else t for t in tensors), handle


def _dispatch_fake(
    input, weights, after, layer, topk, expert_indices, scales, scatter_indices, order,
    expert_alignment, worst_case_rows, copy_out, cached, rows=None, gradient=False,
):  # fmt: skip
    if rows is None:
        rows = worst_case_rows or torch.library.get_ctx().new_dynamic_size()
    results = [input.new_empty((rows, input.shape[1]))]
    results += [input.new_empty(0) for _ in range(3)] + [torch.empty(1, dtype=torch.int64)]
    pairs = (rows, topk)
    if weights is not None:
        results[1] = weights.new_empty(pairs if order == "token_major" else rows)
    if scales is not None:
        results[2] = scales.new_empty((rows, scales.shape[1]))
    if order == "token_major":
        results[3] = input.new_empty(pairs, dtype=torch.int32)
    return tuple(results)


def _record_dispatch(input, weights, run, values, defaults):
    def call():
        results = run(*values)
        layer, topk = values[3:5]
        return results, _Way(layer, topk, input.shape[0], results[0].shape[0], results[4])

    return _apply_dispatch(input, weights, call)


@_operators.operator(
    _dispatch,
    _dispatch_fake,
    results=5,
    autograd=_operators.recording(_record_dispatch, leaves=(0, 1), follows=2),
    recordable=False,
)
def expert_parallel_dispatch(
    input: Tensor,
    weights: Optional[Tensor],
    after: Optional[Tensor],
    layer: SymInt,
    topk: SymInt,
    expert_indices: Optional[Tensor],
    scales: Optional[Tensor],
    scatter_indices: Optional[Tensor],
    order: str,
    expert_alignment: int,
    worst_case_rows: int,
    copy_out: bool,
    cached: Optional[Tensor],
    rows: Optional[SymInt] = None,
    gradient: bool = False,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """AllToAll.dispatch(): (output, weights, scales, expert_ids, handle); what is absent is empty.

    `rows` is R where it is known, `topk` K. A `gradient` is output alone, zero in rows without a
    token.
    """


# ---- combine


def _combine(expert_output, weights, bias, after, layer, topk, tokens, descriptor):
    return _living(layer).combine(
        expert_output, descriptor_of(descriptor), bias=bias, weighted=weights is not None
    )


def _combine_fake(expert_output, weights, bias, after, layer, topk, tokens, descriptor):
    return expert_output.new_empty((tokens, expert_output.shape[1]))


def _record_combine(expert_output, weights, bias, run, values, defaults):
    _, _, _, _, layer, topk, tokens, handle = values
    way = _Way(layer, topk, tokens, expert_output.shape[0], handle)
    others = values[3:]  # no leaf, which would stay as long as the graph's node
    way.call = lambda *leaves: run(*leaves, *others)
    return _apply_combine(expert_output, weights, bias, way)


@_operators.operator(
    _combine,
    _combine_fake,
    results=1,
    autograd=_operators.recording(_record_combine, leaves=(0, 1, 2), follows=3),
    recordable=False,
)
def expert_parallel_combine(
    expert_output: Tensor,
    weights: Optional[Tensor],
    bias: Optional[Tensor],
    after: Optional[Tensor],
    layer: SymInt,
    topk: SymInt,
    tokens: SymInt,
    descriptor: Tensor,
) -> Tensor:
    """AllToAll.combine(), weighted where there are weights; `tokens` is n, `topk` K."""


# ---- what only compiled code needs


def _weight_gradient(values, after, layer, topk, tokens, descriptor):
    return gradients.weight_gradient(values, _living(layer), descriptor_of(descriptor))


def _weight_gradient_fake(values, after, layer, topk, tokens, descriptor):
    return values.new_empty((tokens, topk))


def _record_weight_gradient(values, run, arguments, defaults):
    others = arguments[1:]
    return _apply_weight_gradient(values, lambda values: run(values, *others))


@_operators.operator(
    _weight_gradient,
    _weight_gradient_fake,
    results=1,
    autograd=_operators.recording(_record_weight_gradient, leaves=(0,), follows=1),
    recordable=False,
)
def expert_parallel_weight_gradient(
    values: Tensor,
    after: Optional[Tensor],
    layer: SymInt,
    topk: SymInt,
    tokens: SymInt,
    descriptor: Tensor,
) -> Tensor:
    """gradients.weight_gradient(): [n, K]."""


def _table(descriptor, name, sizes, dtype, device):
    # A copy: a compiler may use the memory of what it is given for something else.
    return getattr(descriptor_of(descriptor), name).clone()


def _table_fake(descriptor, name, sizes, dtype, device):
    return torch.empty(sizes, dtype=dtype, device=device)


@_operators.operator(_table, _table_fake, results=1, recordable=False)
def expert_parallel_table(
    descriptor: Tensor, name: str, sizes: Sequence[SymInt], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The tensor of that name of the descriptor."""


# ---- notify


def _notify(
    tokens_per_rank, tokens_per_node, tokens_per_expert, is_token_in_rank, after, notifier,
    channels, expert_alignment, worst_case_rows,
):  # fmt: skip
    got = _living(notifier).notify(
        tokens_per_rank,
        tokens_per_node,
        tokens_per_expert,
        is_token_in_rank,
        channels=channels,
        expert_alignment=expert_alignment,
        worst_case_rows=worst_case_rows,
    )
    return tuple(getattr(got, name) for name in Notified._fields)


def _notify_fake(
    tokens_per_rank, tokens_per_node, tokens_per_expert, is_token_in_rank, after, notifier,
    channels, expert_alignment, worst_case_rows,
):  # fmt: skip
    ranks, nodes = tokens_per_rank.shape[0], tokens_per_node.shape[0]
    local_experts = tokens_per_expert.shape[0] // ranks
    sizes = ((nodes, channels), (ranks, channels), nodes, ranks, 1, 1, local_experts)
    return tuple(tokens_per_rank.new_empty(size) for size in sizes)


class Notified(NamedTuple):
    """What expert_parallel_notify() returns; see Notifier.notify()."""

    node_channel_prefix_matrix: Tensor
    rank_channel_prefix_matrix: Tensor
    recv_node_prefix_sum: Tensor
    recv_rank_prefix_sum: Tensor
    num_recv_tokens: Tensor
    num_forward_tokens: Tensor
    recv_pairs_per_expert: Tensor


@_operators.operator(
    _notify,
    _notify_fake,
    results=len(Notified._fields),
    autograd=_operators.recording(None, leaves=(), follows=4),
    recordable=False,
)
def expert_parallel_notify(
    tokens_per_rank: Tensor,
    tokens_per_node: Tensor,
    tokens_per_expert: Tensor,
    is_token_in_rank: Tensor,
    after: Optional[Tensor],
    notifier: SymInt,
    channels: SymInt,
    expert_alignment: int,
    worst_case_rows: int,
) -> Notified:
    """Notifier.notify()."""
