"""What the ranks of test_context_parallel.py run. Each has all tensors, made from a seed, computes
what one rank computes of them, and compares its part of what the ranks compute together."""

import itertools
import json
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import meet, torchrun
from winnow.torch import (
    compressor_forward,
    context_parallel,
    indexer_loss,
    indexer_quantize,
    indexer_topk,
    sparse_mla_attention,
)

HEADS, TOPK = 2, 6
PLACEMENTS, KEYS = ("contiguous", "balanced"), ("gathered", "sharded")


class On(NamedTuple):
    """Where the checks run."""

    device: str
    dtype: torch.dtype
    tolerance: float  # of the largest value of a tensor
    index: tuple  # heads and columns of the indexer


on = On("cpu", torch.float32, 2e-5, (8, 64))


def near(got, want, name, times=1):
    tolerance = times * on.tolerance
    assert got.shape == want.shape, f"{name}: {list(got.shape)}, want {list(want.shape)}"
    assert torch.equal(got.isinf(), want.isinf()), name
    finite = want.isfinite()
    if finite.any():
        error = (got.double() - want.double())[finite].abs().max()
        limit = tolerance * max(want[finite].abs().max().item(), 1e-6)
        assert error <= limit, f"{name}: {error} from one rank's, {limit} allowed"


class Whole:
    """All tokens of a call, [batch * count, ...], on every rank; what autograd is to reach is
    `leaves`, of which a rank takes its part."""

    def __init__(self, context, count, batch=1, cu_seqlens=None, seed=0, **shapes):
        self.tokens = context.tokens(count, batch=batch, cu_seqlens=cu_seqlens)
        self.context, self.count, self.batch = context, count, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves = {name: self.normal(batch * count, *shape) for name, shape in shapes.items()}
        self.alone = {name: leaf.clone().requires_grad_() for name, leaf in self.leaves.items()}
        self.own = {name: self.part(leaf).requires_grad_() for name, leaf in self.leaves.items()}
        starts = list(cu_seqlens or range(0, batch * count + 1, count))
        number = torch.arange(batch * count, device=on.device)
        limits = torch.tensor([*starts, batch * count], device=on.device)
        sequence = torch.searchsorted(limits[1:-1], number, right=True)
        begins = torch.cat((limits[:-2], limits[-1:]))[sequence]
        self.starts = starts
        self.key_start = begins.int()
        self.key_end = torch.where(number < starts[-1], number + 1, begins).int()

    def normal(self, *shape, dtype=None):
        drawn = torch.randn(*shape, generator=self.generator)
        return drawn.to(on.device, dtype or on.dtype)

    def integers(self, low, high, *shape):
        drawn = torch.randint(low, high, shape, generator=self.generator)
        return drawn.to(on.device, torch.int32)

    def part(self, whole):
        of_rows = whole.unflatten(0, (self.batch, self.count))
        return self.tokens.shard(of_rows, 1).flatten(0, 1).clone()

    @property
    def ranges(self):
        return {"key_start": self.key_start, "key_end": self.key_end}

    def compare(self, alone, own, name):
        """Results of all tokens and of a rank's; then the gradients of what each one adds up to."""
        near(own, self.part(alone), name)
        weights = self.normal(*alone.shape)
        (alone * weights).sum().backward()
        (own * self.part(weights)).sum().backward()
        self.compare_gradients(name)

    def compare_gradients(self, name):
        for leaf, value in self.alone.items():
            got = self.own[leaf].grad
            want = torch.zeros_like(value) if value.grad is None else value.grad
            got = torch.zeros_like(self.own[leaf]) if got is None else got
            near(got, self.part(want), f"{name}: gradient of {leaf}", 5)
            self.own[leaf].grad = value.grad = None


def summed(group, gradient, want, name):
    """The gradient of a weight, which every rank has for its own tokens."""
    dist.all_reduce(gradient, group=group)
    near(gradient, want, f"gradient of {name}", 5)


