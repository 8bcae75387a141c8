"""Megatron-core's DeepSeek Sparse Attention (DSA) on Winnow.

    import winnow.megatron
    winnow.megatron.register()  # in each process, before it makes a configuration
    config = MLATransformerConfig(
        ..., experimental_attention_variant="dsa", dsa_kernel_backend="winnow"
    )

register() adds "winnow" to the kernel backends of DSA and replaces nothing. The other functions are
the hooks that Megatron-core then calls: the indexer's choice, its loss, and the attention to the
chosen rows. A hook that cannot run a call returns None, so that Megatron-core runs its own PyTorch
code, and logs why: the logger "winnow.megatron" warns once for each reason.
"""

import functools
import itertools
import logging
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    Union,
    cast,
)

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from winnow import torch as operators
from winnow._refusal import refuse
from winnow.support import supports

__all__ = [
    "VERSIONS",
    "register",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
]

VERSIONS = ("0.19.2",)
"""The versions of megatron-core that register() takes."""

# A loss of more scores than this is formed in pieces, which the backward pass forms again.
_PIECE_SCORES = 1 << 24

_VALUE_DIM = 512  # of sparse_mla
_HEADS = 128  # at most, of the indexer
_LOG = logging.getLogger(__name__)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def register() -> None:
    """Adds "winnow" to the values of dsa_kernel_backend; a second call changes nothing.

    Raises:
        ImportError: there is no megatron-core.
        ValueError: its version is none of VERSIONS, or something else is called "winnow" there.
    """
    import megatron.core
    from megatron.core import utils

    version = megatron.core.__version__.partition("+")[0]
    if version not in VERSIONS:
        refuse("winnow.megatron", "megatron.core.__version__", " or ".join(VERSIONS), version)
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    module = dsa_kernels._BACKEND_MODULE_NAME_BY_BACKEND.setdefault("winnow", __name__)
    if module != __name__:
        refuse("winnow.megatron", "the backend winnow", __name__, module)
    if "winnow" not in utils._VALID_DSA_KERNEL_BACKENDS:
        utils._VALID_DSA_KERNEL_BACKENDS = (*utils._VALID_DSA_KERNEL_BACKENDS, "winnow")


class _Declined(Exception):
    """Why a hook does not run a call."""


_logged: Set[Tuple[str, str]] = set()


def _hook(run: _Hook) -> _Hook:
    @functools.wraps(run)
    def hook(*arguments: Any, **options: Any) -> Any:
        try:
            return run(*arguments, **options)
        except _Declined as declined:
            said = run.__name__, str(declined)
        level = logging.DEBUG if said in _logged else logging.WARNING
        _logged.add(said)
        _LOG.log(level, "%s: megatron-core's own code runs, since %s", *said)
        return None

    return cast(_Hook, hook)


@functools.cache
def _why_not(operation: str, dtype: torch.dtype, device: str, **sizes: int) -> str:
    try:
        return supports(operation, dtype=dtype, device=device, **sizes).reason
    except ValueError as error:  # the dtype or the device is none that Winnow knows
        return str(error)


def _check(q: Tensor, k: Tensor, operations: Iterable[str], **sizes: int) -> None:
    if q.dtype != k.dtype:
        raise _Declined(f"queries are {q.dtype} and keys {k.dtype}")
    for operation in operations:
        if reason := _why_not(operation, q.dtype, str(q.device), **sizes):
            raise _Declined(reason)


def _check_indexer(q: Tensor, k: Tensor, with_loss: bool) -> None:
    loss = ("indexer.scores", "indexer.backward") if with_loss else ()
    _check(q, k, ("indexer.topk", *loss), h=q.shape[-2], d=q.shape[-1])


def _check_attention(query: Tensor, key: Tensor, with_loss: bool, backward: bool) -> None:
    if key.shape[2] != 1:
        heads = f"keys have {key.shape[2]} heads"
        raise _Declined(f"{heads}: Winnow attends to latent rows alone (absorbed MLA)")
    operations = ["sparse_mla.forward"]
    if with_loss:
        operations.append("sparse_mla.distribution")
    if backward and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        operations.append("sparse_mla.backward")
    _check(query, key, operations, h_q=query.shape[2], d_qk=query.shape[3])


def _check_values(v_channels: int) -> None:
    if v_channels != _VALUE_DIM:
        raise _Declined(f"kv_lora_rank is {v_channels}: Winnow has {_VALUE_DIM} value channels")


