"""Masks of transformers as ranges: which rows of the cache each query sees.

A range is what a causal mask, padding on either side, packed sequences and a cache with room left
have in common. Ranges are int32 [batch, queries, 2]: the first row that is seen, and the one after
the last. They take the place of transformers' mask of [batch, 1, queries, rows].
"""

from typing import Callable, Optional

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from winnow._torch_private import assert_async
from winnow.transformers.refusal import is_size, refuse

_WANTED = "for every query one range of keys, as causal masks, padding and packed sequences have"
_ADDITIVE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# The most elements of a mask that are worked on at a time.
_PIECE = 1 << 24


def _unknown(value: Tensor) -> bool:
    """Whether the host cannot read a value: under torch.compile, or while a graph is captured."""
    capturing = value.is_cuda and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or capturing


def _require(holds: Tensor, argument: str, wanted: str, got) -> None:
    """Refuses unless `holds`. If the host cannot read that, the device asserts it."""
    if _unknown(holds):
        assert_async(holds, f"transformers: {argument}: want {wanted}, got {got}")
    elif not bool(holds):
        refuse(argument, wanted, got)


def _check_tensor(argument: str, value) -> None:
    if not isinstance(value, Tensor) or value.is_nested:
        kind = "a nested one" if isinstance(value, Tensor) else type(value).__name__
        refuse(argument, "a dense tensor of torch", kind)


def _of_visible(visible: Tensor) -> Tensor:
    """The ranges of bool [..., rows]: [..., 2]."""
    rows = visible.shape[-1]
    count = visible.sum(-1, dtype=torch.int32)
    # argmax() gives the first of equal values, and so 0 where nothing is visible.
    first = visible.to(torch.uint8).argmax(-1).to(torch.int32) if rows else count
    at = torch.arange(rows, dtype=torch.int32, device=visible.device)
    last = torch.where(visible, at, -1).amax(-1) if rows else count - 1
    whole = ((last + 1 - first == count) | (count == 0)).all()
    _require(whole, "attention_mask", _WANTED, "a mask with gaps")
    return torch.stack((first, first + count), -1)