# What is tried: rows of a batch, packed sequences and padding behind them.
LAYOUTS = [{"count": 24}, {"count": 24, "cu_seqlens": [0, 5, 5, 18, 23]}, {"count": 24, "batch": 2}]


def attention(context, layout):
    shapes = {"q": (HEADS, 576), "kv": (1, 576), "sink": ()}
    whole = Whole(context, **layout, **{n: s for n, s in shapes.items() if n != "sink"})
    tokens, total = whole.tokens, whole.batch * whole.count
    indices = whole.integers(-1, total, total, TOPK)
    indices[3] = -1  # a query that sees nothing
    length = whole.integers(0, TOPK + 1, total)
    sink = whole.normal(HEADS, dtype=torch.float32)
    q, kv = whole.alone["q"], whole.alone["kv"]
    choices = {
        "list": {"indices": indices},
        "lengths": {"indices": indices, "topk_length": length},
        "range": {"indices": None, **whole.ranges},
    }
    for name, choice in choices.items():
        of_one, of_rank = sink.clone().requires_grad_(), sink.clone().requires_grad_()
        alone, lse = sparse_mla_attention(
            q, kv, choice["indices"], **{n: t for n, t in choice.items() if n != "indices"},
            attn_sink=of_one, return_lse=True, scale=0.3,
        )  # fmt: skip
        rows = tokens.gather(whole.own["kv"])
        # The range is what a query sees anyway.
        given = {} if name == "range" else {n: whole.part(t) for n, t in choice.items()}
        own, own_lse = tokens.sparse_mla_attention(
            whole.own["q"], rows, **given, attn_sink=of_rank, return_lse=True, scale=0.3
        )
        near(own_lse, whole.part(lse), name)
        whole.compare(alone, own, name)
        summed(context.group, of_rank.grad, of_one.grad, "sink")


def two_sources(context, layout):
    """A window of neighbours, and compressed rows of windows that cross the borders of ranks."""
    for ratio, overlap, every in ((3, True, False), (5, False, True), (4, True, True)):
        columns = 512 * (1 + overlap)
        shapes = {"q": (HEADS, 512), "kv": (1, 512), "c_kv": (columns,), "c_gate": (columns,)}
        whole = Whole(context, **layout, **shapes, seed=ratio)
        tokens, total = whole.tokens, whole.batch * whole.count
        weights = {"bias": (ratio, columns), "norm": (512,)}
        weights = {n: whole.normal(*s, dtype=torch.float32) for n, s in weights.items()}
        angles = whole.normal(whole.count, 32, dtype=torch.float32)
        given = {"cos": angles.cos(), "sin": angles.sin(), "eps": 1e-5, "overlap": overlap}
        of_one, of_rank = (
            {n: w.clone().requires_grad_() for n, w in weights.items()} for _ in range(2)
        )
        starts = torch.tensor(whole.starts, device=on.device)
        counts = starts.diff() // ratio
        firsts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        compressed = compressor_forward(
            *(whole.alone[name][: starts[-1]] for name in ("c_kv", "c_gate")), of_one["bias"],
            starts.int(), firsts, norm_weight=of_one["norm"], num_rows=int(firsts[-1]), **given,
        )  # fmt: skip
        own = tokens.compressor_forward(
            whole.own["c_kv"], whole.own["c_gate"], of_rank["bias"], norm_weight=of_rank["norm"],
            **given,
        )  # fmt: skip
        windows = tokens.windows(ratio, on.device, overlap)
        rows = tokens.gather(own[:, None], windows)
        assert rows.shape == (int(firsts[-1]), 1, 512)
        got = torch.cat([part for _, part in rows.parts()])
        if not context.sharded:
            assert torch.equal(got[:, 0], compressed)
        # The windows that are complete at each query.
        number = torch.arange(total, device=on.device)
        sequence = torch.searchsorted(starts[1:], number, right=True)
        start = torch.cat((firsts[:-1], firsts[-1:]))[sequence]
        seen = (whole.key_end - whole.key_start) // ratio
        assert torch.equal(windows.key_start, whole.part(start))
        assert torch.equal(windows.key_end, whole.part(start + seen))
        if every:
            extra = {"extra_key_start": start, "extra_key_end": start + seen}
        else:
            drawn = whole.integers(-1, 4, total, 3)
            drawn = torch.where((drawn >= 0) & (drawn < seen[:, None]), start[:, None] + drawn, -1)
            extra = {"extra_indices": drawn}
        near_start = torch.maximum(whole.key_start, whole.key_end - 7)
        alone = sparse_mla_attention(
            whole.alone["q"], whole.alone["kv"], None, key_start=near_start,
            key_end=whole.key_end, extra_kv=compressed[:, None], **extra,
        )  # fmt: skip
        neighbours = tokens.history(whole.own["kv"], 6).flatten(0, 2)
        out = tokens.sparse_mla_attention(
            whole.own["q"], neighbours, **tokens.window(7, whole.own["q"].device), extra_kv=rows,
            **{n: whole.part(t) for n, t in extra.items()},
        )  # fmt: skip
        whole.compare(alone, out, f"ratio {ratio}")
        for name in weights:
            summed(context.group, of_rank[name].grad, of_one[name].grad, name)


