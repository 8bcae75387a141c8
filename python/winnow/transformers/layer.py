"""The forward passes of attention and indexer modules under "winnow"."""

import contextlib
import functools
from typing import Callable, ContextManager, Iterator, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn
from transformers import Cache

from winnow import torch as operators
from winnow._torch_private import in_backward
from winnow.transformers import absorbed, inside, masks, tensor_parallel
from winnow.transformers.choices import MOST_COLUMNS, OPTION, Replaying, Tokens
from winnow.transformers.families import Family, Projected
from winnow.transformers.placed import Placed
from winnow.transformers.refusal import is_size, refuse


class Record(NamedTuple):
    """What the loss of an indexer needs of the last forward pass of its layer; detached."""

    hidden: Tensor
    embeddings: tuple  # (cos, sin) of the positions
    position_ids: Optional[Tensor]
    ranges: Tensor  # [batch, queries, 2]; empty for padding
    indices: Optional[Tensor]  # [batch, queries, topk]; None where all rows were attended to
    rows: Tensor  # [batch, rows, 576 or 512]
    lse: Tensor  # [batch, queries, heads of this process]
    group: Optional["torch.distributed.ProcessGroup"]  # whose processes share the heads
    autocast: Optional[torch.dtype]  # of torch.autocast, where it was on
    placed: Optional[Placed] = None  # where several ranks share the sequences

    def __reduce__(self):
        """None in its place in copies and files of the layer. They shall not hold what a batch was,
        and cannot hold a group of processes."""
        return type(None), ()

    @property
    def tokens(self) -> int:
        """Those of earlier calls among them."""
        return self.rows.shape[1]


