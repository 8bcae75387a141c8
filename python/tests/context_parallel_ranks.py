"""What goes on while rows are on their way, what is kept, what is refused, and ranks that are gone:
run by the ranks of test_context_parallel.py."""

import datetime
import itertools
import os
import time
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from context_parallel_checks import HEADS, KEYS
from interrupt import interrupted as interrupt
from ranks import meet
from torch.multiprocessing.reductions import StorageWeakRef
from winnow.context_parallel.placement import Placement
from winnow.torch import context_parallel


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}: a rank waits where it should go on"
        time.sleep(0.01)


def overlaps(group, folder):
    """Rank 0 goes on where rank 1 has not begun to send."""
    first = dist.get_rank(group) == 0
    tokens = context_parallel(group).tokens(8)
    x, kv, w_q, w_v = (
        torch.ones(*shape, requires_grad=True)
        for shape in ((4, 6), (4, 1, 576), (6, HEADS * 576), (512, 3))
    )
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def sent_late(whole, *arguments, **options):
        if not first and whole.dtype == torch.uint8:  # rows, and not what ranks agree on
            wait_for(folder / "gathers")
        return gather(whole, *arguments, **options)

    with mock.patch.object(dist, "all_gather_into_tensor", sent_late):
        rows = tokens.gather(kv)
    (folder / "gathers").touch()
    q = (x @ w_q).view(4, HEADS, 576)
    out = rows.begin_again_with(tokens.sparse_mla_attention(q, rows) @ w_v)
    seen = []
    w_v.register_hook(lambda _: seen.append("product"))

    def begin(*arguments, **options):
        seen.append("gather")
        return gather(*arguments, **options)

    def late(*arguments, **options):
        seen.append("scatter")
        if not first:
            wait_for(folder / "products")
        return scatter(*arguments, **options)

    def of_queries(_):
        seen.append("dq")
        if first:
            (folder / "products").touch()

    x.register_hook(of_queries)
    with mock.patch.multiple(dist, all_gather_into_tensor=begin, reduce_scatter_tensor=late):
        out.sum().backward()
    assert seen == ["gather", "product", "scatter", "dq"]


def memory(group, keys):
    """The bytes that autograd keeps of three layers, with as many tokens on each rank; of all rows
    nothing is left behind a layer, nor behind a backward pass."""
    context = context_parallel(group, placement="balanced", keys=keys)
    tokens = context.tokens(4 * context.size)
    x = torch.randn(4, 512, requires_grad=True)
    index = [torch.randn(4, 8, 64), torch.randn(4, 64), torch.randn(4, 8)]
    kept, storages = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def layer(x):
        rows = tokens.gather(x[:, None])
        k = tokens.gather(index[1].requires_grad_())
        chosen, _ = tokens.indexer_topk(index[0], k, index[2], 3)
        q = x[:, None].repeat(1, HEADS, 1)
        out, lse = tokens.sparse_mla_attention(q, rows, chosen, return_lse=True)
        teacher = q.detach(), rows, lse, None, None
        loss = tokens.indexer_loss(index[0], k, index[2], indices=chosen, attention=teacher)
        return out.sum(1) + loss

    gather, in_order = dist.all_gather_into_tensor, Placement.in_order

    def gathered(whole, *others, **options):
        storages.append(StorageWeakRef(whole.untyped_storage()))
        return gather(whole, *others, **options)

    def ordered(*arguments):
        whole = in_order(*arguments)
        storages.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    def alive():
        return sum(not storage.expired() for storage in storages)

    with (
        mock.patch.object(dist, "all_gather_into_tensor", gathered),
        mock.patch.object(Placement, "in_order", ordered),
    ):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for _ in range(3):
                x = layer(x)
        assert len(storages) >= 6 * (not context.sharded) and alive() == 0
        x.sum().backward()
        assert alive() == 0
    return sum(kept.values())


