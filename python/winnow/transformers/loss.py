"""How the indexers of a model choose, the loss that trains them, and what it is judged by."""

from functools import partial
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from winnow import torch as operators
from winnow.context_parallel import Rows, Tokens
from winnow.indexer_loss import attention_of_heads
from winnow.transformers import absorbed, compressed, inside, tensor_parallel
from winnow.transformers.context_parallel import context_of
from winnow.transformers.families import DeepseekV4, Family
from winnow.transformers.layer import Record, flat_indices, flat_ranges, heads_matrices
from winnow.transformers.placed import Placed
from winnow.transformers.refusal import refuse
from winnow.transformers.registry import family_of

AnyRecord = Union[Record, compressed.Record]


def _attentions(model: nn.Module) -> Iterator[Tuple[Family, nn.Module]]:
    """The layers of a model that attend to chosen rows, in their order."""
    if not isinstance(model, nn.Module):
        refuse("model", "a module of torch", type(model).__name__)
    for module in model.modules():
        config = getattr(module, "config", None)
        # Its own child: a wrapper around the layer has all names that the layer has.
        children = {"kv_b_proj", "o_a_proj"} & module._modules.keys()
        family = family_of(config) if children else None
        if family is not None and family.child in children and family.has_indexer(module):
            yield family, module


def all_attentions(model: nn.Module) -> Iterator[Tuple[Family, nn.Module]]:
    """Those of _attentions(); an error where there is none."""
    found = list(_attentions(model))
    if not found:
        refuse("model", "one with DeepSeek Sparse Attention", type(model).__name__)
    return iter(found)


def _check_mode(mode: bool) -> None:
    if not isinstance(mode, bool):
        refuse("mode", "True or False", repr(mode))


def attend_densely(model: nn.Module, mode: bool = True) -> None:
    """Has a model on "winnow" attend to all rows that a query sees, from the next forward pass on:
    for the first stage of an indexer's training. With mode False it attends to the chosen rows.

    A sequence that is generated with a cache may change over at any token.
    """
    _check_mode(mode)
    for _, attention in all_attentions(model):
        attention._winnow_dense = mode


def choose_in_f8(model: nn.Module, mode: bool = True) -> None:
    """Has the indexers of a model on "winnow" score rows in float8_e4m3fn, each query and key with
    a scale of its own, from the next forward pass on: quicker on a GPU, and what engines do that
    serve such a model. With mode False they score in the model's own dtype."""
    _check_mode(mode)
    for family, attention in all_attentions(model):
        indexer = family.indexer_of(attention)
        if indexer is not None:
            for module in indexer.modules():  # a wrapper may be around it
                module._winnow_f8 = mode


class _Sequence(NamedTuple):
    """One sequence of the last forward pass of a layer, or several with ranges of their own. Of the
    indexer: q [queries, h, d], k [rows, d], weights [queries, h]. If several ranks share them,
    queries are this rank's, and k and rows those of all."""

    q: Tensor
    k: Union[Tensor, Rows]
    weights: Tensor
    attending: Callable[[slice], Tensor]  # the attention's queries, [queries, heads, 576 or 512]
    piece: int  # how many queries are worked on at a time
    rows: Union[Tensor, Rows]  # [rows, 1, 576 or 512]
    sink: Optional[Tensor]  # [heads]
    indices: Optional[Tensor]  # [queries, topk]; None where all rows were attended to
    key_start: Tensor  # [queries]
    key_end: Tensor
    lse: Tensor  # [queries, heads], over the rows attended to
    scale: float
    topk: int
    heads: int  # in all processes
    group: Optional["torch.distributed.ProcessGroup"] = None  # whose processes share them
    others: bool = False  # whether lse is over other rows, too
    tokens: Optional[Tokens] = None  # of several ranks

    def pieces(self) -> Iterator[slice]:
        queries = self.q.shape[0]
        for begin in range(0, queries, self.piece):
            yield slice(begin, min(queries, begin + self.piece))

    def limits(self, queries: slice) -> dict:
        return {"key_start": self.key_start[queries], "key_end": self.key_end[queries]}

    def lse_of(self, attending: Tensor, indices: Optional[Tensor], **ranges: Tensor) -> Tensor:
        """Of some queries over chosen rows, or over ranges of rows."""
        options = {"scale": self.scale, "return_lse": True, **ranges}
        of = operators if self.tokens is None else self.tokens
        return of.sparse_mla_attention(attending, self.rows, indices, **options)[1]

    def choice_of(self, queries: slice) -> Tensor:
        """What the indexer chooses, where all rows were attended to."""
        of = operators if self.tokens is None else self.tokens
        scored = self.q[queries], self.k, self.weights[queries]
        return of.indexer_topk(*scored, self.topk, **self.limits(queries))[0]


