"""What the ranks of test_deep_ep_odd.py run: each call with an odd argument on the last rank."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from winnow.compat import deep_ep
from winnow.errors import InvalidArgument

H, K, E, M = 512, 3, 12, 16

_VALUES = [None, "text", [1, 2], (), -1, 2**40, 1.5, object()]


def _odd(right):
    """(name, value) to pass instead of `right`. A few of these values are valid too."""
    yield from ((repr(value), value) for value in _VALUES)
    if not isinstance(right, torch.Tensor):
        return
    for dtype in (torch.bool, torch.int8, torch.int32, torch.float64, torch.complex64):
        yield str(dtype), right.to(dtype)
    yield "on meta", right.to("meta")
    yield "no dimension", torch.zeros(())
    yield "flat", right.flatten()
    yield "in a stack", right[None]
    yield "shorter", right[:-1]
    yield "longer", torch.cat([right, right])
    if right.dtype != torch.float8_e4m3fn:
        yield "sparse", right.to_sparse()
    yield "nested", torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    yield "fake", FakeTensorMode().from_tensor(right.detach().clone())
    yield "two", (right, right)
    yield "not side by side", torch.stack([right, right], -1)[..., 0]
    yield "one memory for all", right[:1].expand(right.shape)
    if right.is_floating_point():
        yield "with a gradient", right.clone().requires_grad_()
        yield "negated", torch._neg_view(right)
    if right.dim() == 2:
        yield "transposed", right.t()
        yield "narrow", right[:, :1]
        yield "wide", torch.cat([right, right], 1)


def _outcome(call):
    try:
        call()
        return "it works", ""
    except InvalidArgument as error:
        return str(error), error.argument
    except BaseException as error:
        return f"{type(error).__name__}: {error}", ""


def _with_each(group, function, right, check, method=None):
    """[(method, argument, name of the odd value, outcome on this rank, outcome of check())]"""
    outcomes = []
    if method is None:
        method = f"deep_ep.{type(function.__self__).__name__}.{function.__name__}"
    for name, value in right.items():
        for what, odd in _odd(value):
            given = {**right, name: odd} if group.rank() == group.size() - 1 else right
            outcome = _outcome(lambda given=given: function(**given))
            outcomes.append((method, name, what, outcome, _outcome(check)))
    return outcomes


def _inputs(group):
    generator = torch.Generator().manual_seed(group.rank())
    n = 5 + group.rank()
    x = torch.randn(n, H, generator=generator, dtype=torch.float32).bfloat16()
    scores = torch.rand(n, E, generator=generator, dtype=torch.float32)
    weights, idx = scores.topk(K, dim=1)
    return x, idx, weights


def tokens(group):
    buffer = deep_ep.Buffer(group)
    x, idx, weights = _inputs(group)
    ranks, _, pairs, in_rank, _ = buffer.get_dispatch_layout(idx, E)
    ways = {"previous_event": None, "async_finish": False, "config": None}
    right = {
        "x": x, "topk_idx": idx, "topk_weights": weights, "is_token_in_rank": in_rank,
        "num_tokens_per_expert": pairs, "num_worst_tokens": 0, "num_tokens_per_rank": ranks,
        "expert_alignment": 1, **ways,
    }  # fmt: skip
    by_rank = {"x": x, "is_token_in_rank": in_rank, "num_tokens_per_expert": pairs}
    rows, _, sent, _, handle, _ = buffer.dispatch(**right)
    again = {"x": x, "handle": handle, **ways}

    def check():
        rows, _, _, _, handle, _ = buffer.dispatch(**right)
        assert torch.equal(buffer.combine(rows, handle)[0], back)

    def check_by_rank():
        rows, _, _, _, handle, _ = buffer.dispatch(**by_rank)
        assert torch.equal(buffer.combine(rows, handle)[0], back)

    def scaled(scales):
        return buffer.dispatch(**{**right, "x": (x.to(torch.float8_e4m3fn), scales)})

    back = buffer.combine(rows, handle)[0]
    sums = {"x": rows, "topk_weights": sent, "bias": x, "handle": handle, **ways}
    return (
        _with_each(group, buffer.dispatch, right, check)
        + _with_each(group, buffer.dispatch, by_rank, check_by_rank)
        + _with_each(group, buffer.dispatch, again, check)
        + _with_each(group, buffer.combine, sums, check)
        + _with_each(
            group,
            scaled,
            {"scales": torch.ones(len(x), H // 128)},
            check,
            "deep_ep.Buffer.dispatch",
        )
    )


def experts(group):
    buffer = deep_ep.HybridEPBuffer(group, H, M, E // group.size())
    x, idx, weights = _inputs(group)
    chosen, probs = deep_ep.indices_to_map(idx, weights, len(x), E)
    right = {"hidden": x, "routing_map": chosen, "probs": probs, "pad_multiple": 4}
    by_index = {"hidden": x, "topk_idx": idx, "topk_weights": weights, "num_of_experts": E}
    scaled = {
        "hidden": x.to(torch.float8_e4m3fn), "routing_map": chosen,
        "scaling_factor": torch.ones(len(x), H // 128), "num_permuted_tokens": 64,
        "non_blocking": False,
    }  # fmt: skip
    rows, sent, _, _, handle = buffer.dispatch_with_permute(**right)
    sums = {"hidden": rows, "probs": sent, "handle": handle}
    again = {
        "hidden": x, "probs": probs, "handle": handle, "num_permuted_tokens": len(rows),
        "pad_multiple": 4,
    }  # fmt: skip
    back = buffer.combine_with_unpermute(**sums)[0]

    def check():
        buffer.dispatch_with_permute(**right)
        assert torch.equal(buffer.combine_with_unpermute(**sums)[0], back)

    return (
        _with_each(group, buffer.dispatch_with_permute, right, check)
        + _with_each(group, buffer.dispatch_with_permute, by_index, check)
        + _with_each(group, buffer.dispatch_with_permute, scaled, check)
        + _with_each(group, buffer.dispatch_with_permute, again, check)
        + _with_each(group, buffer.combine_with_unpermute, sums, check)
    )


def elastic(group, expand):
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=M, hidden=H, num_topk=K)
    x, idx, weights = _inputs(group)
    counters = torch.zeros(E // group.size(), dtype=torch.int32)
    ways = {"num_sms": 0, "previous_event": None, "async_with_compute_stream": False}
    right = {
        "x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E,
        "num_max_tokens_per_rank": M, "cumulative_local_expert_recv_stats": counters,
        "do_expand": expand, "expert_alignment": 2, "do_cpu_sync": None, **ways,
    }  # fmt: skip
    rows, _, sent, handle, _ = buffer.dispatch(**right)
    sums = {
        "x": rows, "topk_weights": sent, "handle": handle, "bias": x,
        "previous_event_before_epilogue": None, **ways,
    }  # fmt: skip
    back = buffer.combine(**sums)[0]
    again = {
        "x": x, "topk_weights": weights, "num_experts": E, "handle": handle, "do_expand": expand,
        "expert_alignment": 2, "num_max_tokens_per_rank": M, "do_cpu_sync": None,
    }  # fmt: skip

    def check():
        buffer.dispatch(**right)
        assert torch.equal(buffer.combine(**sums)[0], back)

    return (
        _with_each(group, buffer.dispatch, right, check)
        + _with_each(group, buffer.combine, sums, check)
        + _with_each(group, buffer.dispatch, again, check)
    )


def low_latency(group):
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    x, idx, weights = _inputs(group)
    right = {
        "x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": M, "num_experts": E,
        "cumulative_local_expert_recv_stats": torch.zeros(E // group.size(), dtype=torch.int32),
        "dispatch_wait_recv_cost_stats": torch.zeros(group.size(), dtype=torch.int64),
        "use_fp8": False,
    }  # fmt: skip

    def combine(handle, **given):
        rows, _, new, _, _ = buffer.low_latency_dispatch(**right)
        given["x"] = rows if given["x"] is x else given["x"]
        return buffer.low_latency_combine(handle=new if handle is right else handle, **given)

    sums = {
        "x": x, "topk_idx": idx, "topk_weights": weights, "handle": right,
        "out": torch.empty_like(x), "use_logfmt": False,
    }  # fmt: skip
    back = combine(**sums)[0].clone()

    def check():
        assert torch.equal(combine(**sums)[0], back)

    return _with_each(group, buffer.low_latency_dispatch, right, check) + _with_each(
        group, combine, sums, check, "deep_ep.Buffer.low_latency_combine"
    )


def layouts(group):
    """get_dispatch_layout() is not collective, so only the last rank gets an error."""
    buffer = deep_ep.Buffer(group)
    _, idx, _ = _inputs(group)
    right = {"topk_idx": idx, "num_experts": E, "previous_event": None, "async_finish": False}
    return _with_each(
        group, buffer.get_dispatch_layout, right, lambda: buffer.get_dispatch_layout(**right)
    )