def histories(context, layout):
    """Of more tokens than a chunk has, too."""
    for width in (0, 1, 4, 19):
        whole = Whole(context, **layout, x=(3,))
        tokens = whole.tokens
        got = tokens.history(whole.own["x"], width)
        by_row = whole.alone["x"].unflatten(0, (whole.batch, whole.count))
        padded = torch.nn.functional.pad(by_row, (0, 0, width, 0))
        first = tokens.columns()[:: tokens.chunk]
        want = torch.stack([padded[:, c : c + width + tokens.chunk] for c in first])
        assert torch.equal(got, want)
        # What all ranks read of a token adds up.
        every = Whole(context, **layout, x=(3,)).tokens
        weights = whole.normal(whole.batch, whole.count, width + 1, 3)
        for number in range(context.size):
            every.context = type("Rank", (), {**vars(context), "rank": number})
            begins = every.columns()
            reads = torch.stack([padded[:, c : c + width + 1] for c in begins], 1)
            (reads * weights[:, begins]).sum().backward(retain_graph=True)
        chunks = got.unfold(2, width + 1, 1).transpose(-1, -2).transpose(0, 1).flatten(1, 2)
        (chunks * weights[:, tokens.columns()]).sum().backward()
        whole.compare_gradients(f"history of {width}")


_REDUCTIONS = (("none", 5), ("sum", None), ("mean", 7))  # and tokens of a chunk


