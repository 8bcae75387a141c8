"""Bodies of test_deep_ep_low_latency.py, which every rank runs; each checks its own results."""

import time

import deep_ep_oracle as oracle
import torch
import torch.distributed as dist
from deep_ep_faults import status
from deep_ep_programs import refused, seconds
from winnow.compat import deep_ep
from winnow.errors import Error

H, K, E, M = 512, 3, 12, 16

_buffers = {}


def buffer_of(group, **options):
    key = (group, *options)
    if key not in _buffers:
        _buffers[key] = deep_ep.Buffer(group, low_latency_mode=True, **options)
    return _buffers[key]


def start(group, seed=0):
    """(rank, number of ranks, the buffer, the inputs of all ranks, x, topk_idx and weights here)"""
    rank, given = group.rank(), oracle.inputs(group.size(), E, K, H, seed)
    return rank, group.size(), buffer_of(group), given, *given[rank]


def wide(rows, scales):
    """float8 rows and their scales as float32."""
    if scales.dtype == torch.int32:
        dense = torch.empty(scales.shape, dtype=torch.int32).copy_(scales)
        exponents = dense.view(torch.uint8).to(torch.int32)
        scales = (exponents << 23).view(torch.float32)
    blocks = rows.float().reshape(*rows.shape[:-1], -1, 128)
    return (blocks * scales[..., None]).reshape(rows.shape)


