"""Every method of deep_ep with right arguments, and odd values to put in their places."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from winnow.compat import deep_ep

E, K, M = 12, 3, 64

_VALUES = [None, "text", [1, 2], (), -1, 2**40, 1.5, object()]


def odd(right):
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


class Calls:
    """Each method here returns a method of deep_ep and right arguments for it. `tokens`: one of
    these numbers, plus the rank, is drawn for each call; `expand`: whether ElasticBuffer does."""

    def __init__(self, group, tokens=(0, 4, 30), expand=None):
        self.rank, self.world, self.tokens = group.rank(), group.size(), tokens
        self.expands = (False, True) if expand is None else (expand,)
        self.buffer = deep_ep.Buffer(group, low_latency_mode=True)
        self.other = deep_ep.Buffer(group)
        self.hybrid = deep_ep.HybridEPBuffer(group, 256, M, E // self.world)
        self.flexible = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=M)

    def inputs(self, draw, hidden=256):
        """(x, topk_idx, topk_weights) of tokens whose number all ranks draw, plus the rank."""
        n = draw.choice(self.tokens) + self.rank
        generator = torch.Generator().manual_seed(draw.randrange(1000) * 8 + self.rank)
        x = torch.randn(n, hidden, generator=generator, dtype=torch.float32).bfloat16()
        weights, idx = torch.rand(n, E, generator=generator, dtype=torch.float32).topk(K, dim=1)
        return x, idx, weights

    def layout(self, draw):
        _, idx, _ = self.inputs(draw)
        ways = {"previous_event": None, "async_finish": False}
        return self.buffer.get_dispatch_layout, {"topk_idx": idx, "num_experts": E, **ways}

    def dispatch(self, draw, buffer=None, hidden=256):
        buffer = buffer or self.buffer
        x, idx, weights = self.inputs(draw, hidden)
        ranks, _, pairs, in_rank, _ = buffer.get_dispatch_layout(idx, E)
        return buffer.dispatch, {
            "x": x, "topk_idx": idx, "topk_weights": weights, "is_token_in_rank": in_rank,
            "num_tokens_per_expert": pairs, "num_worst_tokens": 0, "num_tokens_per_rank": ranks,
            "expert_alignment": 1, **_WAYS,
        }  # fmt: skip

    def by_rank(self, draw):
        _, given = self.dispatch(draw)
        return self.buffer.dispatch, {
            name: given[name] for name in ("x", "is_token_in_rank", "num_tokens_per_expert")
        }

    def again(self, draw):
        call, given = self.dispatch(draw)
        return call, {"x": given["x"], "handle": call(**given)[4], **_WAYS}

    def scaled(self, draw):
        """The scales alone, beside rows in float8."""
        call, given = self.dispatch(draw)
        x = given["x"].to(torch.float8_e4m3fn)

        def dispatch(scales):
            return call(**{**given, "x": (x, scales)})

        return dispatch, {"scales": torch.ones(len(x), 2)}

    def combine(self, draw, *arguments, of="dispatch"):
        call, given = getattr(self, of)(draw, *arguments)
        rows, _, weights, _, handle, _ = call(**given)
        sums = {"x": rows, "handle": handle, "topk_weights": weights, "bias": given["x"]}
        return call.__self__.combine, {**sums, **_WAYS}

    def second(self, draw):
        return self.dispatch(draw, self.other)

    def second_combine(self, draw):
        return self.combine(draw, self.other)

    def wide(self, draw):
        return self.dispatch(draw, self.buffer, 512)

    def wide_combine(self, draw):
        return self.combine(draw, self.buffer, 512)

    def permute(self, draw):
        x, idx, weights = self.inputs(draw)
        chosen, probs = deep_ep.indices_to_map(idx, weights, len(x), E)
        given = {"hidden": x, "routing_map": chosen, "probs": probs, "pad_multiple": 2}
        return self.hybrid.dispatch_with_permute, given

    def by_index(self, draw):
        x, idx, weights = self.inputs(draw)
        given = {"hidden": x, "topk_idx": idx, "topk_weights": weights, "num_of_experts": E}
        return self.hybrid.dispatch_with_permute, given

    def permute_scaled(self, draw):
        call, given = self.permute(draw)
        return call, {
            "hidden": given["hidden"].to(torch.float8_e4m3fn), "routing_map": given["routing_map"],
            "scaling_factor": torch.ones(len(given["hidden"]), 2), "num_permuted_tokens": 64,
            "non_blocking": False,
        }  # fmt: skip

    def permuted_again(self, draw):
        call, given = self.permute(draw)
        rows, *_, handle = call(**given)
        again = {"hidden": given["hidden"], "probs": given["probs"], "handle": handle}
        return call, {**again, "num_permuted_tokens": len(rows), "pad_multiple": 2}

    def unpermute(self, draw):
        call, given = self.permute(draw)
        rows, probs, _, _, handle = call(**given)
        of = {"hidden": rows, "probs": probs, "handle": handle}
        return self.hybrid.combine_with_unpermute, of

    def elastic(self, draw):
        x, idx, weights = self.inputs(draw)
        counters = torch.zeros(E // self.world, dtype=torch.int32)
        return self.flexible.dispatch, {
            "x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E,
            "num_max_tokens_per_rank": M, "cumulative_local_expert_recv_stats": counters,
            "do_expand": draw.choice(self.expands), "expert_alignment": 2, "do_cpu_sync": None,
            **_ELASTIC_WAYS,
        }  # fmt: skip

    def elastic_again(self, draw):
        call, given = self.elastic(draw)
        names = ("x", "topk_weights", "num_experts", "do_expand", "expert_alignment",
                 "num_max_tokens_per_rank", "do_cpu_sync")  # fmt: skip
        return call, {**{name: given[name] for name in names}, "handle": call(**given)[3]}

    def elastic_combine(self, draw):
        call, given = self.elastic(draw)
        rows, _, weights, handle, _ = call(**given)
        of = {"x": rows, "handle": handle, "topk_weights": weights, "bias": given["x"]}
        of["previous_event_before_epilogue"] = None
        return self.flexible.combine, {**of, **_ELASTIC_WAYS}

    def low_latency(self, draw):
        x, idx, _ = self.inputs(draw)
        return self.buffer.low_latency_dispatch, {
            "x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": M, "num_experts": E,
            "cumulative_local_expert_recv_stats": torch.zeros(E // self.world, dtype=torch.int32),
            "dispatch_wait_recv_cost_stats": torch.zeros(self.world, dtype=torch.int64),
            "use_fp8": False,
        }  # fmt: skip

    def low_latency_combine(self, draw):
        call, given = self.low_latency(draw)
        rows, _, handle, _, _ = call(**given)
        x, idx = given["x"], given["topk_idx"]
        weights = torch.ones(idx.shape, dtype=torch.float32)
        of = {"x": rows, "topk_idx": idx, "topk_weights": weights, "handle": handle}
        return self.buffer.low_latency_combine, {
            **of, "out": torch.empty_like(x), "use_logfmt": False,
        }  # fmt: skip


_WAYS = {"previous_event": None, "async_finish": False, "config": None}
_ELASTIC_WAYS = {"num_sms": 0, "previous_event": None, "async_with_compute_stream": False}