class _Scored(NamedTuple):
    """The indexer's part of one sequence."""

    q: Tensor  # [queries, h, d]
    k: Tensor  # [rows, d]
    weights: Tensor  # [queries, h]
    start: Tensor  # [queries], int32: a query sees the rows from start to end
    end: Tensor

    def of(self, queries: slice) -> "_Scored":
        start, end = self.start[queries], self.end[queries]
        return _Scored(self.q[queries], self.k, self.weights[queries], start, end)

    def limits(self) -> Dict[str, Any]:
        return {"key_start": self.start, "key_end": self.end}

    def choose(self, topk: int) -> Tensor:
        """[queries, min(topk, rows)], int32: ascending, then -1."""
        topk = max(0, min(topk, self.k.shape[0]))
        tensors = self.q.detach(), self.k.detach(), self.weights.detach()
        return operators.indexer_topk(*tensors, max(1, topk), **self.limits())[0][:, :topk]


class _Attending(NamedTuple):
    """The attention's part of one sequence."""

    query: Tensor  # [queries, heads, 576 or 512]
    rows: Tensor  # [rows, 1, 576 or 512]
    scale: float

    def of(self, queries: slice) -> "_Attending":
        return self._replace(query=self.query[queries])

    def attend(self, indices: Tensor, length: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        """(out, lse) over the chosen rows."""
        return operators.sparse_mla_attention(
            self.query,
            self.rows,
            indices,
            scale=self.scale,
            topk_length=length,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            return_lse=True,
        )


def _check_batch(batch: int, name: str, got: int) -> None:
    if got != batch:
        refuse("winnow.megatron", name, f"a batch of {batch}, as the first argument has", got)


def _check_shape(name: str, got: Tensor, *wanted: Sequence[int]) -> None:
    if got.shape not in wanted:
        shapes = " or ".join(str(list(shape)) for shape in wanted)
        refuse("winnow.megatron", name, f"shape {shapes}", list(got.shape))


def _sequences(order: Optional[Tensor] = None, **tensors: Tensor) -> Iterator[Tuple[Tensor, ...]]:
    """Those of each sequence of a batch, from [rows, batch, ...]: views. The names of keys begin
    with k; they are put into `order`."""
    batch = next(iter(tensors.values())).shape[1]
    counts: Dict[str, int] = {}
    for name, tensor in tensors.items():
        _check_batch(batch, name, tensor.shape[1])
        of, got = "keys" if name[0] == "k" else "queries", len(tensor)
        if got != counts.setdefault(of, got):
            refuse("winnow.megatron", name, f"{counts[of]} {of}, as the tensors before have", got)

    def parts(name: str, tensor: Tensor) -> Sequence[Tensor]:
        if order is not None and name[0] == "k":
            tensor = tensor.index_select(0, order)
        tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
        # The backward pass of unbind() copies.
        return (tensor.squeeze(1),) if tensor.shape[1] == 1 else tensor.unbind(1)

    return zip(*itertools.starmap(parts, tensors.items()), strict=True)


# Without sequences results have no elements, but the shapes and the graph of some input.


def _choice(chosen: List[Tensor], q: Tensor, k: Tensor, topk: int) -> Tensor:
    """[batch, queries, min(topk, rows)] of those of each sequence."""
    columns = max(0, min(topk, k.shape[0]))
    none = q.new_zeros((0, q.shape[0], columns), dtype=torch.int32)
    return torch.stack(chosen) if chosen else none


def _values(outs: List[Tensor], query: Tensor) -> Tensor:
    """[queries, batch, heads, channels] of those of each sequence."""
    if not outs:
        return query[..., :_VALUE_DIM]
    return outs[0].unsqueeze(1) if len(outs) == 1 else torch.stack(outs, 1)


def _with_relu(q: Tensor, weights: Tensor, use_relu: bool) -> Tuple[Tensor, Tensor]:
    """Queries and weights whose scores, which have a ReLU, are the wanted ones."""
    weights = weights.float()
    if use_relu:
        return q, weights
    if q.shape[-2] > _HEADS // 2:
        raise _Declined(f"without ReLU Winnow takes {_HEADS // 2} indexer heads, not {q.shape[-2]}")
    # x = relu(x) - relu(-x): twice as many heads, and nothing is rounded. A product of exactly 0
    # passes no gradient on.
    return torch.cat((q, -q), -2), torch.cat((weights, -weights), -1)


def _losses(
    scored: _Scored, attending: _Attending, indices: Optional[Tensor], lse: Tensor, group: Any
) -> Tensor:
    limits = scored.limits()
    with torch.no_grad():
        ranges = limits if indices is None else {}
        target = operators.sparse_mla_distribution(
            attending.query, attending.rows, indices, lse, scale=attending.scale, **ranges
        )
        if group is not None and group.size() > 1:  # its processes share the heads
            torch.distributed.all_reduce(target, group=group)
    of_indexer = scored.q, scored.k, scored.weights
    return operators.indexer_loss(*of_indexer, target, indices, reduction="none", **limits)


def _loss_of_queries(
    scored: _Scored,
    attending: _Attending,
    indices: Optional[Tensor],
    lse: Optional[Tensor],
    groups: Any,
) -> Tensor:
    """Of each query of a sequence: over the chosen rows, whose lse it is, or over all that it sees,
    where both are None."""
    count, columns = scored.q.shape[0], scored.k.shape[0] if indices is None else indices.shape[1]
    step = max(1, _PIECE_SCORES // max(1, columns))
    losses = []
    for begin in range(0, max(1, count), step):
        piece = slice(begin, begin + step)
        of_scored, of_attending = scored.of(piece), attending.of(piece)
        if indices is None or lse is None:
            with torch.no_grad():
                query, rows, scale = of_attending
                limits = of_scored.limits()
                own = operators.sparse_mla_forward(query, rows, None, scale=scale, **limits)[2]
        else:
            own = lse[piece]
        chosen = None if indices is None else indices[piece]
        arguments = of_scored, of_attending, chosen, own, getattr(groups, "tp", None)
        if count <= step:
            losses.append(_losses(*arguments))
        else:
            kept: Any = {"use_reentrant": False, "preserve_rng_state": False}
            losses.append(checkpoint(_losses, *arguments, **kept))
    return torch.cat(losses)


def _loss(
    losses: List[Tensor],
    weights: Tensor,
    valid: Optional[Tensor],
    coefficient: float,
    per_token: bool,
) -> Tensor:
    """What becomes of those of all queries."""
    every = torch.stack(losses) if losses else weights.sum(-1).mT
    count: Union[int, Tensor] = max(1, every.numel())
    if valid is not None:
        batch, queries = every.shape
        _check_shape("query_valid_rows", valid, (queries,), (1, queries), (batch, queries))
        valid = torch.atleast_2d(valid.bool()).expand_as(every)
        every, count = torch.where(valid, every, 0), valid.sum().clamp(min=1)
    total = every.sum()
    return coefficient * (total if per_token else total / count)


def _numbers(given: Tensor, least: int, most: int) -> Tensor:
    """As int32, in which numbers of 64 bits beyond these bounds would come to lie within them."""
    return (given if given.dtype == torch.int32 else given.clamp(least, most)).int()


def _ranges(
    starts: Optional[Tensor],
    ends: Optional[Tensor],
    key_positions: Optional[Tensor],
    query: Tensor,
    key: Tensor,
) -> Tuple[Optional[Tensor], Tensor, Tensor]:
    """(the order of the rows by position, or None where they have it; where the rows that a query
    sees begin and end in it)."""
    queries, rows = query.shape[0], key.shape[0]
    order = None
    if starts is None:  # causal
        ends = torch.arange(1, queries + 1, device=query.device)
        starts = torch.zeros_like(ends)
    elif ends is None:
        refuse("winnow.megatron", "varlen_ends", "where the rows end, as with varlen_starts", None)
    elif key_positions is not None:
        _check_shape("key_positions", key_positions, (rows,))
        positions, order = key_positions.long().sort(stable=True)
        starts, ends = (torch.searchsorted(positions, limit.long()) for limit in (starts, ends))
    return order, _numbers(starts, 0, rows), _numbers(ends, 0, rows)


# What Megatron-core says besides (`layout`: the packed sequences, and which queries a process of
# context parallelism has) is for backends that do not go by starts and ends.


@_hook
def run_fused_qk_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    use_relu: bool = True,
    **layout: Any,
) -> Optional[Tuple[Tensor, None]]:
    """The rows that an indexer chooses: (indices [b, s_q, topk], None)."""
    with torch.no_grad():
        q, weights = _with_relu(q, weights, use_relu)
        _check_indexer(q, k, with_loss=False)
        limits = tuple(_numbers(limit, 0, k.shape[0]) for limit in (starts, ends))
        chosen = [
            _Scored(*tensors, *limits).choose(index_topk)
            for tensors in _sequences(q=q, k=k, weights=weights)
        ]
        return _choice(chosen, q, k, index_topk), None


@_hook
def run_fused_qk_topk_with_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Optional[Tensor] = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    config: Any = None,
    **layout: Any,
) -> Optional[Tuple[Tensor, None, Tensor]]:
    """The same, and the loss over the chosen rows: (indices, None, loss)."""
    q, weights = _with_relu(q, weights, use_relu)
    _check_indexer(q, k, with_loss=True)
    _check_attention(query, key, with_loss=True, backward=False)
    limits = tuple(_numbers(limit, 0, k.shape[0]) for limit in (starts, ends))
    chosen, losses = [], []
    tensors = {"q": q, "k": k, "weights": weights, "query": query, "key": key}
    for *indexer, of_heads, rows in _sequences(**tensors):
        scored, attending = _Scored(*indexer, *limits), _Attending(of_heads, rows, softmax_scale)
        indices = scored.choose(index_topk)
        with torch.no_grad():
            _, lse = attending.attend(indices)
        losses.append(_loss_of_queries(scored, attending, indices, lse, pg_collection))
        chosen.append(indices)
    loss = _loss(losses, weights, query_valid_rows, loss_coeff, calculate_per_token_loss)
    return _choice(chosen, q, k, index_topk), None, loss


