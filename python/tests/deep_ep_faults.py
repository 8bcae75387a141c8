"""What the ranks of test_deep_ep_faults.py run: the last is late, masked, stopped or killed."""

import importlib
import os
import signal
import time

import torch
import torch.distributed as dist
from deep_ep_programs import dispatched, refused, seconds
from interrupt import interrupted as interrupt
from winnow.compat import deep_ep
from winnow.compat.deep_ep._low_latency import Key
from winnow.errors import Error

from winnow.expert_parallel import rendezvous

H, E, M = 256, 60, 16


def given(rank, world, experts=E):
    """Five tokens of small integers, whose sums are exact, for ranks 0, 1 and the last."""
    x = torch.full((5, H), rank + 1.0, dtype=torch.bfloat16)
    idx = torch.tensor([[0, experts // world, experts - 1]] * 5)
    return x, idx, torch.ones(5, 3)


def caller(kind, group, **options):
    """Creates a buffer and returns a function that dispatches, combines and checks the sums."""
    rank, world = group.rank(), group.size()
    x, idx, weights = given(rank, world)

    def buffer():
        (got, _, _, _, handle, _), _ = dispatched(made, (x, idx, weights), E)
        return made.combine(got, handle)[0], min(world, 3)

    def low_latency():
        got, _, handle, _, _ = made.low_latency_dispatch(x, idx, M, E, use_fp8=False)
        return made.low_latency_combine(got, idx, weights, handle)[0], 3

    def hybrid():
        chosen, probs = deep_ep.indices_to_map(idx, weights, len(x), E)
        got, _, _, _, handle = made.dispatch_with_permute(hidden=x, routing_map=chosen, probs=probs)
        return made.combine_with_unpermute(hidden=got, handle=handle)[0], 3

    def elastic():
        got, _, _, handle, _ = made.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)
        return made.combine(got, handle)[0], min(world, 3)

    if kind == "hybrid":
        made = deep_ep.HybridEPBuffer(group, H, M, E // world)
    elif kind == "elastic":
        made = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=M, hidden=H, num_topk=3)
    else:
        made = deep_ep.Buffer(group, low_latency_mode=kind == "low_latency", **options)
    calls = {"buffer": buffer, "low_latency": low_latency, "hybrid": hybrid, "elastic": elastic}

    def call():
        sums, times = calls[kind]()
        assert torch.equal(sums, x * times)

    call.buffer = made
    return call


def late(group, kind):
    """If the last rank is late, it gets the others' error at once, and the next call works."""
    rank, last = group.rank(), group.size() - 1
    call = caller(kind, group)
    with seconds(2 if rank == 0 else 20):
        if rank == last:
            dist.barrier(group)  # behind the others' call
        begin = time.monotonic()
        text = refused(call, Error)
        if rank != last:
            dist.barrier(group)
    assert f"waited 2 s for ranks {last}, which did not come to the same call" in text, text
    assert time.monotonic() - begin < 10
    for _ in range(2):
        call()


def retried(group, kind):
    """Ranks that retry independently succeed as soon as all are in the call at the same time."""
    rank, last = group.rank(), group.size() - 1
    call, attempts = caller(kind, group), 0
    if rank == last:
        time.sleep(3.5)
    while True:
        attempts += 1
        with seconds(1 if rank != last else 10):
            try:
                call()
                break
            except Error as error:
                assert "did not come to the same call" in error.message, error
    assert 2 < attempts < 20
    call()


def late_and_masked(group):
    """With enable_shrink the others continue without a rank that is late to the first call."""
    rank, world = group.rank(), group.size()
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    with seconds(3 if rank == 0 else 20):
        if rank == world - 1:
            dist.barrier(group)
            begin = time.monotonic()
            text = refused(lambda: without_last(buffer, group), Error)
            assert f"for ranks {world - 1}, which did not come" in text, text
            assert time.monotonic() - begin < 10
        else:
            without_last(buffer, group)
            assert status(buffer, world) == [0] * (world - 1) + [1]
            dist.barrier(group)
    dist.barrier(group)


def status(buffer, world):
    found = torch.full((world,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(found)
    return found.tolist()


def without_last(buffer, group, most=M, missing=1):
    """A dispatch and a combine in which `missing` of each token's experts are on masked ranks."""
    rank, world = group.rank(), group.size()
    x, idx, weights = given(rank, world)
    got, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, most, E, use_fp8=False)
    assert got.shape == (E // world, world * most, H)
    here = handle[1][0] & 0xFFFFFFFF
    assert here.tolist() == [5 * (rank < 2)] * (world - missing) + [0] * missing
    assert counts[0] == here.sum()
    back, _, _ = buffer.low_latency_combine(got, idx, weights, handle)
    assert torch.equal(back, x * (3 - missing))


def masked(group):
    """Rank 0 alone masks the last of three ranks before any call. Layers that later calls create,
    also for other sizes, are created without it."""
    rank, world = group.rank(), group.size()
    plain = deep_ep.Buffer(group, low_latency_mode=True)
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    for _ in range(2):  # before its first dispatch, and after it
        text = refused(
            lambda: plain.low_latency_update_mask_buffer((rank + 1) % world, True), Error
        )
        assert "update_mask_buffer: the buffer was made without enable_shrink" in text
        without_last(plain, group, missing=0)
    text = refused(lambda: buffer.low_latency_update_mask_buffer(rank, True))
    assert f"rank_to_mask: want another rank of {world}, got {rank}" in text
    if rank == 0:
        buffer.low_latency_update_mask_buffer(2, True)
        assert status(buffer, world) == [0, 0, 1]
    if rank != 2:
        for most in (M, 2 * M, M):
            without_last(buffer, group, most)
            assert status(buffer, world) == [0, 0, 1]
        wrong = given(rank, world)[1] + (E if rank == 1 else 0)
        text = refused(
            lambda: buffer.low_latency_dispatch(given(rank, world)[0], wrong, M, E, use_fp8=False)
        )
        assert "rank 1: topk_idx: want" in text, text
        wrong = wrong.float() if rank == 1 else given(rank, world)[1]
        text = refused(lambda: buffer.low_latency_dispatch(given(rank, world)[0], wrong, M, E))
        assert "rank 1: topk_idx: want" in text, text
        buffer.low_latency_update_mask_buffer(2, False)
        assert status(buffer, world) == [0, 0, 0]
    dist.barrier(group)
    # The layers were created without rank 2, so they are created again, with it.
    for most in (M, 2 * M):
        without_last(buffer, group, most, missing=0)
    # A rank can return to a layer if it has missed none of its calls.
    if rank != 2:
        for mask in (True, False):
            buffer.low_latency_update_mask_buffer(2, mask)
            assert status(buffer, world) == [0, 0, int(mask)]
    for most in (M, 2 * M):
        without_last(buffer, group, most, missing=0)
    if rank != 2:
        buffer.low_latency_update_mask_buffer(2, True)
        without_last(buffer, group, 2 * M)
        buffer.low_latency_clean_mask_buffer()
        assert status(buffer, world) == [0, 0, 0]
        buffer.low_latency_update_mask_buffer(2, True)
        without_last(buffer, group, 3 * M)
    dist.barrier(group)
    # Rank 2 has missed calls of these layers, so it can return only with a new buffer.
    again = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    without_last(again, group, missing=0)
    assert status(again, world) == [0, 0, 0]


def told(group):
    """A rank that calls after the others have masked it gets an error that says so."""
    rank, world = group.rank(), group.size()
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    if rank == world - 1:
        text = refused(lambda: without_last(buffer, group), Error)
        assert f"rank {rank} was masked by ranks 0" in text, text
    else:
        number = rendezvous._begun[group]["winnow/deep_ep"] + 1
        rendezvous._store_of(group).wait([f"winnow/deep_ep/{number}/{world - 1}"])  # it has called
        buffer.low_latency_update_mask_buffer(world - 1, True)
        without_last(buffer, group)


def of_gpus(group):
    """On GPUs all ranks must create a layer: if one is masked, the others get an error at once."""
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    if group.rank() == 0:
        buffer.low_latency_update_mask_buffer(2, True)
    if group.rank() != 2:
        key = Key(M, H, 3, E, torch.device("cuda", 0))
        begin = time.monotonic()
        text = refused(lambda: buffer._layers.low_latency(key, True))
        assert (
            "rank 0: on a GPU no low-latency layer of new sizes can be made without ranks 2" in text
        )
        assert time.monotonic() - begin < 10


def stopped(group, kind):
    """The others' errors name a process that is stopped. When it continues, the next call works."""
    rank, last = group.rank(), group.size() - 1
    processes = [None] * group.size()
    dist.all_gather_object(processes, os.getpid(), group=group)
    with seconds(3 if rank == 0 else 20):
        call = caller(kind, group)
        call()
        try:
            if rank == last:
                os.kill(os.getpid(), signal.SIGSTOP)
            begin = time.monotonic()
            text = refused(call, Error)
            if rank != last:
                assert f"rank {last}" in text and "stopped" in text, text
                assert time.monotonic() - begin < 10
        finally:
            if rank == 0:
                os.kill(processes[last], signal.SIGCONT)
    dist.barrier(group)
    call()


def killed(group, kind):
    """The others' errors name a killed process before the deadline; shrinking calls mask it."""
    rank, world = group.rank(), group.size()
    shrinks = {"enable_shrink": True} if kind == "low_latency" else {}
    call = caller(kind, group, **shrinks)
    call()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    if kind == "low_latency":
        without_last(call.buffer, group)
        assert status(call.buffer, world) == [0] * (world - 1) + [1]
        without_last(call.buffer, group, 2 * M)
    else:
        text = refused(call, Error)
        assert f"rank {world - 1}" in text and "gone" in text, text
    assert time.monotonic() - begin < 10


def briefly(group, module, name):
    """Runs another program with a short timeout."""
    with seconds(3):
        getattr(importlib.import_module(module), name)(group)


def interrupted(group, kind, made):
    """Ctrl-C ends a rank's wait at once, the others' errors name it, and the next call works."""
    rank, last = group.rank(), group.size() - 1
    call = caller(kind, group)
    if made:
        call()
    dist.barrier(group)
    if rank == last:
        assert interrupt(call, 0.5) < 3
        dist.barrier(group)
    else:
        dist.barrier(group)
        begin = time.monotonic()
        text = refused(call, Error)
        assert f"rank {last} was interrupted" in text, text
        assert time.monotonic() - begin < 10
    for again in (call, call, caller(kind, group)):
        again()