def autocast_of(hidden: Tensor) -> Optional[torch.dtype]:
    """The dtype of torch.autocast, where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def working_dtype(hidden: Tensor) -> torch.dtype:
    """In which dtype attention runs, or an error."""
    device = hidden.device.type
    if device not in ("cpu", "cuda"):
        refuse("device", "cpu or cuda", device)
    dtype = autocast_of(hidden) or hidden.dtype
    possible = [torch.bfloat16] if device == "cuda" else [torch.float32, torch.bfloat16]
    if device == "cpu":
        possible.append(torch.float16)
    if dtype not in possible:
        names = " or ".join(str(d).removeprefix("torch.") for d in possible)
        refuse("dtype", f"{names} on {device}", str(dtype).removeprefix("torch."))
    return dtype


def check_options(attention: nn.Module, cache, options: dict) -> None:
    if attention.training and attention.attention_dropout > 0:
        refuse("attention_dropout", "0 in training", attention.attention_dropout)
    if options.get("output_attentions") or attention.config.output_attentions:
        refuse("output_attentions", "False: attention weights are never formed", True)
    if cache is not None and not isinstance(cache, Cache):  # that of continuous batching
        refuse("cache", "a Cache of transformers, as generate() makes it", type(cache).__name__)


def refusals_of(mask) -> ContextManager[None]:
    """Where several ranks share the sequences, what one of them refuses within is an error on all:
    they would wait for it in the agreement that follows."""
    if isinstance(mask, Placed):
        return mask.tokens.context.refusals()
    return contextlib.nullcontext()


def _check_positions(embeddings: tuple, hidden: Tensor) -> None:
    """Refuses position_ids of a shape other than [batch or 1, queries or 1], which the embeddings
    show: their shape is that of the positions and a last dimension."""
    batch, queries, _ = hidden.shape
    given = list(embeddings[0].shape[:-1])
    if len(given) != 2 or not is_size(given[0], 1, batch) or not is_size(given[1], 1, queries):
        refuse("position_ids", f"shape [batch, queries] = [{batch}, {queries}]", given)


def ranges_of(attention_mask: Optional[Tensor], hidden: Tensor, rows: int, options: dict) -> Tensor:
    batch, queries, _ = hidden.shape
    ours = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32
    if attention_mask is None:
        found = masks.ranges(batch, queries, rows, q_offset=rows - queries, device=hidden.device)
    elif ours and attention_mask.dim() == 3:
        found = attention_mask
    elif ours and attention_mask.dim() == 2:
        found = masks.of_padding(attention_mask, batch, queries, rows)
    else:
        found = masks.of_dense(attention_mask, batch, queries, rows)
    if found.shape != (batch, queries, 2):
        wanted = f"a mask of {batch} sequences of {queries} queries"
        refuse("attention_mask", wanted, f"shape {list(attention_mask.shape)}")
    if options.get("cu_seq_lens_q") is not None:
        lengths = options["cu_seq_lens_q"], options.get("cu_seq_lens_k")
        found = masks.of_sequences(found, rows, *lengths)
    return found


def heads_matrices(attention: nn.Module, dtype: torch.dtype, device) -> "tuple[Tensor, Tensor]":
    """W_UK [512, heads, d] and W_UV [512, heads, d_v], the weights of kv_b_proj: what it makes of
    the identity matrix, so that adapters and quantisation count."""
    projection = attention.kv_b_proj
    for name, module in projection.named_modules():
        path = f"kv_b_proj.{name}" if name else "kv_b_proj"
        if getattr(module, "bias", None) is not None:
            refuse(path, "a projection without bias", "one with a bias")
        dropout = isinstance(module, nn.Dropout) and module.p > 0 and module.training
        if dropout:
            refuse(path, "no dropout in training", f"p = {module.p}")
    unit = torch.eye(attention.kv_lora_rank, dtype=dtype, device=device)
    sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
    matrices = projection(unit).view(attention.kv_lora_rank, -1, sum(sizes))
    return matrices.to(dtype).split(sizes, -1)


def flat_indices(indices: Tensor, rows: int, sign: int = 1) -> Tensor:
    """[batch, queries, topk] row numbers within a sequence as numbers within the rows of the whole
    batch; with sign=-1 the other way. Negative ones stay as they are."""
    if indices.shape[0] == 1:
        return indices
    offset = torch.arange(indices.shape[0], dtype=torch.int32, device=indices.device) * rows
    return torch.where(indices < 0, indices, indices + sign * offset[:, None, None])


def flat_ranges(ranges: Tensor, rows: int) -> dict:
    """key_start and key_end over the rows of the whole batch, [batch * queries] each."""
    offset = torch.arange(ranges.shape[0], dtype=torch.int32, device=ranges.device) * rows
    start, end = (ranges + offset[:, None, None]).flatten(0, 1).unbind(-1)
    return {"key_start": start.contiguous(), "key_end": end.contiguous()}


def problem_of(
    family: Family,
    attention: nn.Module,
    projected: Projected,
    rows: Tensor,
    indices: Optional[Tensor] = None,
    **ranges: Tensor,
) -> absorbed.Problem:
    """rows: [batch * rows, 1, 576 or 512]; indices, or key_start and key_end, are numbers of these
    rows."""
    dtype = rows.dtype
    q_pass, q_rope = (q.flatten(0, 1).to(dtype) for q in (projected.q_pass, projected.q_rope))
    sink = family.sink(attention)
    matrices = heads_matrices(attention, dtype, rows.device)
    sink = None if sink is None else sink.float()
    return absorbed.Problem(q_pass, q_rope, rows, *matrices, sink, indices, **ranges)


def _attention(
    family: Family,
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple,
    attention_mask: Optional[Tensor] = None,
    cache=None,
    position_ids: Optional[Tensor] = None,
    prev_topk_indices: Optional[Tensor] = None,
    shared_kv_states=None,
    past_key_values=None,  # the name of `cache` in transformers 5.23
    **options,
):
    cache = past_key_values if cache is None else cache
    with refusals_of(attention_mask):
        check_options(self, cache, options)
        _check_positions(position_embeddings, hidden_states)
        dtype = working_dtype(hidden_states)
        projected = family.project(
            self, hidden_states, position_embeddings, position_ids, cache, shared_kv_states
        )
    batch, queries, _ = hidden_states.shape
    group = tensor_parallel.group_of(self, projected.q_pass.shape[2])
    # For latent alone: transformers itself sums the gradient of k_rope over the processes, at the
    # output of kv_a_proj_with_mqa.
    latent = tensor_parallel.read_by_heads(projected.latent, group)
    rows = torch.cat((latent, projected.k_rope), -1).to(dtype)
    placed = attention_mask if isinstance(attention_mask, Placed) else None
    gathered = None
    if placed is None:
        count = rows.shape[1]
        ranges = ranges_of(attention_mask, hidden_states, count, options)
    else:  # the rows of other ranks come while the indexer chooses
        count, ranges = placed.tokens.count, placed.ranges
        gathered = placed.tokens.gather(rows.flatten(0, 1)[:, None])
    indices = prev_topk_indices
    dense = getattr(self, "_winnow_dense", False)
    given = options.get(OPTION)
    with refusals_of(attention_mask):
        check_given(self, given, cache, count - queries, placed)
    if dense and cache is None:
        indices = None
    elif self.indexer is not None:
        replays = isinstance(given, Replaying)
        if not replays or cache is not None:  # into which its keys go
            resid = {} if projected.q_resid is None else {"q_resid": projected.q_resid}
            indices = self.indexer(
                hidden_states=hidden_states, position_embeddings=position_embeddings,
                attention_mask=ranges if placed is None else placed, position_ids=position_ids,
                cache=cache, **resid,
            )  # fmt: skip
        if given is not None:
            tokens, first = _tokens(ranges, count), ranges[..., :1]
        if replays:
            within = given.rows(self.layer_idx, tokens).view(batch, queries, -1)
            indices = torch.where(within < 0, -1, within + first)
        elif given is not None:
            within = torch.where(indices < 0, -1, indices - first)
            given.add(self.layer_idx, within.flatten(0, 1), tokens)
    elif indices is None:
        refuse("prev_topk_indices", "the indices of a layer before that has an indexer", None)
    if dense:
        which = flat_ranges(ranges, count)
    else:
        which = {"indices": flat_indices(indices, count).flatten(0, 1)}
    with refusals_of(attention_mask):
        problem = problem_of(family, self, projected, rows.flatten(0, 1)[:, None], **which)
    values, lse = absorbed.attend(problem, self.scaling, gathered)
    if gathered is not None:
        gathered.release()
    # With a sink, nothing falls on rows of the smallest logits.
    uneven = placed is not None or problem.sink is not None
    even = None if uneven else masks.even(attention_mask, hidden_states.dtype)
    if even is not None:
        even = even.expand(batch, queries).reshape(-1, 1, 1)
        values = torch.where(even, absorbed.attend_evenly(problem, self.scaling, batch), values)
    if self.indexer is not None and recording(self, self.indexer):
        self._winnow_record = Record(
            hidden_states.detach(), tuple(part.detach() for part in position_embeddings),
            position_ids, _without_padding(ranges, count, placed), None if dense else indices,
            rows.detach(), lse.view(batch, queries, -1), group, autocast_of(hidden_states), placed,
        )  # fmt: skip
    values = family.gated(self, hidden_states, values.view(batch, queries, *values.shape[1:]))
    out = self.o_proj(values.reshape(batch, queries, -1))
    return (out, None, indices) if family.shares_indices else (out, None)


def check_given(
    attention: nn.Module, given, cache, seen: int, placed: Optional[Placed] = None
) -> None:
    """Refuses what has no choice, or does not say of which tokens it is. seen: tokens of earlier
    calls."""
    if given is None:
        return
    if placed is not None:
        refuse("model", "one whose ranks do not share sequences", "one with context parallel")
    if getattr(attention, "_winnow_dense", False):
        refuse("model", "one that attends to chosen rows", "one that attends densely")
    if isinstance(given, Replaying) and seen > 0:
        refuse("past_key_values", "a forward pass over whole sequences in replay()", f"{seen} rows")
    if getattr(cache, "is_compileable", False):
        refuse("cache", "one that grows with the tokens, a DynamicCache", type(cache).__name__)


def _tokens(ranges: Tensor, rows: int) -> Tokens:
    """Those of ranges [batch, queries, 2] over `rows` rows, whose last ones are the queries' own. A
    sequence begins where its tokens' ranges do."""
    batch, queries, _ = ranges.shape
    first, end = _without_padding(ranges, rows).unbind(-1)
    own = torch.arange(rows - queries, rows, device=ranges.device)
    number = torch.arange(batch, device=ranges.device)[:, None]
    place = torch.where(end > first, own - first, -1)
    return Tokens((number * MOST_COLUMNS + ranges[..., 0]).flatten(), place.flatten())