def choices_and_losses(context, layout):
    heads, d = on.index
    shapes = {"q": (heads, d), "k": (d,), "weights": (heads,)}
    whole = Whole(context, **layout, **shapes)
    tokens, total = whole.tokens, whole.batch * whole.count
    with torch.no_grad():  # many rows tie at 0, some with a sign
        for side in (whole.alone, whole.own):
            side["weights"].round_()
        whole.alone["k"][::3] = whole.alone["k"][0]
        whole.own["k"].copy_(whole.part(whole.alone["k"]))
    one, own = whole.alone, whole.own
    keys = tokens.gather(own["k"])
    for ties in ("smaller", "larger"):
        for topk in (1, TOPK, total + 3):
            want = indexer_topk(
                one["q"], one["k"], one["weights"], topk, **whole.ranges, ties=ties,
                return_scores=True,
            )  # fmt: skip
            got = tokens.indexer_topk(
                own["q"], keys, own["weights"], topk, ties=ties, return_scores=True
            )
            for value, of_one in zip(got, want, strict=True):
                assert torch.equal(value, whole.part(of_one)), f"topk {topk}, {ties}"
    chosen = indexer_topk(one["q"], one["k"], one["weights"], TOPK, **whole.ranges)[0]
    f8, scale = indexer_quantize(torch.cat((one["q"].flatten(0, 1), one["k"])).detach())
    of_q, of_k = total * heads, slice(total * heads, None)
    f8_q, q_scale = f8[:of_q].view(total, heads, d), scale[:of_q].view(total, heads)
    weighted = (one["weights"] * q_scale).detach()
    want = indexer_topk(f8_q, f8[of_k], weighted, TOPK, k_scale=scale[of_k], **whole.ranges)[0]
    got, _ = tokens.indexer_topk(
        whole.part(f8_q), tokens.gather(whole.part(f8[of_k])), whole.part(weighted), TOPK,
        k_scale=tokens.gather(whole.part(scale[of_k])),
    )  # fmt: skip
    assert torch.equal(got, whole.part(want)), "f8"

    teacher = whole.normal(total, HEADS, 576), whole.normal(total, 1, 576)
    sink = whole.normal(HEADS, dtype=torch.float32)
    for indices, columns in ((chosen, TOPK), (None, total)):
        limits = {} if indices is not None else whole.ranges
        _, lse = sparse_mla_attention(*teacher, indices, **limits, attn_sink=sink, return_lse=True)
        target = whole.normal(total, columns).abs()
        of_rank = None if indices is None else whole.part(indices)
        # All reductions of each, in turn with what the loss is given.
        turn = ("target", "attention") * 2
        turn = turn[:3] if indices is None else turn[1:]
        for given, (reduction, chunk) in zip(turn, _REDUCTIONS, strict=True):
            keys = tokens.gather(own["k"])
            if given == "target":
                of_all, of_own = {"target": target}, {"target": whole.part(target)}
            else:
                rest = None, sink
                of_all = {"attention": (*teacher, lse, *rest)}
                rows = tokens.gather(whole.part(teacher[1]))
                of_own = {"attention": (whole.part(teacher[0]), rows, whole.part(lse), *rest)}
            options = {"reduction": reduction, "chunk": chunk}
            want = indexer_loss(
                one["q"], one["k"], one["weights"], indices=indices, **of_all, **whole.ranges,
                **options,
            )  # fmt: skip
            got = tokens.indexer_loss(
                own["q"], keys, own["weights"], indices=of_rank, **of_own, **options
            )
            name = f"{given}, {reduction}"
            if reduction == "none":
                whole.compare(want, got, name)
                continue
            want.backward()
            share = context.size if reduction == "mean" else 1  # the mean of the ranks
            (got / share).backward()
            summed(context.group, got.detach() / share, want.detach(), name)
            whole.compare_gradients(name)


CHECKS = {
    check.__name__: check for check in (attention, two_sources, histories, choices_and_losses)
}


def operations(group, name, layouts=1):
    """Each way to place tokens and to bring rows with so many layouts in turn: other ones with
    other numbers of ranks."""
    ways = itertools.product(PLACEMENTS, KEYS)
    for number, (placement, keys) in enumerate(ways, group.size()):
        context = context_parallel(group, placement=placement, keys=keys)
        for layout in range(number, number + layouts):
            CHECKS[name](context, LAYOUTS[layout % len(LAYOUTS)])


def on_gpus(rank, ranks, folder):
    """A process of test_context_parallel_gpu.py."""
    global on
    on = On("cuda", torch.bfloat16, 2e-2, (64, 128))
    torch.cuda.set_device(rank)
    meet(rank, ranks, folder, "nccl")
    for name in CHECKS:
        operations(dist.group.WORLD, name, len(LAYOUTS))
    dist.destroy_process_group()


def check_bench(ranks, tokens, *options):
    """The rows of `winnow bench context_parallel` for one length and each kind of keys."""
    command = "-m", "winnow", "bench", "context_parallel", "--json", *options
    command += "--tokens", tokens, "--keys", *KEYS
    once = "from winnow.transformers import bench_ranks; bench_ranks._REPETITIONS = 1"
    rows = json.loads(torchrun(ranks, *command, first=once, check=True).stdout)
    for row, keys in zip(rows, KEYS, strict=True):
        assert row["benchmark"] == f"training step, {keys}, {tokens} tokens, {ranks} ranks"
        assert row["ratio"] == row["seconds"] / row["seconds_without_communication"] > 0
        assert row["peak_bytes"] > 0
    return rows