def _sequences(
    family: Family, attention: nn.Module, record: AnyRecord, carrier: Tensor
) -> Iterator[_Sequence]:
    """The sequences of a batch; the indexer's tensors with gradients in its weights alone. Within
    the forward pass of the layer, which has its parameters there (see inside.call())."""
    if isinstance(record, compressed.Record):
        yield _of_compressed_rows(family, attention, record, carrier)
        return
    batch, queries, _ = record.hidden.shape
    dtype, placed = record.rows.dtype, record.placed
    with torch.no_grad():
        sizes = [512, record.rows.shape[-1] - 512]
        rows = tuple(part[:, None] for part in record.rows.split(sizes, -1))
        projected = family.project(
            attention, record.hidden, record.embeddings, record.position_ids, None,
            {"rope": rows, "nope": rows},
        )  # fmt: skip
        matrices = heads_matrices(attention, dtype, record.rows.device)
        sink = family.sink(attention)
        sink = None if sink is None else sink.to(torch.float32, copy=True)
    indexer = attention.indexer

    def score(carrier: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        q, k, weights = family.score(
            indexer, record.hidden, projected.q_resid, record.embeddings, record.position_ids
        )
        return q, k, weights + carrier

    q, k, weights = inside.call(indexer, score, carrier)
    if placed is not None:
        yield _of_part(attention, record, projected, matrices, sink, q, k, weights)
        return
    for b in range(batch):
        start, end = (limit.contiguous() for limit in record.ranges[b].unbind(-1))
        indices = None if record.indices is None else record.indices[b]
        problem = absorbed.Problem(
            projected.q_pass[b].to(dtype), projected.q_rope[b].to(dtype), record.rows[b, :, None],
            *matrices, sink, indices, start, end,
        )  # fmt: skip
        yield _Sequence(
            q[b].to(dtype), k[b].to(dtype), weights[b], partial(_absorbed, problem),
            absorbed.piece_of(problem), problem.rows, sink, indices, start, end,
            lse=record.lse[b], scale=attention.scaling,
            topk=max(1, min(indexer.index_topk, queries)), heads=attention.num_heads,
            group=record.group,
        )  # fmt: skip


def _of_part(attention, record, projected, matrices, sink, q, k, weights) -> _Sequence:
    """All sequences of a batch of which this rank has some tokens."""
    tokens, dtype = record.placed.tokens, record.rows.dtype
    rows = tokens.gather(record.rows.flatten(0, 1)[:, None])
    indices = record.indices
    if indices is not None:
        indices = flat_indices(indices, tokens.count).flatten(0, 1)
    ranges = flat_ranges(record.ranges, tokens.count)
    problem = absorbed.Problem(
        projected.q_pass.flatten(0, 1).to(dtype), projected.q_rope.flatten(0, 1).to(dtype),
        rows.local, *matrices, sink, indices, **ranges,
    )  # fmt: skip
    return _Sequence(
        q.flatten(0, 1).to(dtype), tokens.gather(k.flatten(0, 1).to(dtype)), weights.flatten(0, 1),
        partial(_absorbed, problem), absorbed.piece_of(problem, rows), rows, sink, indices,
        **ranges, lse=record.lse.flatten(0, 1), scale=attention.scaling,
        topk=max(1, min(attention.indexer.index_topk, tokens.count)), heads=attention.num_heads,
        group=record.group, tokens=tokens,
    )  # fmt: skip


def _absorbed(problem: absorbed.Problem, queries: slice) -> Tensor:
    parts = problem.q_pass[queries], problem.q_rope[queries]
    return absorbed.absorbed_queries(*parts, problem.w_k)


def _of_compressed_rows(
    family: DeepseekV4, attention: nn.Module, record: compressed.Record, carrier: Tensor
) -> _Sequence:
    """All sequences of a batch. The window and the sink have their part of each head's softmax, and
    the target is what falls on the compressed rows."""
    hidden, sequences, rows = record.hidden, record.sequences, record.rows
    dtype, ratio = record.dtype, attention.compressor.compress_rate
    with torch.no_grad():
        q_resid = family.query_latent(attention, hidden)
        attending = family.attention_query(attention, q_resid, *record.embeddings)
        attending = attending.flatten(0, 1).to(dtype)
        sink = attention.sinks.to(torch.float32, copy=True)
    indexer = family.indexer_of(attention)

    def score(carrier: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        keys = compressed.compressed_rows(indexer, hidden, sequences)
        q = family.indexer_query(indexer, hidden, q_resid, sequences.position_ids)
        weights = family.indexer_weights(indexer, hidden) + carrier
        return q.flatten(0, 1).to(dtype), keys.rows.to(dtype), weights.flatten(0, 1)

    within = partial(inside.call, indexer, score)
    q, k, weights = inside.call(attention.compressor, within, carrier)
    attended, tokens = rows.rows[:, None].to(dtype), None
    if isinstance(sequences, Placed):
        tokens = sequences.tokens
        of_rows, of_keys = (
            compressed.windows_of(sequences, module, hidden.device)
            for module in (attention.compressor, indexer)
        )
        attended, k = tokens.gather(attended, of_rows), tokens.gather(k, of_keys)
    seen = compressed.seen_rows(attention.compressor, sequences, rows, hidden.device)
    return _Sequence(
        q, k, weights, attending.__getitem__, max(1, len(attending)), attended, sink,
        record.chosen, **seen, lse=record.lse, scale=attention.scaling,
        topk=max(1, min(indexer.index_topk, sequences.longest // ratio)),
        heads=attention.num_heads, others=True, tokens=tokens,
    )  # fmt: skip


def _losses(sequence: _Sequence, queries: slice, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Of some queries, added up. The indexer's tensors are those of the sequence."""
    limits = sequence.limits(queries)
    chosen = None if sequence.indices is None else sequence.indices[queries]
    with torch.no_grad():
        attending = sequence.attending(queries)
        others = (sequence.lse[queries], sequence.scale, sequence.sink)
        if sequence.group is None or sequence.tokens is not None:
            teacher = {"attention": (attending, sequence.rows, *others)}
        else:
            ranges = limits if chosen is None else {}
            own = attention_of_heads(attending, sequence.rows, chosen, *others, **ranges)
            teacher = {"target": tensor_parallel.sum_over_heads(own, sequence.group)}
    options = {"indices": chosen, "reduction": "sum", **teacher, **limits}
    if sequence.tokens is None:
        return operators.indexer_loss(q[queries], k, weights[queries], **options)
    return sequence.tokens.indexer_loss(
        q[queries], k, weights[queries], heads_group=sequence.group, **options
    )


def _loss_of_layer(
    family: Family, attention: nn.Module, record: AnyRecord, carrier: Tensor
) -> Tensor:
    total, count = carrier, 0
    for sequence in _sequences(family, attention, record, carrier):
        leaves = (sequence.q, sequence.k, sequence.weights)
        pieces = list(sequence.pieces())
        for queries in pieces:
            if len(pieces) == 1:
                total = total + _losses(sequence, queries, *leaves)
            else:  # what a piece forms is formed again in the backward pass
                part = checkpoint(_losses, sequence, queries, *leaves, use_reentrant=False)
                total = total + part
        count = count + (sequence.key_end > sequence.key_start).sum()
        tokens = sequence.tokens
    return _mean(total, count, tokens)


def _mean(total: Tensor, count: Tensor, tokens: Optional[Tokens]) -> Tensor:
    """With `tokens`, a share of the mean over all ranks: so that the ranks' mean is that mean."""
    if tokens is not None:
        total, count = total * tokens.context.size, tokens.context.sum(count)
    return total / count.clamp(min=1)


def _share_of_layer(
    family: Family, attention: nn.Module, record: AnyRecord, carrier: Tensor
) -> Tensor:
    total, count = carrier, 0
    for sequence in _sequences(family, attention, record, carrier):
        for queries in sequence.pieces():
            of_chosen, of_all = _logs(sequence, queries)
            sees = sequence.key_end[queries] > sequence.key_start[queries]
            own = (of_chosen - of_all).exp().sum(-1)
            share = tensor_parallel.sum_over_heads(own, sequence.group) / sequence.heads
            total = total + torch.where(sees, share, 0).sum()
            count = count + sees.sum()
        tokens = sequence.tokens
    if tokens is not None:
        total = tokens.context.sum(total) / tokens.context.size
    return _mean(total, count, tokens)


def _records(model: nn.Module) -> Iterator[Tuple[Family, nn.Module, AnyRecord]]:
    found = False
    for family, attention in _attentions(model):
        record: Optional[AnyRecord] = getattr(attention, "_winnow_record", None)
        if family.indexer_of(attention) is None or record is None:
            continue
        found = True
        queries, rows = record.hidden.shape[1], record.tokens
        if rows != queries:
            wanted = f"a forward pass whose {queries} queries see no rows from before"
            refuse("past_key_values", wanted, f"{rows} rows")
        heads = record.lse.shape[-1]
        if heads != attention.num_heads and record.group is None:
            wanted = f"all {attention.num_heads} heads, or weights sharded by transformers"
            refuse("kv_b_proj", wanted, f"{heads} of them")
        yield family, attention, record
    if not found:
        wanted = 'one whose last forward pass was in training mode, on "winnow", with an indexer'
        refuse("model", wanted + " that is not frozen", type(model).__name__)


def _as_recorded(
    of_layer: Callable[..., Tensor],
    family: Family,
    attention: nn.Module,
    record: AnyRecord,
    carrier: Tensor,
) -> Tensor:
    """of_layer() under torch.autocast as it was in the forward pass. Weights that were cast where
    there was no gradient, as those of indexers, are not taken from its cache."""
    device, dtype = record.hidden.device.type, record.autocast
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
        return of_layer(family, attention, record, carrier)


def _agreed_records(model: nn.Module, call: str) -> List[Tuple[Family, nn.Module, AnyRecord]]:
    """Where several ranks share the sequences, what one of them refuses is an error on all: they
    would wait for it within the layers."""
    context = context_of(model) if isinstance(model, nn.Module) else None
    if context is None:
        return list(_records(model))
    with context.refusals():
        records = list(_records(model))
        context.agree(call, layers=str([attention.layer_idx for _, attention, _ in records]))
        return records


def _mean_of_layers(model: nn.Module, call: str, of_layer: Callable[..., Tensor]) -> Tensor:
    records = _agreed_records(model, call)
    calls = {found[1]: partial(_as_recorded, of_layer, *found) for found in records}
    device = records[0][2].hidden.device
    values = inside.each(model, calls, device)
    return torch.stack([value.to(device) for value in values]).mean()


def indexer_loss(model: nn.Module) -> Tensor:
    """How far the indexers' choice is from where the attention looks, in the last forward pass of
    a model in training mode: what trains the indexers, which no other loss reaches.

    For each layer with an indexer it is winnow.torch.indexer_loss() with the layer's own attention
    as the target: over all rows that a query sees where the model attends densely (see
    attend_densely(), the first stage of training), else over the chosen rows (the second stage).
    The result is the mean over queries that are no padding (of DeepSeek-V4, those that see a
    compressed row), and over these layers. Its gradient reaches the indexers' weights alone,
    whether the rest of the model is frozen or not:

        loss = model(ids, labels=ids).loss + indexer_loss(model)

    A model in training mode keeps for this, from one forward pass to the next, the inputs of its
    attention layers and the chosen rows; where indexers are frozen it keeps nothing. The call is
    one more forward pass of the attention layers inside of all modules around them, without the
    other layers: hooks run, parameters are gathered where they are sharded, and the backward pass
    reduces gradients. Every process of a group has to make it. With wrappers, model is what is
    called.

    Raises:
        ValueError: there was no such forward pass, it raised, or it began with rows in a cache; or
            model is a part of a FullyShardedDataParallel, or has find_unused_parameters or
            static_graph.
    """
    return _mean_of_layers(model, "indexer_loss", _loss_of_layer)


@torch.no_grad()
def attention_share(model: nn.Module) -> Tensor:
    """The share of the attention to all rows that falls on those which the indexer chooses, in the
    last forward pass of a model in training mode: the mean over heads, queries and layers with an
    indexer, from 0 to 1; sinks take no part. A trained indexer is near 1."""
    return _mean_of_layers(model, "attention_share", _share_of_layer)


def _logs(sequence: _Sequence, queries: slice) -> Tuple[Tensor, Tensor]:
    """lse over the chosen rows and over all rows, [queries, heads]."""
    limits = sequence.limits(queries)
    attending, known = sequence.attending(queries), sequence.lse[queries]

    lse = partial(sequence.lse_of, attending)
    chosen = None if sequence.indices is None else sequence.indices[queries]
    if chosen is not None and not sequence.others:
        return known, lse(None, **limits)
    of_all = known if chosen is None and not sequence.others else lse(None, **limits)
    if chosen is None:
        chosen = sequence.choice_of(queries)
    return lse(chosen), of_all
