"""dispatch and combine for torch, with gradients: each is the other's backward.

Gradients use the routing of the descriptor, so a backward pass neither counts nor waits on the
host. It is collective too: every rank runs it, also one without tokens. Work on a GPU joins torch's
current stream.

Both work in ``torch.compile(fullgraph=True)``; every rank compiles the same function. A dispatch
that counts its rows returns tensors of a size that is unknown to the compiler, which requires
``torch._dynamo.config.capture_dynamic_output_shape_ops = True``. The memory of calls that a CUDA
graph captures from compiled code is kept as long as the layer.
"""

from typing import Any, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.compiler import is_compiling

from winnow._torch_private import GradPaused, count_modes, forward_mode_level, transforms_active
from winnow._winnow.expert_parallel import AllToAll, Descriptor, Notifier
from winnow.expert_parallel import gradients, operators

__all__ = [
    "TracedDescriptor",
    "TracedDispatch",
    "combine",
    "dispatch",
    "dispatch_traced",
    "notify",
    "traced",
]

_INT32, _INT64 = torch.int32, torch.int64


def _table(name: str, sizes, dtype: torch.dtype = _INT32) -> Any:
    """A property: the tensor of that name. `sizes` of the descriptor are None without one."""

    def table(of):
        given = sizes(of)
        if given is None:
            return None
        return torch.ops.winnow.expert_parallel_table(of._handle, name, given, dtype, of._device)

    return property(table)


class TracedDescriptor:
    """The descriptor that dispatch() returns under torch.func and in compiled code.

    It has the attributes of a Descriptor. Its tensors are copies, wanted_rows is as on a GPU, and
    host_expert_counts and host_expert_offsets are None while a compiler traces. dispatch() and
    combine() of this module accept it everywhere. Compiled code does not accept a Descriptor;
    convert it with traced() first.
    """

    def __init__(
        self, handle, sizes, device, tokens, rows, order, expert_alignment, worst_case_rows, weights
    ):
        self._handle = handle
        self._sizes = sizes
        self._device = device
        self.num_dispatch_token_cur_rank = tokens
        self.rows = rows
        self.order = order
        self.expert_alignment = expert_alignment
        self.worst_case_rows = worst_case_rows
        self.has_weights = weights

    @property
    def descriptor(self) -> Descriptor:
        """The Descriptor itself; not in compiled code."""
        return operators.descriptor_of(self._handle)

    @property
    def wanted_rows(self):
        return self.rows if self.worst_case_rows == 0 else -1

    # AllToAll's _traced has the number, W, NN, T, K, E / W.
    wanted_rows_per_rank: Tensor = _table("wanted_rows_per_rank", lambda of: of._sizes[1:2], _INT64)
    num_input_tokens_per_rank: Tensor = _table(
        "num_input_tokens_per_rank", lambda of: of._sizes[1:2]
    )
    source_begins: Optional[Tensor] = _table(
        "source_begins", lambda of: (of._sizes[1] + 1,) if of.order == "token_major" else None
    )
    send_reqs_recv: Optional[Tensor] = _table(
        "send_reqs_recv",
        lambda of: (of._sizes[2], 2, of._sizes[3]) if of._sizes[2] > 1 else None,
    )
    topk_indices: Tensor = _table("topk_indices", lambda of: of._sizes[2:5])
    token_dst_scatter_idx: Tensor = _table("token_dst_scatter_idx", lambda of: of._sizes[2:5])
    skipped_token_mapping_indices: Tensor = _table(
        "skipped_token_mapping_indices", lambda of: (of.rows,), _INT64
    )
    skipped_token_topk_mapping_indices: Tensor = _table(
        "skipped_token_topk_mapping_indices", lambda of: (of.rows, of._sizes[4]), _INT64
    )
    expert_counts: Tensor = _table("expert_counts", lambda of: of._sizes[5:])
    expert_offsets: Tensor = _table("expert_offsets", lambda of: (of._sizes[5] + 1,))

    @property
    def host_expert_counts(self) -> Optional[List[int]]:
        return self._on_host("host_expert_counts")

    @property
    def host_expert_offsets(self) -> Optional[List[int]]:
        return self._on_host("host_expert_offsets")

    def _on_host(self, name):
        # A compiler's tensors hold no numbers.
        there = not is_compiling() and type(self._handle) is Tensor
        return getattr(self.descriptor, name) if there else None