def check_arrived(given, rank, world, rows, count, handle, exact):
    """Checks a dispatch. `rows`: float32 [e, W * M, H]; `exact`: they were sent in bfloat16."""
    tokens, ranges, most, hidden, experts = handle
    assert (most, hidden, experts) == (M, H, E) and rows.shape == (E // world, world * M, H)
    for expert in range(E // world):
        begin = 0
        for source, (x, idx, _) in enumerate(given):
            want = (idx == rank * (E // world) + expert).any(1).nonzero()[:, 0]
            assert ranges[expert, source] == begin << 32 | len(want)
            end = begin + len(want)
            came = tokens[expert, begin:end].long()
            order = came.argsort() if oracle.on_gpu else slice(None)
            assert torch.equal(came[order], want)
            got = rows[expert, begin:end][order]
            if exact:
                assert torch.equal(got, x[want].float())
            else:
                # float8 is exact to 1/16 of an element or, if it is subnormal, 2^-10 of the scale,
                # which doubles at most as a power of two. Here 2^-7 of the scale is allowed.
                least = x[want].float().abs().amax(1, keepdim=True) / 448 / 128
                assert ((got - x[want].float()).abs() <= x[want].float().abs() / 16 + least).all()
            begin = end
        assert count[expert] == begin and count.dtype == torch.int32


def sums(given, rank, world):
    """The combined rows of `rank` if experts double theirs: sums over ranks of sums per rank."""
    x, idx, weights = given[rank]
    want = torch.zeros(x.shape)
    for home in range(world):
        of_rank = torch.zeros(x.shape)
        for k in range(idx.shape[1]):
            there = idx[:, k] // (E // world) == home
            product = (x.float() * 2) * torch.where(there, weights[:, k], 0.0)[:, None]
            of_rank += torch.where(there[:, None], product, torch.zeros(()))
        want += of_rank
    return want.bfloat16()


def calls(group, with_hook):
    rank, world, buffer = group.rank(), group.size(), buffer_of(group)
    for seed in range(2):
        given = oracle.inputs(world, E, K, H, seed)
        x, idx, weights = given[rank]
        stats, waits = torch.ones(E // world).int(), torch.zeros(world).long()
        for options in (
            {"use_fp8": False},
            {},
            {"round_scale": True},
            {"round_scale": True, "use_ue8m0": True},
        ):
            got, count, handle, event, hook = buffer.low_latency_dispatch(
                x,
                idx,
                M,
                E,
                cumulative_local_expert_recv_stats=stats,
                dispatch_wait_recv_cost_stats=waits,
                return_recv_hook=with_hook,
                **options,
            )
            assert event.event is None and (hook is None) == (not with_hook)
            if with_hook:
                hook()
            fp8 = options.get("use_fp8", True)
            rows = wide(*got) if fp8 else got.float()
            if fp8:
                packed = options.get("use_ue8m0", False)
                assert got[0].dtype == torch.float8_e4m3fn
                assert got[1].shape == (E // world, world * M, H // (512 if packed else 128))
                assert got[1].stride(1) == 1
            check_arrived(given, rank, world, rows, count, handle, not fp8)
        assert torch.equal(stats, 1 + 4 * count) and (waits >= 0).all()
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        got, count, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, M, E, use_fp8=False, return_recv_hook=with_hook
        )
        if with_hook:
            hook()
        rows.copy_(got * 2)
        # combine() does not depend on the public members of the handle.
        handle[0].fill_(-1)
        handle[1].fill_(1 << 32 | 3)
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        for into in (None, out):
            back, event, hook = buffer.low_latency_combine(
                rows, idx, weights, handle, out=into, return_recv_hook=with_hook, zero_copy=True
            )
            if with_hook:
                hook()
            assert torch.equal(back, sums(given, rank, world)) and (into is None or back is into)


def overlapped(group):
    """The calls of two batches overlap."""
    rank, world, buffer = group.rank(), group.size(), buffer_of(group)
    batches = [oracle.inputs(world, E, K, H, seed) for seed in (3, 4)]
    sent = [
        buffer.low_latency_dispatch(*given[rank][:2], M, E, use_fp8=False, return_recv_hook=True)
        for given in batches
    ]
    for given, (got, count, handle, _, hook) in zip(batches, sent, strict=True):
        hook()
        check_arrived(given, rank, world, got.float(), count, handle, True)
    back = [
        buffer.low_latency_combine(
            got * 2, given[rank][1], given[rank][2], handle, return_recv_hook=True
        )
        for given, (got, _, handle, _, _) in zip(batches, sent, strict=True)
    ]
    for given, (combined, _, hook) in zip(batches, back, strict=True):
        hook()
        assert torch.equal(combined, sums(given, rank, world))


def any_order(group):
    """A hook receives its own call, in any order of hooks, and with calls without hooks between."""
    rank, world, buffer = group.rank(), group.size(), buffer_of(group)
    batches = [oracle.inputs(world, E, K, H, seed) for seed in (7, 8)]
    # Rank 1 calls the hooks in the order of sending, the others in the opposite order.
    order = (0, 1) if rank == 1 else (1, 0)

    def check_sums(back):
        for given, (combined, _, _) in zip(batches, back, strict=True):
            assert torch.equal(combined, sums(given, rank, world))

    def dispatch(given, with_hook):
        x, idx, _ = given[rank]
        return buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False, return_recv_hook=with_hook)

    def combine(given, got, with_hook):
        rows, _, handle, _, _ = got
        _, idx, weights = given[rank]
        return buffer.low_latency_combine(
            rows * 2, idx, weights, handle, return_recv_hook=with_hook
        )

    for whole in (False, True):
        # `whole`: the second call has no hook.
        sent = [dispatch(given, not whole or i == 0) for i, given in enumerate(batches)]
        for i in (0,) if whole else order:
            sent[i][4]()
        for given, (rows, count, handle, _, _) in zip(batches, sent, strict=True):
            check_arrived(given, rank, world, rows.float(), count, handle, True)
        back = [
            combine(given, got, not whole or i == 0)
            for i, (given, got) in enumerate(zip(batches, sent, strict=True))
        ]
        for i in (0,) if whole else order:
            back[i][2]()
        check_sums(back)
    for hook, name in ((sent[0][4], "dispatch"), (back[0][2], "combine")):
        text = refused(hook, Error)
        assert text == f"deep_ep.Buffer.low_latency_{name}: its hook was called before"
    # A call uses the memory of the call before the previous one.
    if oracle.on_gpu:
        return
    sent = [dispatch(given, True) for given in batches]
    text = refused(lambda: dispatch(batches[0], True))
    assert "at most two calls" in text, text
    sent[1][4]()
    text = refused(lambda: dispatch(batches[0], True))
    assert "the older call received first" in text, text
    sent[0][4]()
    calls(group, True)


def overlaps_its_experts(group):
    """With `overlap` rows are read when the hook is called, as SGLang's engine does both."""
    rank, world, buffer, given, x, idx, weights = start(group, 9)
    of_signals = {"packed_recv_count": None, "comp_signal": idx.new_zeros(4), "block_m": 64}
    of_signals |= {"threshold": 3, "num_sms": 3, "return_recv_hook": True, "overlap": True}
    for apart in (False, True):
        got, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
        rows = torch.zeros(*got.shape[:2], 2 * H if apart else H, dtype=got.dtype)
        rows = rows.to(got.device)[..., :H]
        out = torch.full_like(x, torch.nan) if apart else None
        combined, event, hook = buffer.low_latency_combine(
            rows, idx, weights, handle, out=out, **of_signals
        )
        rows.copy_(got * 2)
        hook()
        assert torch.equal(combined, sums(given, rank, world)) and event.event is None
        assert out is None or combined is out
        assert "its hook was called before" in refused(hook, Error)
    given = {"x": rows, "topk_idx": idx, "topk_weights": weights, "handle": handle}
    text = refused(lambda: buffer.low_latency_combine(**given, overlap=True), Error)
    assert "low_latency_combine: " in text
    assert "overlap: want False without return_recv_hook" in text
    # In the call, not in the hook.
    *_, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
    given = {**given, "handle": handle, "overlap": True, "return_recv_hook": True}
    wanted = {
        "x": (rows[:, :-1], rows.float()),
        "topk_weights": (weights.new_zeros(len(idx) + 1, K), weights[:, :-1]),
        "out": (x.new_zeros(len(idx) + 1, H), x.float()),
    }
    for argument, wrongs in wanted.items():
        for wrong in wrongs:
            call = {**given, argument: wrong}
            text = refused(lambda call=call: buffer.low_latency_combine(**call))
            assert "low_latency_combine: " in text and f": {argument}: want [" in text, text
    # In the hook, by the names of the method.
    wide = {"topk_idx": idx.repeat(1, 2), "topk_weights": weights.repeat(1, 2)}
    _, _, hook = buffer.low_latency_combine(**{**given, **wide})
    name = f"deep_ep.Buffer.low_latency_combine: rank 0: topk_idx: want 1 to {K} experts"
    assert refused(hook).startswith(name)
    # What vLLM clears after a fault.
    memory = buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
    assert memory.zero_().shape == (0,) and memory.dtype == torch.int8
    sizes = (torch.Size([-1]), [-1, 0], 5, "x", (2**70,), (2**40, 2**40))
    for wanted, calls in (
        ("size: want ", [(torch.int8, size) for size in sizes]),
        ("size: want None in memory without elements", [(torch.float32, torch.Size([2, 3]))]),
        ("dtype: want a dtype of torch, got ", [("f32",), (None,)]),
        ("offset: want 0 in memory without elements",
         [(torch.int8, None, offset) for offset in (16, torch.zeros(2), "x")]),
    ):  # fmt: skip
        for call in calls:
            text = refused(lambda call=call: buffer.get_local_buffer_tensor(*call))
            assert text.startswith(f"deep_ep.Buffer.get_local_buffer_tensor: {wanted}"), text
            assert "size: want None" not in wanted or "[2, 3]" in text


def mistakes(group):
    rank, world, buffer, _, x, idx, weights = start(group)
    plain = deep_ep.Buffer(group)
    text = refused(lambda: plain.low_latency_dispatch(x, idx, M, E), Error)
    assert "low_latency_dispatch: the buffer was made without low_latency_mode" in text
    text = refused(
        lambda: buffer.low_latency_dispatch(x, idx, M, E, async_finish=True, return_recv_hook=True),
        Error,
    )
    assert "async_finish: want False with return_recv_hook" in text
    if oracle.on_gpu:
        return  # on a GPU a later call reports the following errors
    wrong = idx.clone()
    if rank == 1:
        wrong[0, :] = E + 7
    text = refused(lambda: buffer.low_latency_dispatch(x, wrong, M, E))
    assert f"rank 1: topk_idx: want -1 to {E}, got {E + 7} for token 0" in text
    got, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
    rows = got[:, :3] if rank == 1 else got
    text = refused(lambda: buffer.low_latency_combine(rows, idx, weights, handle))
    assert "low_latency_combine: rank 1: x: want" in text
    assert buffer.low_latency_combine(got, idx, weights, handle)[0].shape == x.shape
    got, _, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, M, E, use_fp8=False, return_recv_hook=True
    )
    if rank != 1:
        hook()
    text = refused(lambda: buffer.low_latency_combine(got, idx, weights, handle))
    assert "low_latency_combine: rank 1: handle: want a dispatch that was received" in text
    if rank == 1:
        hook()
    assert buffer.low_latency_combine(got, idx, weights, handle)[0].shape == x.shape


def strange_defaults(group):
    """Results do not depend on torch's default dtype and device."""
    rank, world, buffer, given, x, idx, weights = start(group)
    with oracle.strange_defaults():
        got, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        back, _, _ = buffer.low_latency_combine(rows.copy_(got * 2), idx, weights, handle)
        scaled = buffer.low_latency_dispatch(x, idx, M, E)[0]
    check_arrived(given, rank, world, got.float(), count, handle, True)
    assert scaled[1].dtype == torch.float32 and scaled[1].device.type == "cpu"
    assert torch.equal(back, sums(given, rank, world))


def shrunk(group):
    """A rank that does not call is masked, and combine leaves out the pairs of its experts."""
    rank, world = group.rank(), group.size()
    x, idx, weights = oracle.inputs(world, E, K, H, seed=2)[rank]
    with seconds(1):
        buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
        buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
    if rank == world - 1:
        return
    got, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
    assert status(buffer, world) == [0] * (world - 1) + [1]
    assert (handle[1][:, -1] & 0xFFFFFFFF == 0).all()
    back, _, _ = buffer.low_latency_combine(got * 2, idx, weights, handle)
    left = idx.masked_fill(idx >= E - E // world, -1)
    assert torch.equal(back, sums([(x, left, weights)] * world, rank, world))
    buffer.low_latency_clean_mask_buffer()
    assert status(buffer, world) == [0] * world
    buffer.low_latency_update_mask_buffer(world - 1, True)
    assert status(buffer, world) == [0] * (world - 1) + [1]


def asynchronous(group):
    """With async_finish the event tells when the results are complete."""
    rank, world, buffer, given, x, idx, weights = start(group, seed=6)
    got, count, handle, event, hook = buffer.low_latency_dispatch(
        x, idx, M, E, use_fp8=False, async_finish=True
    )
    assert hook is None and event.event is not None
    event.current_stream_wait()
    check_arrived(given, rank, world, got.float(), count, handle, True)
    back, event, hook = buffer.low_latency_combine(got * 2, idx, weights, handle, async_finish=True)
    assert hook is None and event.event is not None
    event.current_stream_wait()
    assert torch.equal(back, sums(given, rank, world))


def waited(group):
    """Nanoseconds of waiting for a rank that is 50 ms late are added to its statistics."""
    rank, world, buffer, _, x, idx, weights = start(group)
    late, most = world - 1, {"dispatch": 0, "combine": 0}
    for _ in range(5):  # a machine that suspends the others for a while makes their waits shorter
        for call in most:
            waits = torch.full((world,), 7)
            mine = {f"{call}_wait_recv_cost_stats": waits}
            dist.barrier(group)
            if call == "dispatch" and rank == late:
                time.sleep(0.05)
            options = mine if call == "dispatch" else {}
            got, _, handle, _, _ = buffer.low_latency_dispatch(
                x, idx, M, E, use_fp8=False, **options
            )
            dist.barrier(group)
            if call == "combine" and rank == late:
                time.sleep(0.05)
            options = mine if call == "combine" else {}
            buffer.low_latency_combine(got, idx, weights, handle, **options)
            assert (waits >= 7).all()
            most[call] = max(most[call], int(waits[late]) - 7)
    least = 30_000_000 if rank != late else 0
    assert min(most.values()) >= least, most
