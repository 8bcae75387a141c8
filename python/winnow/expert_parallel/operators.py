"""dispatch, combine and notify as torch operators, which compiled code calls.

An operator takes tensors and numbers. A layer or a notifier is passed as the number that it got
when it was made. A descriptor is passed as a handle: an int64 tensor [1] on the CPU. It holds a
number, and its memory keeps the descriptor alive. So a handle may be saved for a backward pass,
detached or returned from a graph, and the descriptor goes with the last tensor on that memory.
"""

import array
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from winnow import _operators
from winnow._refusal import refuse
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
    """The descriptor of a handle. A copy will do as long as the original's memory lives."""
    kept = _kept.get(handle.item())
    if kept is None:
        refuse("expert_parallel", "descriptor", "one that still exists", "one that was freed")
    return kept.descriptor


def _living(number: int) -> Any:
    """The AllToAll or Notifier of that number."""
    found = _numbered(number)
    if found is None:
        raise InvalidArgument(
            "expert_parallel: want a layer or notifier that still exists, got one that was freed"
        )
    return found


@dataclass
class _Way:
    """The `way` of gradients.py for compiled code; n is `tokens`, R is `rows`."""

    layer: int
    topk: int
    tokens: int
    rows: int
    handle: Tensor

    def combine(self, rows):
        return torch.ops.winnow.expert_parallel_combine(
            rows, None, None, after=None, layer=self.layer, topk=self.topk, tokens=self.tokens,
            descriptor=self.handle,
        )  # fmt: skip

    def repeat(self, tokens):
        return torch.ops.winnow.expert_parallel_dispatch(
            tokens, None, None, self.layer, self.topk, None, scales=None, scatter_indices=None,
            order="expert_major", expert_alignment=1, worst_case_rows=0, copy_out=False,
            cached=self.handle, rows=self.rows, gradient=True,
        )[0]  # fmt: skip

    def kept(self, rows):
        return rows  # no copy: compiled code never writes to combine_buffer()

    def weight_gradient(self, values):
        return torch.ops.winnow.expert_parallel_weight_gradient(
            values, None, self.layer, self.topk, self.tokens, self.handle
        )


_apply_dispatch = _operators.recorded_by(gradients.Dispatch)
_apply_combine = _operators.recorded_by(gradients.Combine)
_apply_weight_gradient = _operators.recorded_by(gradients.WeightGradient)


# ---- dispatch


def _dispatch(
    input, weights, after, layer, topk, expert_indices, *, copy_out, cached, rows=None,
    gradient=False, **options,
):  # fmt: skip
    layer = _living(layer)
    # On a GPU the copies are made here, since torch's allocator keeps track of streams.
    clones = copy_out and input.is_cuda
    got = layer.dispatch(
        input,
        expert_indices,
        weights=weights,
        copy_out=copy_out and not clones,
        cached=None if cached is None else descriptor_of(cached),
        **options,
    )
    tensors = [got.output, got.weights, got.scales, got.expert_ids]
    if gradient:
        tensors = [gradients.used_rows(got.output, got.descriptor), None, None, None]
    elif clones:
        tensors = [None if t is None else t.clone() for t in tensors]
    handle = handle_of(layer, got.descriptor)
    return *(input.new_empty(0) if t is None else t for t in tensors), handle


def _record_dispatch(input, weights, results, values, arguments):
    output, *_, handle = results
    layer, topk = arguments.of(values, "layer", "topk")
    way = _Way(layer, topk, input.shape[0], output.shape[0], handle)
    return _apply_dispatch(input, weights, results, way)


@_operators.operator(
    _dispatch,
    "input: T, weights: T | None, after: T | None, layer: size, topk: size, "
    "expert_indices: T | None, *, scales: T | None, scatter_indices: T | None, order: str, "
    "expert_alignment: int, worst_case_rows: int, copy_out: bool, cached: T | None, "
    "rows: size | None = None, gradient: bool = False",
    results=5,
    autograd=_operators.recording(_record_dispatch, leaves=("input", "weights"), follows="after"),
    recordable=False,
)
def expert_parallel_dispatch(
    input, weights, after, layer, topk, expert_indices, *, scales, order, worst_case_rows,
    rows=None, **options,
):  # fmt: skip
    """AllToAll.dispatch(): (output, weights, scales, expert_ids, handle); absent results are empty.

    `rows` is R where it is known, `topk` K. With `gradient` only output is returned and the others
    are empty; its rows without a token are zero.
    """
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