def traced(layer: AllToAll, descriptor: Descriptor) -> TracedDescriptor:
    """A Descriptor for compiled code."""
    return TracedDescriptor(
        operators.handle_of(layer, descriptor),
        layer._traced,
        torch.device(layer.device),
        descriptor.num_dispatch_token_cur_rank,
        descriptor.rows,
        descriptor.order,
        descriptor.expert_alignment,
        descriptor.worst_case_rows,
        descriptor.has_weights,
    )


class TracedDispatch(NamedTuple):
    """The result of dispatch_traced(); see AllToAll.dispatch()."""

    output: Tensor
    weights: Optional[Tensor]
    scales: Optional[Tensor]
    expert_ids: Optional[Tensor]
    descriptor: TracedDescriptor


def dispatch_traced(
    layer: AllToAll,
    input: Tensor,
    expert_indices: Optional[Tensor] = None,
    *,
    weights: Optional[Tensor] = None,
    scales: Optional[Tensor] = None,
    scatter_indices: Optional[Tensor] = None,
    order: str = "expert_major",
    expert_alignment: int = 1,
    worst_case_rows: int = 0,
    copy_out: bool = False,
    cached: Union[Descriptor, TracedDescriptor, None] = None,
) -> TracedDispatch:
    """dispatch() that always calls the torch operator, takes scales, and returns everything that
    AllToAll.dispatch() returns."""
    sizes = layer._traced
    rows = handle = None
    if cached is not None:
        cached = traced(layer, cached) if isinstance(cached, Descriptor) else cached
        handle, rows = cached._handle, cached.rows
        order = cached.order if order == "expert_major" else order
    output, given, factors, expert_ids, made = torch.ops.winnow.expert_parallel_dispatch(
        input, weights, None, sizes[0], sizes[4], expert_indices, scales=scales,
        scatter_indices=scatter_indices, order=order, expert_alignment=expert_alignment,
        worst_case_rows=worst_case_rows, copy_out=copy_out, cached=handle, rows=rows,
    )  # fmt: skip
    descriptor = TracedDescriptor(
        made,
        sizes,
        output.device,
        input.shape[0],
        output.shape[0],
        order,
        expert_alignment if cached is None else cached.expert_alignment,
        worst_case_rows if cached is None else cached.worst_case_rows,
        weights is not None,
    )
    return TracedDispatch(
        output,
        given if weights is not None else None,
        factors.detach() if scales is not None else None,
        expert_ids if order == "token_major" else None,
        descriptor,
    )


def _is_traced(descriptor) -> bool:
    """Whether operators are to be called: a compiler, a mode of torch or a transform of torch.func
    looks at them, or there is a handle only."""
    if type(descriptor) is TracedDescriptor or is_compiling():
        return True
    return count_modes() > 0 or transforms_active()


def _is_recorded(*leaves) -> bool:
    """Whether a call with these leaves goes through autograd: a gradient is recorded, or tangents
    are to be refused."""
    wanted = any(getattr(leaf, "requires_grad", False) for leaf in leaves)
    return (wanted and torch.is_grad_enabled()) or forward_mode_level() >= 0


def dispatch(
    layer: AllToAll,
    input: Tensor,
    expert_indices: Optional[Tensor] = None,
    *,
    weights: Optional[Tensor] = None,
    return_expert_ids: bool = False,
    **options: Any,
) -> Tuple[Any, ...]:
    """AllToAll.dispatch(), differentiable in input and weights.

    Args:
        layer: the AllToAll of this rank.
        input: [n, H]; expert_indices: [n, K], int32 or int64; weights: [n, K]; options: as in
            AllToAll.dispatch(), but for scales, out and stream. Whether input and weights require a
            gradient must be the same on every rank, also on one without tokens: the backward pass
            is collective for each of them.
        return_expert_ids: returns them too.

    Returns:
        (output [R, H], weights [R], in token-major order [R, K], or None, descriptor), and with
        return_expert_ids the local experts of the pairs of token-major rows [R, K], int32, or None.

    Raises:
        ValueError, winnow.Error: as AllToAll.dispatch(), also if input or weights are not torch
            tensors, and for scales, out and stream; the backward pass as AllToAll.combine().
    """
    for name in ("scales", "out", "stream"):
        if options.pop(name, None) is not None:
            layer._refuse_dispatch(f"{name}: want none with gradients, got one")
    for name, given in (("input", input), ("weights", weights)):
        if given is not None and not isinstance(given, Tensor):
            got = type(given).__name__
            layer._refuse_dispatch(f"{name}: want a tensor of torch, got {got}")
    if _is_traced(options.get("cached")):
        got = dispatch_traced(layer, input, expert_indices, weights=weights, **options)
        results = (got.output, got.weights, got.descriptor, got.expert_ids)
        return results if return_expert_ids else results[:3]

    recorded = _is_recorded(input, weights)
    with GradPaused(recorded):
        got = layer.dispatch(input, expert_indices, weights=weights, **options)
    results = (got.output, got.weights, got.descriptor, got.expert_ids)
    if recorded:
        way = _Way(layer, got.descriptor)
        output, given, *others = gradients.Dispatch.apply(input, weights, results, way)
        if not input.requires_grad:
            output = output.detach()
        if given is not None and not weights.requires_grad:
            given = given.detach()
        results = (output, given, *others)
    return results if return_expert_ids else results[:3]