def of_dense(mask: Tensor, batch: int, queries: int, rows: int) -> Tensor:
    """The ranges of a mask that the caller made: [batch or 1, 1, queries, rows], bool or
    additive."""
    _check_tensor("attention_mask", mask)
    shape, wanted = list(mask.shape), [batch, 1, queries, rows]
    if len(shape) != 4 or shape[1:] != wanted[1:] or not is_size(shape[0], 1, batch):
        refuse("attention_mask", f"shape [batch, 1, queries, rows] = {wanted}", shape)
    if mask.dtype not in (torch.bool, *_ADDITIVE):
        names = ", ".join(str(d).removeprefix("torch.") for d in _ADDITIVE)
        got = str(mask.dtype).removeprefix("torch.")
        refuse("attention_mask", f"dtype bool, {names} for four dimensions", got)
    mask = mask[:, 0]
    step = max(1, _PIECE // max(1, mask.shape[0] * mask.shape[2]))
    pieces = []
    for piece in mask.split(step, 1):
        if piece.dtype != torch.bool:
            hidden = piece <= torch.finfo(piece.dtype).min
            wanted = "0 and the smallest number of its dtype"
            _require((hidden | (piece == 0)).all(), "attention_mask", wanted, "other values")
            piece = ~hidden
        pieces.append(_of_visible(piece))
    return torch.cat(pieces, 1).expand(batch, queries, 2)


def even(mask: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """The queries that see nothing under an additive mask in four dimensions, bool [batch or 1,
    queries]; None if there are none.

    Under "sdpa" they attend to all rows evenly: the smallest number of the dtype, added to their
    logits, makes these equal. It does not in float16; and with a mask of another dtype, or with
    -inf, the result depends on which of equal rows torch.topk takes. Such masks are refused.

    dtype: of the model.
    """
    additive = isinstance(mask, Tensor) and mask.is_floating_point()
    if not additive or mask.shape[-1] == 0:
        return None
    lowest = torch.finfo(mask.dtype).min
    nothing = mask[:, 0].amax(-1) <= lowest
    if not _unknown(nothing) and not bool(nothing.any()):
        return None
    name, got = (str(d).removeprefix("torch.") for d in (dtype, mask.dtype))
    other = "" if dtype == torch.float16 else f", or the smallest number of {name},"
    wanted = f"bool{other} for queries that see nothing"
    if mask.dtype != dtype or dtype == torch.float16:
        _require(~nothing.any(), "attention_mask", wanted, got)
    finite = mask[:, 0].amin(-1) >= lowest
    _require((finite | ~nothing).all(), "attention_mask", wanted, "-inf")
    return nothing


def _of_function(function, batch, positions, rows, padding, device) -> Tensor:
    """The ranges of a mask function of transformers, which is called for all queries and rows."""
    row = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    step = max(1, _PIECE // max(1, batch * rows.shape[0]))
    pieces = []
    for piece in positions.split(step):
        try:
            visible = function(row, head, piece[None, None, :, None], rows[None, None, None, :])
        except IndexError:  # a tensor that the function reads has fewer tokens
            wanted = f"shape [batch, queries] = [{batch}, {len(positions)}]"
            refuse("position_ids", wanted, "fewer sequences or tokens")
        visible = visible.expand(batch, 1, len(piece), len(rows))[:, 0]
        if padding is not None:
            visible = visible & padding[:, None]
        pieces.append(_of_visible(visible))
    return torch.cat(pieces, 1)


def _check_padding(mask: Tensor, batch: int, tokens, rows: int) -> None:
    """A mask of two dimensions has a column for each of the tokens so far, or more where a static
    cache has room for more rows."""
    _check_tensor("attention_mask", mask)
    shape = list(mask.shape)
    if mask.dim() != 2 or not is_size(shape[0], 1, batch):
        wanted = f"shape [batch={batch}, rows] or [batch, 1, queries, rows]"
        refuse("attention_mask", wanted, shape)
    if isinstance(tokens, Tensor) and _unknown(tokens):
        wanted = f"shape [batch={batch}, rows], with a row for each token so far"
        _require(tokens <= shape[1], "attention_mask", wanted, shape)
        tokens = min(shape[1], rows)
    if not tokens <= shape[1] <= max(tokens, rows):
        wanted = f"shape [batch, rows] = [{batch}, {int(tokens)}]"
        wanted += f" to [{batch}, {rows}]" if rows > tokens else ""
        refuse("attention_mask", wanted, shape)


def _causal(positions: Tensor, rows: int, padding: Optional[Tensor], batch: int) -> Tensor:
    """The ranges of a causal mask. padding: [batch or 1, rows], false at padding."""
    end = (positions + 1).clamp(0, rows).to(torch.int32).expand(batch, len(positions))
    start = torch.zeros_like(end)
    if padding is not None:
        real = _of_visible(padding)
        start = real[:, None, 0].expand_as(end)
        end = torch.minimum(end, real[:, None, 1]).maximum(start)
    return torch.stack((start, end), -1)


def of_padding(mask: Tensor, batch: int, queries: int, rows: int) -> Tensor:
    """The ranges for a padding mask, int32, that ranges() returned; query 0 is at position 0."""
    if mask.shape[1] != rows:
        wanted = f"shape [batch, rows] = [{batch}, {rows}]"
        refuse("attention_mask", wanted, list(mask.shape))
    return _causal(torch.arange(queries, device=mask.device), rows, mask.bool(), batch)


def ranges(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Optional[Tensor] = None,
    use_vmap: bool = False,
    device="cpu",
    **_,
) -> Tensor:
    """The ranges in the place of a mask, with the arguments of transformers' mask functions."""
    if use_vmap:
        refuse("mask", _WANTED, "or_mask_function or and_mask_function")
    causal = mask_function is causal_mask_function
    positions = torch.arange(q_length, device=device) + q_offset
    padding = None
    if attention_mask is not None:
        rows = kv_offset + kv_length
        _check_padding(attention_mask, batch_size, q_offset + q_length, rows)
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].to(device, torch.bool)
        first = not isinstance(q_offset, Tensor) and q_offset == 0
        if first and padding.shape[1] == kv_length > q_length:
            # Either a static cache has that many rows, or there is no cache and transformers has
            # taken the mask's length for the number of rows. Only the layer can tell.
            if not causal:
                wanted = f"shape [batch, rows] = [{batch_size}, {q_length}]"
                refuse("attention_mask", wanted, list(attention_mask.shape))
            return padding.to(torch.int32)
        missing = kv_length - padding.shape[1]  # a cache has room for more
        padding = torch.nn.functional.pad(padding, (0, missing))
    if causal:
        return _causal(positions - kv_offset, kv_length, padding, batch_size)
    rows = torch.arange(kv_length, device=device) + kv_offset
    return _of_function(mask_function, batch_size, positions, rows, padding, device)


def of_sequences(found: Tensor, rows: int, starts_q: Tensor, starts_k: Optional[Tensor]) -> Tensor:
    """Ranges within packed sequences, as cu_seq_lens_q and cu_seq_lens_k describe them."""
    starts_k = starts_q if starts_k is None else starts_k
    batch, s_q, _ = found.shape
    if batch != 1:
        refuse("cu_seq_lens_q", "a batch of 1, which holds the packed sequences", f"{batch}")
    both = (("cu_seq_lens_q", starts_q, s_q), ("cu_seq_lens_k", starts_k, rows))
    for argument, starts, count in both:
        _check_tensor(argument, starts)
        whole = starts.dtype in (torch.int32, torch.int64)
        if not whole or starts.dim() != 1 or len(starts) < 2 or len(starts) != len(starts_q):
            wanted = "int32 or int64 of shape [sequences + 1], as many for queries as for keys"
            got = f"{str(starts.dtype).removeprefix('torch.')} of shape {list(starts.shape)}"
            refuse(argument, wanted, got)
        ascending = (starts[0] == 0) & (starts.diff() >= 0).all() & (starts[-1] <= count)
        _require(ascending, argument, f"numbers that ascend from 0 to at most {count}", "others")
    starts_q, starts_k = starts_q.to(found.device), starts_k.to(found.device)
    at = torch.arange(s_q, device=found.device)
    sequence = torch.searchsorted(starts_q, at, right=True) - 1
    within = (sequence >= 0) & (sequence < starts_q.shape[0] - 1)
    sequence = sequence.clamp(0, starts_q.shape[0] - 2)
    # The last query of a sequence sees its last key.
    end = starts_k[sequence + 1] - (starts_q[sequence + 1] - 1 - at)
    start = torch.maximum(found[0, :, 0], starts_k[sequence])
    end = torch.where(within, torch.minimum(found[0, :, 1], end), 0)
    return torch.stack((start, end), -1).to(torch.int32)[None]


def mask(*arguments, config=None, local_size=None, indexed=False, **options) -> Optional[Tensor]:
    """What transformers asks for under "winnow": ranges for layers with an indexer, and for all
    others what "sdpa" has."""
    if indexed and local_size is None:
        return ranges(*arguments, **options)
    return sdpa_mask(*arguments, config=config, local_size=local_size, **options)