def _without_padding(ranges: Tensor, rows: int, placed: Optional[Placed] = None) -> Tensor:
    """The ranges, empty for queries that are padding, so that the indexer learns nothing from them.
    A query is padding if its range does not contain its own row."""
    queries = ranges.shape[1]
    if placed is None:
        own = torch.arange(rows - queries, rows, device=ranges.device)
    else:
        own = placed.tokens.columns(ranges.device)
    own = own[None, :, None]
    return ranges * ((ranges[..., :1] <= own) & (own < ranges[..., 1:]))


def recording(attention: nn.Module, indexer: nn.Module) -> bool:
    """Whether to keep a Record: in training of an indexer that is not frozen, but neither in a
    compiled forward pass nor in one that checkpointing repeats during the backward pass. In
    training that of an earlier pass goes in any case."""
    if not attention.training:
        return False
    compiling = torch.compiler.is_compiling()
    if not compiling and in_backward():
        return False
    forget(attention)
    return not compiling and any(p.requires_grad for p in _parameters(indexer))


def forget(attention: nn.Module) -> None:
    """Lets go of the Record of an earlier forward pass. Where there is none it changes nothing, as
    compiled code may not within a layer that is checkpointed."""
    if getattr(attention, "_winnow_record", None) is not None:
        attention._winnow_record = None