def combine(
    layer: AllToAll,
    expert_output: Tensor,
    descriptor: Union[Descriptor, TracedDescriptor],
    *,
    weights: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tensor:
    """AllToAll.combine(), differentiable in expert_output, weights and bias.

    Args:
        layer: the AllToAll of this rank.
        expert_output: [R, H]; descriptor: of the dispatch; bias: [n, H].
        weights: the weights that dispatch() returned with this descriptor, for a weighted sum; None
            for a plain sum. The library multiplies by the weights that were sent and does not read
            these, which only receive the gradient: with other or changed ones it is wrong.

    Returns:
        [n, H].

    Raises:
        ValueError, winnow.Error: as AllToAll.combine(); the backward pass as AllToAll.dispatch().
    """
    if _is_traced(descriptor):
        if isinstance(descriptor, Descriptor):
            descriptor = traced(layer, descriptor)
        sizes = layer._traced
        return torch.ops.winnow.expert_parallel_combine(
            expert_output, weights, bias, after=None, layer=sizes[0], topk=sizes[4],
            tokens=descriptor.num_dispatch_token_cur_rank, descriptor=descriptor._handle,
        )  # fmt: skip
    recorded = _is_recorded(expert_output, weights, bias)
    with GradPaused(recorded):
        weighted = weights is not None
        combined = layer.combine(expert_output, descriptor, bias=bias, weighted=weighted)
    if not recorded:
        return combined
    way = _Way(layer, descriptor)
    return gradients.Combine.apply(expert_output, weights, bias, (combined,), way)


def notify(
    notifier: Notifier,
    tokens_per_rank: Tensor,
    tokens_per_node: Tensor,
    tokens_per_expert: Tensor,
    is_token_in_rank: Tensor,
    *,
    channels: int = 1,
    expert_alignment: int = 1,
    worst_case_rows: int = 0,
) -> operators.Notified:
    """winnow.expert_parallel.notify() as an operator, without queues: a tuple of its results."""
    return operators.Notified(
        *torch.ops.winnow.expert_parallel_notify(
            tokens_per_rank, tokens_per_node, tokens_per_expert, is_token_in_rank, after=None,
            notifier=notifier._traced, channels=channels, expert_alignment=expert_alignment,
            worst_case_rows=worst_case_rows,
        )
    )  # fmt: skip


class _Way:
    """See gradients."""

    __slots__ = ("_layer", "_descriptor")

    def __init__(self, layer, descriptor):
        self._layer, self._descriptor = layer, descriptor

    def combine(self, rows):
        return combine(self._layer, rows, self._descriptor)

    def repeat(self, tokens):
        rows, _, _ = dispatch(self._layer, tokens, cached=self._descriptor)
        return gradients.used_rows(rows, self._descriptor)

    def kept(self, rows):
        # Later combines of the descriptor, that of a backward pass too, may copy theirs there.
        buffer = self._layer.combine_buffer(self._descriptor)
        offset = rows.data_ptr() - buffer.data_ptr()
        return rows.clone() if 0 <= offset < buffer.nbytes else rows

    def weight_gradient(self, values):
        with GradPaused(True):
            gradient = gradients.weight_gradient(values, self._layer, self._descriptor)
        return gradients.WeightGradient.apply(values, (gradient,))