def refusals(group):
    rank = dist.get_rank(group)

    def refused(text, function, *arguments, **options):
        with pytest.raises(ValueError) as error:
            function(*arguments, **options)
        assert str(error.value) == f"context_parallel: {text}"

    context = context_parallel(group, placement="balanced")
    refused("placement: want contiguous or balanced, got zigzag", context_parallel, group,
            placement="zigzag")  # fmt: skip
    refused("keys: want gathered or sharded, got ring", context_parallel, group, keys="ring")
    refused("group: want a ProcessGroup of torch.distributed that this process is in, got str",
            context_parallel, "world")  # fmt: skip
    outside = dist.GroupMember.NON_GROUP_MEMBER
    refused("group: want a ProcessGroup of torch.distributed that this process is in, got a group "
            "without this process", context_parallel, outside)  # fmt: skip
    own, other = ("contiguous", "balanced")[rank], 1 - rank
    refused(f"context_parallel: placement: want the same on all ranks, got {own} on rank {rank}, "
            f"another on rank {other}", context_parallel, group, placement=own)  # fmt: skip
    refused("tokens: want a multiple of 4, twice the ranks, got 10", context.tokens, 10)
    refused("tokens: want a multiple of 4, twice the ranks, got 0", context.tokens, 0)
    refused("batch: want 1 or more, got 0", context.tokens, 8, batch=0)
    refused(f"tokens: count: want the same on all ranks, got {8 + 4 * rank} on rank {rank}, "
            f"another on rank {other}", context.tokens, 8 + 4 * rank)  # fmt: skip
    refused(f"tokens: cu_seqlens: want the same on all ranks, got [0, {rank}, 8] on rank {rank}, "
            f"another on rank {other}", context.tokens, 8, cu_seqlens=[0, rank, 8])  # fmt: skip
    for bad in ([0, 9], [1, 8], [0, 5, 3], [0]):
        refused(f"cu_seqlens: want numbers that ascend from 0 to at most 8, got {bad}",
                context.tokens, 8, cu_seqlens=torch.tensor(bad))  # fmt: skip
    refused("cu_seqlens: want sequences within the batch's rows of 8 tokens, got one from 3 to 9",
            context.tokens, 8, batch=2, cu_seqlens=[0, 3, 9])  # fmt: skip
    for bad in ([0, 2.5, 8], "08", torch.tensor([[0, 8]]), torch.tensor([0, 2.5, 8])):
        got = bad.tolist() if torch.is_tensor(bad) else bad
        refused("cu_seqlens: want whole numbers in a list or a tensor of one dimension, got "
                f"{got}", context.tokens, 8, cu_seqlens=bad)  # fmt: skip
    # What one rank gives that is no number, or no placement, does not leave the others waiting.
    bad = [0, "x"] if rank else [0, 8]
    refused(f"tokens: cu_seqlens: want the same on all ranks, got {bad} on rank {rank}, another on "
            f"rank {other}", context.tokens, 8, cu_seqlens=bad)  # fmt: skip
    bad = "zigzag" if rank else "balanced"
    refused(f"context_parallel: placement: want the same on all ranks, got {bad} on rank {rank}, "
            f"another on rank {other}", context_parallel, group, placement=bad)  # fmt: skip
    for whole in (np.int64, torch.tensor):  # one rank's kind of number is as good as another's
        kind = whole if rank else int
        starts = [kind(0), kind(8)]
        assert context.tokens(kind(8), batch=kind(1), cu_seqlens=starts).lengths == [8]
    call = "tokens" if rank == 0 else "context_parallel"
    calls = (lambda: context.tokens(8)), (lambda: context_parallel(group))
    refused(f"order of calls: want {call}() on all ranks, got another on rank {other}", calls[rank])
    tokens = context.tokens(8)
    surplus = torch.zeros(4 + rank, 1, 512)
    refused(f"gather: surplus_rows: want the same on all ranks, got {rank} on rank {rank}, another "
            f"on rank {other}", tokens.gather, surplus)  # fmt: skip
    refused("gather: rows: want 4 rows, got shape [5, 512]", tokens.gather, torch.zeros(5, 512))
    refused("history: x: want 4 rows, got shape [3, 2]", tokens.history, torch.zeros(3, 2), 1)
    refused("width: want 0 or more, got -1", tokens.history, torch.zeros(4, 2), -1)
    refused("ratio: want 1 to 128, got 129", tokens.windows, 129, "cpu")
    refused("gate: want dtype torch.float32 as kv, got torch.float64", tokens.compressor_forward,
            torch.zeros(4, 8), torch.zeros(4, 8).double(), torch.zeros(2, 8))  # fmt: skip
    rows = tokens.gather(torch.ones(4, 1, 512))
    keys, w = tokens.gather(torch.ones(4, 64)), torch.ones(4, 8)
    q = torch.ones(4, 8, 64)
    refused("target: want it or attention, got neither", tokens.indexer_loss, q, keys, w)
    refused("key_start: want key_end with it, got one of them", tokens.indexer_topk, q, keys, w, 2,
            key_start=torch.zeros(4, dtype=torch.int32))  # fmt: skip
    refused("k: want a handle of gather(), got Tensor", tokens.indexer_topk, q, w, w, 2)
    refused("attention: kv: want a handle of gather(), got Tensor", tokens.indexer_loss, q, keys, w,
            attention=(q, w, w, None, None))  # fmt: skip
    # All that was refused on all ranks alike, and they go on.
    assert torch.equal(torch.cat([part for _, part in rows.parts()]), torch.ones(8, 1, 512))
    assert torch.equal(torch.cat([part for _, part in keys.parts()]), torch.ones(8, 64))
    assert tokens.whole(torch.full((4,), rank)).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def differences(group, keys):
    """What ranks gave alike before, one of them gives otherwise: an error on all ranks that names
    it, behind which they go on."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    context = context_parallel(group, keys=keys)
    tokens, longer = context.tokens(8 * size), context.tokens(16 * size)
    odd = rank == size - 1

    def ones(rows=8, columns=64, dtype=torch.float32):
        return torch.ones(rows, columns, dtype=dtype)

    def parts(rows):
        return torch.cat([part for _, part in rows.parts()])

    def attend(rows):
        q = torch.ones(8, HEADS, 512, dtype=rows.dtype)
        return tokens.sparse_mla_attention(q, tokens.gather(rows[:, None].repeat(1, 1, 8)))

    def losses(reduction):
        q, weights, target = torch.ones(8, 8, 64), torch.ones(8, 8), torch.ones(8, 8 * size)
        keys = tokens.gather(ones())
        return tokens.indexer_loss(q, keys, weights, target, reduction=reduction)

    def windows(ratio):
        at = tokens.windows(ratio, "cpu")
        return parts(tokens.gather(ones(at.own), at))

    rows, others = tokens.gather(ones()), tokens.gather(ones(8, 128))
    f32, bf16 = torch.float32, torch.bfloat16
    # The call, its two arguments, what differs and its values.
    tried = [
        (lambda dtype: parts(tokens.gather(ones(dtype=dtype))), f32, bf16, "gather: dtype"),
        (lambda n: parts(tokens.gather(ones(8, n))), 64, 128, "gather: columns", "[64]", "[128]"),
        (lambda at: parts(at.gather(ones(8 * at.count // tokens.count))), tokens, longer,
         "gather: rows_of", f"1 x {8 * size} tokens", f"1 x {16 * size} tokens"),
        (windows, 2, 4, "gather: rows_of", f"{4 * size} windows, up to 4 of a rank",
         f"{2 * size} windows, up to 2 of a rank"),
        (lambda dtype: attend(ones(dtype=dtype)), f32, bf16, "gather: dtype"),
        (lambda dtype: tokens.history(ones(dtype=dtype), 3), f32, bf16, "history: dtype"),
        (lambda width: tokens.history(ones(), width), 3, 5, "history: width"),
        (lambda dtype: tokens.whole(ones(dtype=dtype)), f32, bf16, "whole: dtype"),
        (lambda n: tokens.whole(ones(8, n)), 64, 128, "whole: columns", "[64]", "[128]"),
        (losses, "mean", "sum", "indexer_loss: reduction"),
    ]  # fmt: skip
    if context.sharded:
        shapes = "[8, 64]", "[8, 128]"
        tried.append((parts, rows, others, "use of rows: shape", *shapes))
    for call, usual, other, name, *texts in tried:
        want = call(usual), call(other)  # each agreed on before
        own = (texts or (str(usual), str(other)))[odd]
        for _ in range(2):
            with pytest.raises(ValueError) as error:
                call(other if odd else usual)
            theirs = 0 if odd else size - 1
            assert str(error.value) == (
                f"context_parallel: {name}: want the same on all ranks, got {own} on rank {rank}, "
                f"another on rank {theirs}"
            )
        for given, expected in zip((usual, other), want, strict=True):
            assert torch.equal(call(given), expected)


def refusals_of_one(group, keys):
    """What one rank refuses is an error on all of them at once, behind which they go on."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    context = context_parallel(group, keys=keys)
    tokens = context.tokens(8 * size)
    f32, i32 = torch.float32, torch.int32

    def ones(*shape, dtype=f32):
        return torch.ones(*shape, dtype=dtype)

    def attend(queries=8, indices=None, sink=None):
        rows = tokens.gather(ones(8, 1, 576))
        return tokens.sparse_mla_attention(ones(queries, HEADS, 576), rows, indices, attn_sink=sink)

    def choose(k=3, scale=None, weights=f32):
        q, w = ones(8, 8, 64), ones(8, 8, dtype=weights)
        return tokens.indexer_topk(q, tokens.gather(ones(8, 64)), w, k, k_scale=scale)[0]

    def losses(rows=None, target=None, weights=8, reduction="mean"):
        rows = tokens.gather(ones(8, 64)) if rows is None else rows
        target = ones(8, 8 * size) if target is None else target
        q, w = ones(8, 8, 64), ones(8, weights)
        return tokens.indexer_loss(q, rows, w, target, reduction=reduction)

    def compress(gate=8, ratio=2, first=None):
        at = ones(8, 8), ones(8, gate), ones(ratio, 8)
        return tokens.compressor_forward(*at, first_position=first)

    def shard(count=8 * size):
        return tokens.gather(tokens.shard(ones(count, 64))).local

    def window(width):
        kv = tokens.history(ones(8, 1, 576), 2).flatten(0, 2)
        limits = tokens.window(width, kv.device)
        return tokens.sparse_mla_attention(ones(8, HEADS, 576), kv, **limits)

    # A call, what it takes, what one rank gives otherwise, and the begin of the text of that rank.
    tried = [
        (lambda x: tokens.gather(x).local, ones(8, 64), None, "AttributeError: "),
        (lambda x: tokens.gather(ones(4, 64), x).local, tokens.windows(2, "cpu"), 7,
         "AttributeError: "),
        (lambda x: tokens.gather(x).local, ones(8, 64), ones(8, 64).to_sparse(),
         "gather: rows: want a dense tensor, got torch.sparse_coo"),
        (lambda x: tokens.whole(x), ones(8), [1] * 8, "AttributeError: "),
        (lambda x: tokens.history(x, 2), ones(8, 64), "rows", "AttributeError: "),
        (attend, 8, 7, f"q: want 3 dimensions and 8 tokens, got shape [7, {HEADS}, 576]"),
        (lambda x: attend(indices=x), torch.zeros(8, 2, dtype=i32), torch.zeros(8, 2),
         "sparse_mla::forward: indices: "),
        (lambda x: attend(sink=x), ones(HEADS), ones(HEADS + 1), ""),
        (choose, 3, -1, "indexer::topk: topk: "),
        (lambda x: choose(weights=x), f32, torch.int64, "indexer::topk: weights: "),
        (lambda x: choose(scale=x), None, ones(8), "k_scale: want a handle of gather()"),
        (lambda x: losses(x), None, ones(8, 64), "k: want a handle of gather(), got Tensor"),
        (lambda x: losses(weights=x), 8, 7, "indexer::scores: weights: "),
        (lambda x: losses(reduction=x), "mean", "max",
         "reduction: want mean, sum or none, got max"),
        (compress, 8, 9, "gate: want shape [8, 8] as kv, of 2 dimensions, got [8, 9]"),
        (lambda x: compress(ratio=x), 2, 129, "ratio: want 1 to 128, got 129"),
        (lambda x: compress(first=x), [0], [],
         "first_position: want a number for each of 1 sequences, got []"),
        (shard, 8 * size, 8 * size + 1,
         f"shard: want {8 * size} tokens in dimension 0, got [{8 * size + 1}, 64]"),
        (window, 3, 0, "width: want 1 or more, got 0"),
        (lambda x: context.tokens(x).count, size, torch.ones(1, device="meta"), "NotImpl"),
    ]  # fmt: skip
    for call, usual, odd, begin in tried:
        want = call(usual)
        for which in range(size):
            begun = time.monotonic()
            with pytest.raises((ValueError, RuntimeError, AttributeError)) as error:
                call(odd if rank == which else usual)
            text = str(error.value)
            if rank == which:
                assert begin in f"{type(error.value).__name__}: {text}", text
            else:
                assert isinstance(error.value, ValueError)
                assert f"want what no rank refuses, got that of rank {which}: {begin}" in text, text
            assert time.monotonic() - begun < 20
            got = call(usual)
            assert torch.equal(got, want) if torch.is_tensor(got) else got == want