@_hook
def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """Attention to the chosen rows: [s_q, b, heads, v_channels]."""
    _check_values(v_channels)
    _check_attention(query, key, with_loss=False, backward=True)
    batch = query.shape[1]
    _check_batch(batch, "topk_indices", topk_indices.shape[0])
    if topk_length is not None:
        _check_batch(batch, "topk_length", topk_length.shape[0])
    columns, rows = topk_indices.shape[-1], key.shape[0]
    lengths = [None] * batch if topk_length is None else _numbers(topk_length, 0, columns)
    indices = _numbers(topk_indices, -1, rows)
    parts = zip(_sequences(query=query, key=key), indices, lengths, strict=True)
    outs = [_Attending(*part, softmax_scale).attend(of, length)[0] for part, of, length in parts]
    return _values(outs, query)


@_hook
def run_fused_dsa_attention(
    *,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Optional[Tensor],
    up_v_weight: Optional[Tensor],
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    attn_mask_type: Any,
    varlen_starts: Optional[Tensor],
    varlen_ends: Optional[Tensor],
    key_positions: Optional[Tensor],
    query_valid_rows: Optional[Tensor],
    use_relu: bool,
    pg_collection: Any = None,
    **layout: Any,
) -> Optional[Tuple[Tensor, Tensor]]:
    """The choice, its loss and the attention: (out [s_q, b, heads * v_head_dim], loss)."""
    if attn_mask_type is None or attn_mask_type.name != "causal":
        kind = getattr(attn_mask_type, "name", None)
        raise _Declined(f"attn_mask_type is {kind}: the causal mask is the only one it is told of")
    if not absorbed_mla or value is not None or up_v_weight is None:
        raise _Declined("each head has values: Winnow attends to latent rows alone (absorbed MLA)")
    with_loss = loss_coeff > 0
    q, weights = _with_relu(q_indexer, indexer_weights, use_relu)
    _check_indexer(q, k_indexer, with_loss)
    _check_values(config.kv_lora_rank)
    _check_attention(query, key, with_loss, backward=True)
    order, *limits = _ranges(varlen_starts, varlen_ends, key_positions, query, key)
    outs, losses = [], []
    tensors = {"q_indexer": q, "k_indexer": k_indexer, "indexer_weights": weights}
    for *indexer, of_heads, rows in _sequences(order, **tensors, query=query, key=key):
        scored, attending = _Scored(*indexer, *limits), _Attending(of_heads, rows, softmax_scale)
        indices = scored.choose(indexer_topk)
        out, lse = attending.attend(indices)
        outs.append(out)
        if with_loss:
            over = (indices, lse) if sparse_loss else (None, None)
            losses.append(_loss_of_queries(scored, attending, *over, pg_collection))
    values = torch.einsum("sbhc,hdc->sbhd", _values(outs, query), up_v_weight).flatten(2)
    if not with_loss:
        return values, query.new_zeros((), dtype=torch.float32)
    return values, _loss(losses, weights, query_valid_rows, loss_coeff, calculate_per_token_loss)