def forget_where_it_fails(kind: type) -> None:
    """Has models of a class keep no Record of a forward pass that raises: layers before the error
    would have those of that pass, and the others those of the pass before."""
    original = kind.forward
    if hasattr(original, "_winnow_forgets"):
        return

    @functools.wraps(original)
    def forward(self, *arguments, **options):
        if torch.compiler.is_compiling():  # nothing is kept there
            return original(self, *arguments, **options)
        try:
            return original(self, *arguments, **options)
        except BaseException:
            for module in self.modules():
                forget(module)
            raise

    forward._winnow_forgets = True
    kind.forward = forward


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    """All of them, also where FSDP has put plain tensors in their place."""
    for part in module.modules():
        found = (*part._parameters.values(), *vars(part).values())
        yield from (value for value in found if isinstance(value, Tensor))


@torch.no_grad()
def _indexer(
    family: Family,
    self: nn.Module,
    *,
    hidden_states: Tensor,
    position_embeddings: tuple,
    attention_mask: Union[Tensor, Placed],
    position_ids: Optional[Tensor] = None,
    cache=None,
    q_resid: Optional[Tensor] = None,
) -> Tensor:
    """[batch, queries, topk] rows within the sequence: ascending, then -1."""
    dtype = working_dtype(hidden_states)
    q, k, weights = family.score(self, hidden_states, q_resid, position_embeddings, position_ids)
    if cache is not None:
        k = cache.update_indexer(k, self.layer_idx)
    batch, queries = hidden_states.shape[:2]
    placed = attention_mask if isinstance(attention_mask, Placed) else None
    rows = k.shape[1] if placed is None else placed.tokens.count
    scored = (q.flatten(0, 1).to(dtype), k.flatten(0, 1).to(dtype), weights.flatten(0, 1))
    limits = flat_ranges(attention_mask if placed is None else placed.ranges, rows)
    if getattr(self, "_winnow_f8", False):
        scored, limits["k_scale"] = quantized(*scored)
    indices = choose(placed, *scored, max(1, min(self.index_topk, rows)), **limits)
    return flat_indices(indices.view(batch, queries, -1), rows, sign=-1)


def choose(
    placed: Optional[Placed], q: Tensor, k: Tensor, weights: Tensor, topk: int, of=None, **options
) -> Tensor:
    """indexer_topk()'s indices; with `placed`, over the keys of all ranks. of: their windows."""
    if placed is None:
        return operators.indexer_topk(q, k, weights, topk, **options)[0]
    gather = placed.tokens.gather
    if options.get("k_scale") is not None:
        options["k_scale"] = gather(options["k_scale"], of)
    return placed.tokens.indexer_topk(q, gather(k, of), weights, topk, **options)[0]


def quantized(q: Tensor, k: Tensor, weights: Tensor) -> "tuple[tuple, Tensor]":
    """((q, k, weights), scales of the keys) with q and k quantised to float8_e4m3fn; the scales of
    the queries are multiplied into the weights."""
    q, q_scale = operators.indexer_quantize(q)
    k, k_scale = operators.indexer_quantize(k)
    return (q, k, weights * q_scale), k_scale


def replace_forward(kind: type, ours: Callable, wanted: Callable[..., bool]) -> None:
    """Replaces the forward method of a class of modules: by ours(self, ...) where
    wanted(self, options), and by the function that the keyword inside.OPTION holds."""
    original = kind.forward

    @functools.wraps(original)
    def forward(self, *arguments, **options):
        if inside.OPTION in options:
            return options[inside.OPTION](*arguments)
        if wanted(self, options):
            return ours(self, *arguments, **options)
        return original(self, *arguments, **options)

    kind.forward = forward


def replace_forwards(family: Family, attention: type, indexer: type) -> None:
    """Replaces the forward methods of two classes of modules. Attention runs on Winnow if its
    configuration says "winnow", the indexer if its attention_mask holds ranges (int32)."""

    def attends(self, options):
        if self.config._attn_implementation == "winnow":
            return family.has_indexer(self)
        if self.training:
            forget(self)
        return False

    def chooses(self, options):
        mask = options.get("attention_mask")
        return isinstance(mask, Placed) or (mask is not None and mask.dtype == torch.int32)

    replace_forward(attention, functools.partial(_attention, family), attends)
    replace_forward(indexer, functools.partial(_indexer, family), chooses)