def backward_of_a_part(group):
    """A backward pass that does not reach the rows leaves nothing for the next one."""
    for keys in KEYS:
        tokens = context_parallel(group, keys=keys).tokens(8)
        q, kv = torch.randn(4, HEADS, 576), torch.randn(4, 1, 576)
        q.requires_grad_(), kv.requires_grad_()
        out = tokens.sparse_mla_attention(q, tokens.gather(kv))
        again = tokens.sparse_mla_attention(q, tokens.gather(kv))
        (want,) = torch.autograd.grad(again.sum(), kv)
        torch.autograd.grad(out.sum(), q, retain_graph=True)
        for _ in range(2):
            (got,) = torch.autograd.grad(out.sum(), kv, retain_graph=True)
            assert torch.equal(got, want)


def autocast(group):
    """Tensors in float32 under torch.autocast are cast as winnow.torch's functions do it, and the
    backward pass, outside of it, finds them so."""
    for keys, inside in itertools.product(KEYS, (True, False)):
        tokens = context_parallel(group, keys=keys).tokens(8)
        q, kv, x = torch.randn(4, HEADS, 576), torch.randn(4, 1, 576), torch.randn(4, 8, 64)
        k, w = torch.randn(4, 64), torch.rand(4, 8)
        leaves = [t.requires_grad_() for t in (q, kv, x, k, w)]
        rows = None if inside else (tokens.gather(kv), tokens.gather(k))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows, index = (tokens.gather(kv), tokens.gather(k)) if rows is None else rows
            own, window = tokens.history(kv, 2).flatten(0, 2), tokens.window(3, q.device)
            out, lse = tokens.sparse_mla_attention(q, rows, return_lse=True)
            beside = tokens.sparse_mla_attention(q, own, **window)
            loss = tokens.indexer_loss(x, index, w, attention=(q, rows, lse, None, None))
        assert out.dtype == (torch.bfloat16 if inside else torch.float32)
        assert beside.dtype == torch.bfloat16
        gradients = torch.autograd.grad(out.sum() + beside.sum() + loss, leaves)
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


