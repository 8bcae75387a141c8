"""The forward passes of DeepSeek-V4 under "winnow": rows of a sliding window, and compressed ones.

Windows are cut from sequences (sequences.py) by winnow.torch.compressor_forward(), and attention is
that of sparse MLA over the tokens and, behind them, the compressed rows.
"""

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from winnow import torch as operators
from winnow.transformers import inside
from winnow.transformers.choices import MOST_COLUMNS, OPTION, Replaying, Tokens
from winnow.transformers.families import DeepseekV4
from winnow.transformers.layer import Record as LatentRecord
from winnow.transformers.layer import (
    autocast_of,
    check_given,
    check_options,
    choose,
    forget,
    quantized,
    ranges_of,
    recording,
    refusals_of,
    replace_forward,
    working_dtype,
)
from winnow.transformers.placed import Placed
from winnow.transformers.refusal import is_size, refuse
from winnow.transformers.sequences import Mask, Sequences

_RAGGED = "_winnow_ragged"
"""The attribute of a layer of a cache whose rows do not begin in the same column: how many columns
it has seen. Its buffers then hold the last tokens of all rows, and compressed_kv begins with the
first window of each row, wherever that is."""


class Compressed(NamedTuple):
    """Rows of all sequences of a call, or of a cache."""

    rows: Tensor  # [rows, d]
    stride: Optional[int]  # how many a cache has of each row of the batch


class Record(NamedTuple):
    """What the loss of an indexer needs of the last forward pass of its layer; detached."""

    hidden: Tensor
    embeddings: Tuple[Tensor, Tensor]
    sequences: Union[Sequences, Placed]
    rows: Compressed
    chosen: Optional[Tensor]  # [batch * queries, topk]; None where all rows were attended to
    lse: Tensor  # [batch * queries, heads], over the window and the compressed rows
    dtype: torch.dtype  # of the attention
    autocast: Optional[torch.dtype]  # of torch.autocast, where it was on
    group = None  # tensor parallelism leaves all heads in each process

    __reduce__ = LatentRecord.__reduce__

    @property
    def tokens(self) -> int:
        """Those of earlier calls among them."""
        if isinstance(self.sequences, Placed):
            return self.sequences.tokens.own
        return self.sequences.seen + self.sequences.queries


