"""Checks of arguments: each wrong_...() returns (argument, wanted, got), or None if all is right.

A layer checks the rest itself and tells the other ranks. These checks find what would raise in
Python or torch before the layer is reached; the caller passes what they return to a refuse...(),
which tells the other ranks, so that none waits.
"""

import operator
from typing import Any, Optional

import torch
from torch import Tensor

from winnow.compat.deep_ep._entry import Why
from winnow.compat.deep_ep._handle import Handle
from winnow.compat.deep_ep._streams import event_of
from winnow.compat.deep_ep.config import Config
from winnow.compat.deep_ep.utils import EventHandle, EventOverlap

Wrong = Optional[Why]

_INDICES = "[n, K], int64 or int32"


def usable(value: Any) -> bool:
    """Whether it is a tensor with memory and strides: not fake, meta, nested or sparse."""
    if type(value) is not Tensor and (not isinstance(value, Tensor) or _is_fake(value)):
        return False
    return not value.is_nested and value.layout == torch.strided and not value.is_meta


def _is_fake(value: Tensor) -> bool:
    return getattr(value, "fake_mode", None) is not None


def described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested or _is_fake(value):
        return "a nested tensor" if value.is_nested else "a fake tensor"
    kind = "" if usable(value) else f", {value.layout} on {value.device}"
    return f"{list(value.shape)}, {value.dtype}{kind}"


def wrong_number(name: str, value: Any, least: int) -> Wrong:
    if type(value) is int and least <= value < 2**31:
        return None
    try:
        right = not isinstance(value, Tensor) and least <= operator.index(value) < 2**31
    except TypeError:
        right = False
    if right:
        return None
    got = described(value) if hasattr(value, "shape") else value
    return name, f"an integer from {least} to 2^31 - 1", got


def plain_number(value: Any) -> Any:
    """The integer in a tensor of no dimensions, as Megatron-core gives counts; else the value."""
    if not usable(value) or value.dim() != 0 or value.is_floating_point() or value.is_complex():
        return value
    return int(value)


def wrong_flag(name: str, value: Any) -> Wrong:
    """Refuses arrays: they have no truth value, and the error about that names no argument."""
    return (name, "True or False", type(value).__name__) if hasattr(value, "shape") else None


def wrong_flags(**given: Any) -> Wrong:
    """wrong_flag() of several, by name."""
    for name, value in given.items():
        if type(value) is not bool and (wrong := wrong_flag(name, value)):
            return wrong
    return None


def wrong_event(name: str, event: Any) -> Wrong:
    if event is None or isinstance(event, (EventHandle, EventOverlap)):
        return None
    return name, "an EventOverlap, an EventHandle or None", type(event).__name__


def wrong_events(previous_event: Any, async_finish: Any, on_comm: Any) -> Wrong:
    """The events and flags of a call of Buffer, for which deep_ep asserts the same."""
    wrong = wrong_event("previous_event", previous_event)
    wrong = wrong or wrong_flags(async_finish=async_finish, allocate_on_comm_stream=on_comm)
    if wrong:
        return wrong
    if on_comm and not (async_finish and event_of(previous_event) is not None):
        wanted = "False without previous_event and async_finish"
        return "allocate_on_comm_stream", wanted, on_comm
    return None


def wrong_config(config: Any) -> Wrong:
    if config is None or isinstance(config, Config):
        return None
    return "config", "a Config or None", described(config)


def wrong_counts(**given: Any) -> Wrong:
    """Arguments that only the signature has: each is a tensor or None, and no call reads it."""
    for name, value in given.items():
        if value is not None and not usable(value):
            return name, "a tensor or None", described(value)
    return None


def wrong_indices(topk_idx: Any) -> Wrong:
    if not usable(topk_idx) or topk_idx.dim() != 2:
        return "topk_idx", _INDICES, described(topk_idx)
    if topk_idx.dtype not in (torch.int64, torch.int32):
        return "topk_idx", _INDICES, described(topk_idx)
    return None