# ---- faults


def interrupted(group, folder):
    """Ctrl-C ends a rank's wait for another, which comes when that has happened: in an agreement,
    and for rows."""
    context = context_parallel(group)
    tokens, gather = context.tokens(8), dist.all_gather_into_tensor
    rows = torch.ones(4, 64)

    def late(whole, *arguments, **options):
        if whole.dtype == torch.uint8:
            wait_for(folder / "rows")
        return gather(whole, *arguments, **options)

    if dist.get_rank(group) == 0:
        interrupt(lambda: tokens.gather(rows), 0.5)
        (folder / "agreement").touch()
        handle = tokens.gather(rows)
        interrupt(lambda: list(handle.parts()), 0.5)
        (folder / "rows").touch()
    else:
        wait_for(folder / "agreement")
        with pytest.raises(ValueError, match="want another\\(\\) on all ranks"):
            context.agree("another")
        with mock.patch.object(dist, "all_gather_into_tensor", late):
            handle = tokens.gather(rows)
    (part,) = handle.parts()
    assert torch.equal(part[1], torch.ones(8, 64))


def rank_that_goes_on(rank, folder):
    """Rank 2 stays away from a call, then ends: the others have an error each time."""
    meet(rank, 3, folder)
    timeout = datetime.timedelta(seconds=5)
    for fault in ("absent", "gone"):
        group = dist.new_group([0, 1, 2], timeout=timeout)
        tokens = context_parallel(group).tokens(6)
        kv = torch.ones(2, 1, 512, requires_grad=True)
        out = tokens.sparse_mla_attention(torch.ones(2, HEADS, 512), tokens.gather(kv))
        if rank == 2:
            if fault == "gone":
                os._exit(0)
            for other in (0, 1):
                wait_for(folder / f"absent-{other}")
            continue
        begun = time.monotonic()
        try:
            out.sum().backward()
        except RuntimeError:
            assert time.monotonic() - begun < 60
        else:
            raise AssertionError(f"rank {rank} did not see that another is {fault}")
        (folder / f"{fault}-{rank}").touch()
    os._exit(0)
