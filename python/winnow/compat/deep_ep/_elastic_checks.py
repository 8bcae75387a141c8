"""What is wrong with arguments of ElasticBuffer; see _checks."""

from typing import Any

import torch

from winnow.compat.deep_ep._checks import (
    Wrong,
    described,
    wrong_choice,
    wrong_counters,
    wrong_event,
    wrong_flags,
    wrong_number,
    wrong_rows,
    wrong_weights,
)


def wrong_way(previous_event: Any, before_epilogue: Any, num_sms: Any, **flags: Any) -> Wrong:
    """What is wrong with the arguments that dispatch and combine share.

    Unlike in Buffer, allocate_on_comm_stream needs neither previous_event nor async_finish.
    """
    wrong = wrong_event("previous_event", previous_event)
    wrong = wrong or wrong_event("previous_event_before_epilogue", before_epilogue)
    return wrong or wrong_number("num_sms", num_sms, 0) or wrong_flags(**flags)


def wrong_repeat(
    handle, x, scales, topk_idx, topk_weights, do_cpu_sync, statistics, do_expand,
    **of_handle: Any,
) -> Wrong:  # fmt: skip
    """What is wrong with the arguments of a dispatch with a handle.

    `of_handle` are numbers that must equal those of the handle where they are given.
    """
    for name, given in (("topk_idx", topk_idx), ("cumulative_local_expert_recv_stats", statistics)):
        if given is not None:
            return name, "none beside a handle", "one"
    if bool(do_expand) != handle.do_expand:
        return "do_expand", f"{handle.do_expand} as in the handle", do_expand
    if do_cpu_sync:
        return "do_cpu_sync", "False or None beside a handle", do_cpu_sync
    for name, given in of_handle.items():
        wanted = getattr(handle, name)
        if given is not None and (wrong_number(name, given, 0) or given != wanted):
            return name, f"{wanted} as in the handle", given
    wrong = wrong_rows("x", x, "x", scales, handle.route.tokens)
    wrong = wrong or wrong_weights("topk_weights", topk_weights)
    if not wrong and topk_weights is not None and topk_weights.dim() != 2:
        wrong = ("topk_weights", "[n, K], float32", described(topk_weights))
    return wrong


def wrong_choice_of_experts(
    x: Any, scales: Any, topk_idx: Any, topk_weights: Any, num_experts: Any
) -> Wrong:
    """What is wrong with the arguments of a dispatch without a handle.

    Call it before wrong_numbers(): the caller divides num_experts to get local_experts.
    """
    if num_experts is None:
        return "num_experts", "a number without a handle", None
    wrong = wrong_rows("x", x, "x", scales) or wrong_number("num_experts", num_experts, 1)
    return wrong or wrong_choice(x, topk_idx, topk_weights)


def wrong_numbers(most: Any, alignment: Any, statistics: Any, local_experts: int) -> Wrong:
    name = "cumulative_local_expert_recv_stats"
    for argument, value in (("num_max_tokens_per_rank", most), ("expert_alignment", alignment)):
        if value is not None and (wrong := wrong_number(argument, value, 0)):
            return wrong
    return wrong_counters(name, statistics, local_experts, torch.int32, torch.int64)