def _cumulative(lengths: List[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _overlaps(module: nn.Module) -> bool:
    return module.position_bias.shape[1] == 2 * module.head_dim


def _compress(
    module: nn.Module, kv: Tensor, gate: Tensor, lengths: List[int], positions: Tensor
) -> Tensor:
    """The rows of packed sequences of these lengths; kv, gate: [tokens, c * d]; positions:
    [tokens], of which those that begin a window count."""
    ratio, device = module.compress_rate, kv.device
    counts = [length // ratio for length in lengths]
    if not sum(counts):
        return kv.new_zeros(0, module.head_dim)
    starts = _cumulative(lengths, device)

    def compress(kv: Tensor) -> Tensor:
        return operators.compressor_forward(
            kv, gate, module.position_bias.float(), starts, _cumulative(counts, device),
            first_position=starts[:-1].contiguous(), num_rows=sum(counts),
            **_options(module, positions),
        )  # fmt: skip

    return inside.with_parameters(module.kv_norm, compress, kv)


def _options(module: nn.Module, positions: Tensor) -> Dict[str, Any]:
    """What the compressor does with a row: norm, and rotation by one of these positions."""
    exact = torch.empty(0, dtype=torch.float32, device=positions.device)  # the dtype of the angles
    cos, sin = module.rotary_emb(
        exact, position_ids=positions[None], layer_type=module.rope_layer_type
    )
    norm = module.kv_norm
    return {
        "overlap": _overlaps(module), "norm_weight": norm.weight.float(),
        "eps": norm.variance_epsilon, "cos": cos[0].contiguous(), "sin": sin[0].contiguous(),
    }  # fmt: skip


def _compress_part(module: nn.Module, kv: Tensor, gate: Tensor, placed: Placed) -> Tensor:
    """The rows of the windows that end in this rank's tokens."""
    pieces = placed.sequences.pieces
    first = min(piece.position for piece in pieces)
    last = max(piece.position + piece.length for piece in pieces)

    def compress(kv: Tensor) -> Tensor:
        return placed.tokens.compressor_forward(
            kv, gate, module.position_bias.float(),
            first_position=[piece.position - first for piece in pieces],
            **_options(module, torch.arange(first, last, device=kv.device)),
        )  # fmt: skip

    return inside.with_parameters(module.kv_norm, compress, kv)


def compressed_rows(
    module: nn.Module,
    hidden: Tensor,
    sequences: Union[Sequences, Placed],
    state=None,
    name: str = "",
) -> Compressed:
    """state: the layer of a cache, in which the module has this name."""
    kv, gate = module.kv_proj(hidden), module.gate_proj(hidden)
    if isinstance(sequences, Placed):
        rows = _compress_part(module, kv.flatten(0, 1), gate.flatten(0, 1), sequences)
        return Compressed(rows, None)
    if state is None:
        lengths = [piece.length for piece in sequences.pieces]
        positions = sequences.position_ids.flatten()
        rows = _compress(module, kv.flatten(0, 1), gate.flatten(0, 1), lengths, positions)
        return Compressed(rows, None)
    update = _update_ragged if hasattr(state, _RAGGED) else _update
    rows = update(module, kv, gate, sequences, state, name)
    return Compressed(rows.flatten(0, 1), rows.shape[1])


def _check_seen(sequences: Sequences, seen: int) -> None:
    if seen != sequences.seen:
        wanted = "one that was not cropped: windows cannot be undone"
        refuse("cache", wanted, f"{sequences.seen} tokens, and windows of {seen}")


def _update(module, kv, gate, sequences, state, name) -> Tensor:
    """The rows so far, [batch, rows, d]; the state stays as transformers has it."""
    ratio, d = module.compress_rate, module.head_dim
    buffered = state.buffer_kv[name]
    open_window = 0 if buffered is None else buffered.shape[1]
    _check_seen(sequences, state.entry_count[name] * ratio + open_window)
    kv, gate, position = state.store_compression_weights(name, kv, gate)
    batch, count, _ = kv.shape
    lead = 0  # tokens of an earlier window
    if count and _overlaps(module):
        bias = module.position_bias[:, :d]
        with_bias = gate[:, -ratio:, :d] + bias
        earlier = state.update_overlap_state(name, kv[:, None, -ratio:], with_bias[:, None], d)
        if earlier[0] is not None:
            lead = ratio
            earlier = earlier[0].to(kv.dtype), (earlier[1] - bias).to(gate.dtype)
            # What they had for their own window takes no part again.
            kv, gate = (
                torch.cat((torch.nn.functional.pad(old, (0, d)), new), 1)
                for old, new in zip(earlier, (kv, gate), strict=True)
            )
    firsts = [piece.position + position - lead for piece in sequences.pieces]
    positions = torch.tensor(firsts, device=kv.device)[:, None]
    positions = positions + torch.arange(lead + count, device=kv.device)
    flat = kv.flatten(0, 1), gate.flatten(0, 1)
    rows = _compress(module, *flat, [lead + count] * batch, positions.flatten())
    rows = rows.view(batch, (lead + count) // ratio, d)[:, lead // ratio :]
    return state.update_compressor_states(name, rows)


def _update_ragged(module, kv, gate, sequences, state, name) -> Tensor:
    """The same where rows of the batch begin in different columns."""
    ratio, overlap, device = module.compress_rate, _overlaps(module), kv.device
    _check_seen(sequences, getattr(state, _RAGGED))
    if state.buffer_kv[name] is not None:
        kv = torch.cat((state.buffer_kv[name], kv), 1)
        gate = torch.cat((state.buffer_gate[name], gate), 1)
    batch, columns, _ = kv.shape
    keep = min(columns, (1 + overlap) * ratio - 1)
    state.buffer_kv[name] = kv[:, columns - keep :].clone()
    state.buffer_gate[name] = gate[:, columns - keep :].clone()
    lengths, offsets, sources, places, count = [], [], [], [], 0
    total = max(state.entry_count[name], sequences.longest // ratio)
    pieces = {piece.row: piece for piece in sequences.real}
    for row in range(batch):
        if row not in pieces:
            lengths.append(columns)
            offsets.append(0)
            count += columns // ratio
            continue
        piece = pieces[row]
        done = piece.before // ratio
        # The open window, and the one before it where they overlap.
        begin = max(done - overlap, 0)
        own = piece.before - begin * ratio + piece.length
        end = columns - sequences.queries + piece.begin + piece.length
        parts = [end - own, own, columns - end]
        first = count + parts[0] // ratio
        sources += range(first + done - begin, first + own // ratio)
        count += sum(part // ratio for part in parts)
        places += range(row * total + done, row * total + piece.total // ratio)
        lengths += parts
        offsets.append(piece.position + piece.total - end)
    positions = torch.tensor(offsets, device=device)[:, None]
    positions = (positions + torch.arange(columns, device=device)).clamp(min=0)
    rows = _compress(module, kv.flatten(0, 1), gate.flatten(0, 1), lengths, positions.flatten())
    d = module.head_dim
    held = state.compressed_kv[name]
    held = kv.new_zeros(batch, 0, d) if held is None else held
    held = torch.nn.functional.pad(held, (0, 0, 0, total - held.shape[1]))
    if places:
        sources, places = (torch.tensor(t, device=device) for t in (sources, places))
        held = held.flatten(0, 1).index_copy(0, places, rows[sources]).view(batch, total, d)
    state.compressed_kv[name], state.entry_count[name] = held, total
    return held


def _state_of(attention: nn.Module, cache):
    """The layer of the cache; refuses what does not hold windows."""
    if cache is None:
        return None
    layers = getattr(cache, "layers", [])
    state = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
    compresses = attention.compressor is None or hasattr(state, "store_compression_weights")
    if not isinstance(state, DynamicSlidingWindowLayer) or not compresses:
        got = type(cache if state is None else state).__name__
        refuse("cache", "a DynamicCache of the model's configuration", got)
    return state


def _check_batch(state, batch: int) -> None:
    """Refuses windows of another batch than the cache's rows: batch_repeat_interleave() and
    batch_select_indices() of transformers change the rows alone."""
    names = ("compressed_kv", "buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")
    for held in (tensor for name in names for tensor in getattr(state, name, {}).values()):
        if held is not None and held.shape[0] != batch:
            wanted = f"windows of {batch} sequences, as the call has; reorder_cache() changes both"
            refuse("cache", wanted, f"windows of {held.shape[0]}")


def _check_state(state, sequences: Sequences) -> None:
    """Refuses what would go on with a cache that has other windows; marks a new one."""
    _check_batch(state, sequences.batch)
    rows = [piece.row for piece in sequences.real]
    if len(rows) != len(set(rows)):
        refuse("use_cache", "False for packed sequences", "True")
    if sequences.seen == 0:
        vars(state).pop(_RAGGED, None)
        if not sequences.aligned:
            setattr(state, _RAGGED, 0)
    elif not sequences.aligned and not hasattr(state, _RAGGED):
        wanted = "no padding where the first tokens of the cache had none, or were not on winnow"
        refuse("attention_mask", wanted, "padding")


@torch.compiler.disable  # the host decides how many rows there are
def _attention(
    family: DeepseekV4,
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: dict,
    position_ids: Tensor,
    attention_mask: Optional[Mask] = None,
    cache=None,
    past_key_values=None,
    **options,
):
    cache = past_key_values if cache is None else cache
    batch, queries, _ = hidden_states.shape
    given = options.get(OPTION)
    with refusals_of(attention_mask):
        check_options(self, cache, options)
        dtype = working_dtype(hidden_states)
        if (
            position_ids.dim() != 2
            or not is_size(position_ids.shape[0], 1, batch)
            or (position_ids.shape[1] != queries)
        ):
            wanted = f"shape [batch, queries] = [{batch}, {queries}]"
            refuse("position_ids", wanted, list(position_ids.shape))
        if isinstance(attention_mask, Placed):
            check_given(self, given, cache, 0, attention_mask)
    if isinstance(attention_mask, Placed):
        return _attention_of_part(
            family, self, hidden_states, position_embeddings, attention_mask, dtype
        )
    if isinstance(attention_mask, Tensor):
        wanted = "shape [batch, rows]: windows begin at the first token that is no padding"
        refuse("attention_mask", wanted, list(attention_mask.shape))
    state = _state_of(self, cache)
    seen = 0 if state is None else state.get_seq_length()
    mask = Mask(None, packed=True) if attention_mask is None else attention_mask
    ranges = functools.partial(ranges_of, mask.ranges, hidden_states, seen + queries, options)
    sequences = mask.sequences(ranges, position_ids, seen)
    check_given(self, given, cache, seen)

    cos, sin = position_embeddings[self.rope_layer_type]
    q_resid = family.query_latent(self, hidden_states)
    q = family.attention_query(self, q_resid, cos, sin)
    rows = family.row(self, hidden_states, cos, sin)
    if state is not None:
        _check_state(state, sequences)
        rows = rows.transpose(1, 2)
        rows = cache.update(rows, rows, self.layer_idx)[0].transpose(1, 2)
    window = self.sliding_window, rows.shape[1]
    rows = rows.flatten(0, 2).to(dtype)
    if self.compressor is None:
        indices = sequences.window(*window, rows.device)
    else:
        compressed, chosen = self.compressor(
            hidden_states, q_resid, sequences=sequences, state=state,
            dense=getattr(self, "_winnow_dense", False) or isinstance(given, Replaying),
        )  # fmt: skip
        if given is not None and family.indexer_of(self) is not None:
            stride = compressed.stride
            chosen = _given_rows(self, given, sequences, stride, chosen, rows.device)
        if chosen is None:
            every = self.compressor.compress_rate, compressed.stride
            indices = sequences.window_and_all(*window, *every, rows.device)
        else:
            listed = torch.where(chosen < 0, -1, chosen + rows.shape[0])
            indices = torch.cat((sequences.window(*window, rows.device), listed), -1)
        rows = torch.cat((rows, compressed.rows.to(dtype)))
    if hasattr(state, _RAGGED):
        setattr(state, _RAGGED, seen + queries)
    values, lse = operators.sparse_mla_attention(
        q.flatten(0, 1).to(dtype), rows[:, None], indices, scale=self.scaling,
        attn_sink=self.sinks.float(), return_lse=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    indexer = family.indexer_of(self)
    if indexer is not None and recording(self, indexer):
        self._winnow_record = Record(
            hidden_states.detach(), (cos.detach(), sin.detach()), sequences,
            compressed._replace(rows=compressed.rows.detach()), chosen, lse, dtype,
            autocast_of(hidden_states),
        )  # fmt: skip
    return family.output(self, values.view(batch, queries, *values.shape[1:]), cos, sin), None


def _given_rows(
    attention: nn.Module, given, sequences: Sequences, stride: Optional[int],
    chosen: Optional[Tensor], device: torch.device,
) -> Tensor:  # fmt: skip
    """What each token attends to of the compressed rows, as `chosen`: that itself where choices are
    recorded, else what was recorded."""
    begins = [
        piece.row * MOST_COLUMNS + sequences.seen + piece.begin - piece.before
        for piece in sequences.pieces
    ]
    sequence = torch.tensor(begins, device=device)[sequences.piece_of_token(device)]
    tokens = Tokens(sequence, sequences.place(device))
    ratio = attention.compressor.compress_rate
    first = sequences.seen_rows(ratio, stride, device)["key_start"][:, None]
    if isinstance(given, Replaying):
        within = given.rows(attention.layer_idx, tokens)
        return torch.where(within < 0, -1, within + first)
    given.add(attention.layer_idx, torch.where(chosen < 0, -1, chosen - first), tokens)
    return chosen


def seen_rows(
    module: nn.Module, sequences: Union[Sequences, Placed], rows: Compressed, device: torch.device
) -> Dict[str, Any]:
    """key_start and key_end of each query in the rows of a compressor or an indexer."""
    if isinstance(sequences, Placed):
        windows = windows_of(sequences, module, device)
        return {"key_start": windows.key_start, "key_end": windows.key_end}
    return dict(sequences.seen_rows(module.compress_rate, rows.stride, device))


def windows_of(placed: Placed, module: nn.Module, device: torch.device):
    """Those of a compressor or an indexer, or None where one rank has all tokens."""
    if not isinstance(placed, Placed):
        return None
    return placed.tokens.windows(module.compress_rate, device, _overlaps(module))


def _attention_of_part(
    family: DeepseekV4,
    self: nn.Module,
    hidden: Tensor,
    position_embeddings: dict,
    placed: Placed,
    dtype: torch.dtype,
):
    """Of the tokens of one of several ranks. The window comes with the tokens before its chunks,
    compressed rows from all ranks, while the queries are computed."""
    batch, queries, _ = hidden.shape
    tokens, device = placed.tokens, hidden.device
    cos, sin = position_embeddings[self.rope_layer_type]
    q_resid = family.query_latent(self, hidden)
    extra, compressed, chosen = {}, None, None
    if self.compressor is not None:
        compressed, chosen = self.compressor(
            hidden, q_resid, sequences=placed, state=None,
            dense=getattr(self, "_winnow_dense", False),
        )  # fmt: skip
        windows = windows_of(placed, self.compressor, device)
        extra["extra_kv"] = tokens.gather(compressed.rows.to(dtype)[:, None], windows)
        if chosen is None:
            extra.update(extra_key_start=windows.key_start, extra_key_end=windows.key_end)
        else:
            extra["extra_indices"] = chosen
    rows = family.row(self, hidden, cos, sin).flatten(0, 2).to(dtype)
    rows = tokens.history(rows, self.sliding_window - 1).flatten(0, 2)
    q = family.attention_query(self, q_resid, cos, sin)
    values, lse = tokens.sparse_mla_attention(
        q.flatten(0, 1).to(dtype), rows[:, None], scale=self.scaling, attn_sink=self.sinks.float(),
        deterministic=torch.are_deterministic_algorithms_enabled(), return_lse=True,
        **tokens.window(self.sliding_window, device), **extra,
    )  # fmt: skip
    if compressed is not None:
        values = extra["extra_kv"].begin_again_with(values)
    indexer = family.indexer_of(self)
    if indexer is not None and recording(self, indexer):
        self._winnow_record = Record(
            hidden.detach(), (cos.detach(), sin.detach()), placed,
            compressed._replace(rows=compressed.rows.detach()), chosen, lse, dtype,
            autocast_of(hidden),
        )  # fmt: skip
    return family.output(self, values.view(batch, queries, *values.shape[1:]), cos, sin), None


def _compressor(
    self: nn.Module, hidden_states: Tensor, q_resid: Tensor, *, sequences: Sequences, state,
    dense: bool,
) -> Tuple[Compressed, Optional[Tensor]]:  # fmt: skip
    """The compressed rows, and those of them that the indexer chooses for each token."""
    compressed = compressed_rows(self, hidden_states, sequences, state, "compressor")
    chosen = None
    indexer = getattr(self, "indexer", None)
    if indexer is not None and (state is not None or not dense):
        chosen = indexer(hidden_states, q_resid, sequences=sequences, state=state)
    return compressed, None if dense else chosen


@torch.no_grad()
def _indexer(
    family: DeepseekV4, self: nn.Module, hidden_states: Tensor, q_resid: Tensor, *,
    sequences: Sequences, state,
) -> Tensor:  # fmt: skip
    """[batch * queries, topk] compressed rows: ascending, then -1."""
    dtype = working_dtype(hidden_states)
    keys = compressed_rows(self, hidden_states, sequences, state, "indexer")
    q = family.indexer_query(self, hidden_states, q_resid, sequences.position_ids)
    weights = family.indexer_weights(self, hidden_states)
    topk = min(self.index_topk, sequences.longest // self.compress_rate)
    if topk == 0:
        return torch.empty((q.shape[:2].numel(), 0), dtype=torch.int32, device=q.device)
    scored = (q.flatten(0, 1).to(dtype), keys.rows.to(dtype), weights.flatten(0, 1))
    limits = seen_rows(self, sequences, keys, q.device)
    if getattr(self, "_winnow_f8", False):
        scored, limits["k_scale"] = quantized(*scored)
    placed = sequences if isinstance(sequences, Placed) else None
    of = windows_of(placed, self, q.device)
    return choose(placed, *scored, topk, of, **limits)


def replace_forwards(family: DeepseekV4, attention: type, *others: type) -> None:
    """Replaces the forward methods of the classes of modules. Attention runs on Winnow if its
    configuration says "winnow", the others if they get sequences."""

    def attends(self, options):
        implementation = self.config._attn_implementation
        layers = getattr(options.get("cache"), "layers", None)
        if implementation != "winnow" and layers and hasattr(layers[self.layer_idx], _RAGGED):
            wanted = '"winnow", with which the padded cache was filled'
            refuse("attn_implementation", wanted, implementation)
        if implementation != "winnow" and self.training:
            forget(self)
        return implementation == "winnow"

    def knows_sequences(self, options):
        return "sequences" in options

    *compressors, indexer = others
    replace_forward(attention, functools.partial(_attention, family), attends)
    for compressor in compressors:
        replace_forward(compressor, _compressor, knows_sequences)
    replace_forward(indexer, functools.partial(_indexer, family), knows_sequences)