# ---- combine


def _combine(expert_output, weights, bias, *, layer, descriptor, **sizes):
    return _living(layer).combine(
        expert_output, descriptor_of(descriptor), bias=bias, weighted=weights is not None
    )


def _record_combine(expert_output, weights, bias, results, values, arguments):
    *sizes, handle = arguments.of(values, "layer", "topk", "tokens", "descriptor")
    way = _Way(*sizes, expert_output.shape[0], handle)
    return _apply_combine(expert_output, weights, bias, (results,), way)


@_operators.operator(
    _combine,
    "expert_output: T, weights: T | None, bias: T | None, *, after: T | None, layer: size, "
    "topk: size, tokens: size, descriptor: T",
    results=1,
    autograd=_operators.recording(
        _record_combine, leaves=("expert_output", "weights", "bias"), follows="after"
    ),
    recordable=False,
)
def expert_parallel_combine(expert_output, *others, tokens, **options):
    """AllToAll.combine(), weighted where there are weights; `tokens` is n, `topk` K."""
    return expert_output.new_empty((tokens, expert_output.shape[1]))


# ---- what only compiled code needs


def _weight_gradient(values, *, layer, descriptor, **sizes):
    return gradients.weight_gradient(values, _living(layer), descriptor_of(descriptor))


def _record_weight_gradient(values, results, given, arguments):
    return _apply_weight_gradient(values, (results,))


@_operators.operator(
    _weight_gradient,
    "values: T, *, after: T | None, layer: size, topk: size, tokens: size, descriptor: T",
    results=1,
    autograd=_operators.recording(_record_weight_gradient, leaves=("values",), follows="after"),
    recordable=False,
)
def expert_parallel_weight_gradient(values, *, tokens, topk, **options):
    """gradients.weight_gradient(): [n, K]."""
    return values.new_empty((tokens, topk))


def _table(descriptor, name, sizes, dtype, device):
    # A copy: a compiler may use the memory of what it is given for something else.
    return getattr(descriptor_of(descriptor), name).clone()


@_operators.operator(
    _table,
    "descriptor: T, name: str, sizes: sizes, dtype: dtype, device: device",
    results=1,
    recordable=False,
)
def expert_parallel_table(descriptor, name, sizes, dtype, device):
    """The tensor of that name of the descriptor."""
    return torch.empty(sizes, dtype=dtype, device=device)


# ---- notify


class Notified(NamedTuple):
    """The result of expert_parallel_notify(); see Notifier.notify()."""

    node_channel_prefix_matrix: Tensor
    rank_channel_prefix_matrix: Tensor
    recv_node_prefix_sum: Tensor
    recv_rank_prefix_sum: Tensor
    num_recv_tokens: Tensor
    num_forward_tokens: Tensor
    recv_pairs_per_expert: Tensor


def _notify(*counts, after, notifier, **options):
    got = _living(notifier).notify(*counts, **options)
    return tuple(getattr(got, name) for name in Notified._fields)


@_operators.operator(
    _notify,
    "tokens_per_rank: T, tokens_per_node: T, tokens_per_expert: T, is_token_in_rank: T, *, "
    "after: T | None, notifier: size, channels: size, expert_alignment: int, "
    "worst_case_rows: int",
    results=len(Notified._fields),
    autograd=_operators.recording(None, leaves=(), follows="after"),
    recordable=False,
)
def expert_parallel_notify(
    tokens_per_rank, tokens_per_node, tokens_per_expert, is_token_in_rank, *, channels, **options
):
    """Notifier.notify()."""
    ranks, nodes = tokens_per_rank.shape[0], tokens_per_node.shape[0]
    local_experts = tokens_per_expert.shape[0] // ranks
    sizes = ((nodes, channels), (ranks, channels), nodes, ranks, 1, 1, local_experts)
    return tuple(tokens_per_rank.new_empty(size) for size in sizes)
