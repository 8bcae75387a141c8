"""What is wrong with arguments, as (argument, wanted, got); None: nothing."""

from typing import Any

import torch
from torch import Tensor

from winnow.compat.deep_ep._handle import Handle
from winnow.compat.deep_ep._streams import event_of


def wrong_events(previous_event: Any, async_finish: bool, on_comm: bool) -> Any:
    if on_comm and not (async_finish and event_of(previous_event) is not None):
        wanted = "False without previous_event and async_finish"
        return "allocate_on_comm_stream", wanted, on_comm
    return None


def wrong_indices(topk_idx: Any) -> Any:
    wanted = "[n, K], int64 or int32"
    if not isinstance(topk_idx, Tensor):
        return "topk_idx", wanted, type(topk_idx).__name__
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
        return "topk_idx", wanted, f"{list(topk_idx.shape)}, {topk_idx.dtype}"
    return None


def wrong_dispatch(handle, x, scales, in_rank, per_expert, topk_idx, topk_weights) -> Any:
    if not isinstance(x, Tensor) or x.dim() != 2:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        return "x", "a tensor [n, H], or (tensor, scales)", got
    if handle is not None:
        if not isinstance(handle, Handle):
            return "handle", "one of a dispatch of a Buffer", type(handle).__name__
        for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if value is not None:
                return name, "none beside a handle", "one"
        return None
    tokens = x.shape[0]
    if not isinstance(in_rank, Tensor) or in_rank.dtype != torch.bool or in_rank.dim() != 2:
        return "is_token_in_rank", "[n, W], bool, without a handle", type(in_rank).__name__
    if len(in_rank) != tokens:
        return "is_token_in_rank", f"[{tokens}, W] as in x", list(in_rank.shape)
    if not isinstance(per_expert, Tensor) or per_expert.dim() != 1:
        return "num_tokens_per_expert", "[E], without a handle", type(per_expert).__name__
    if topk_idx is None:
        return None if topk_weights is None else ("topk_weights", "none without topk_idx", "one")
    wrong = wrong_indices(topk_idx)
    if wrong:
        return wrong
    if len(topk_idx) != tokens:
        return "topk_idx", f"[{tokens}, K] as in x", list(topk_idx.shape)
    if topk_weights is not None and topk_weights.dtype != torch.float32:
        return "topk_weights", "float32", topk_weights.dtype
    return None