def wrong_rows(
    name: str, x: Any, scales_name: str, scales: Any, tokens: Optional[int] = None
) -> Wrong:
    """The rows and scales of a dispatch; `tokens`: how many its handle has, if it has one."""
    if not usable(x) or x.dim() != 2:
        return name, "a tensor [n, H], or (tensor, scales)", described(x)
    if scales is not None and not usable(scales):
        return scales_name, "scales [n, up to H/128], float32 or int32", described(scales)
    if scales is not None and x.dtype != torch.float8_e4m3fn:
        return scales_name, f"scales beside float8_e4m3fn alone, not {x.dtype}", "some"
    if tokens is not None and len(x) != tokens:
        return name, f"the {tokens} tokens of the handle", len(x)
    return None


def wrong_counters(name: str, value: Any, size: int, *dtypes: torch.dtype) -> Wrong:
    """A tensor to which a call adds counts; it may be None."""
    if value is None:
        return None
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not usable(value) or value.dtype not in dtypes or value.shape != (size,):
        return name, f"[{size}], {names}", described(value)
    if size > 1 and value.stride(0) == 0:
        return name, "memory of its own for each element", "one for all"
    if value.is_inference() and not torch.is_inference_mode_enabled():
        return name, "no tensor of inference mode outside of it", "one"
    return None


def wrong_handle(handle: Any, kind: type) -> Wrong:
    """The handle of a combine, or of a dispatch that repeats one."""
    if isinstance(handle, kind):
        return None
    return "handle", "one of a dispatch of a buffer of this class", type(handle).__name__


def wrong_sums(name: str, rows: Any, weights_name: str, weights: Any) -> Wrong:
    """The rows and weights of a combine, but for their sizes, which the layer checks."""
    if not usable(rows):
        return name, "a tensor [R, H]", described(rows)
    return wrong_weights(weights_name, weights)


def wrong_choice(x: Tensor, topk_idx: Any, topk_weights: Any) -> Wrong:
    """The experts and weights of a dispatch; x has been checked."""
    wrong = wrong_indices(topk_idx)
    if wrong:
        return wrong
    if len(topk_idx) != len(x) or topk_idx.device != x.device:
        return "topk_idx", f"[{len(x)}, K] on {x.device} as x", _placed(topk_idx)
    return wrong_weights("topk_weights", topk_weights)


def wrong_weights(name: str, weights: Any) -> Wrong:
    if weights is not None and (not usable(weights) or weights.dtype != torch.float32):
        return name, "float32", described(weights)
    return None


def wrong_bias(bias: Any) -> Wrong:
    """One bias, or two of the same kind; their shape and dtype are checked by the layer."""
    given = bias if isinstance(bias, tuple) and len(bias) == 2 else (bias,)
    tensors = [one for one in given if one is not None]
    for one in tensors:
        if not usable(one):
            return "bias", "a tensor [n, H], or two", described(one)
    if len(tensors) == 2:
        first, second = tensors
        if _kind(first) != _kind(second):
            return "bias", f"two of the same kind, {_placed(first)}", _placed(second)
    return None


def wrong_dispatch(
    world, handle, x, scales, in_rank, per_expert, topk_idx, topk_weights
) -> Wrong:  # fmt: skip
    if handle is not None and (wrong := wrong_handle(handle, Handle)):
        return wrong
    wrong = wrong_rows("x", x, "x", scales, handle and handle.route.tokens)
    if wrong:
        return wrong
    if handle is not None:
        for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if value is not None:
                return name, "none beside a handle", "one"
        return None
    tokens = x.shape[0]
    if not usable(in_rank) or in_rank.dtype != torch.bool or in_rank.dim() != 2:
        return "is_token_in_rank", "[n, W], bool, without a handle", described(in_rank)
    if in_rank.shape != (tokens, world) or in_rank.device != x.device:
        return "is_token_in_rank", f"[{tokens}, {world}] on {x.device} as x", _placed(in_rank)
    right = usable(per_expert) and per_expert.dim() == 1
    if not right or per_expert.dtype not in (torch.int32, torch.int64):
        return "num_tokens_per_expert", "[E], int32, without a handle", described(per_expert)
    # On a GPU the host would wait for it.
    if per_expert.device.type == "cpu" and not torch.equal(per_expert.to(torch.int32), per_expert):
        return "num_tokens_per_expert", "numbers of 32 bits", int(per_expert.abs().max())
    if topk_idx is None:
        return None if topk_weights is None else ("topk_weights", "none without topk_idx", "one")
    return wrong_choice(x, topk_idx, topk_weights)


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


def _placed(tensor: Tensor) -> str:
    return f"{described(tensor)} on {tensor.device}"
