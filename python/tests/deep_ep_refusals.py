"""What the ranks of test_deep_ep.py run where one of them makes a mistake."""

import contextlib
import time

import deep_ep_oracle as oracle
import torch
import torch.distributed as dist
from deep_ep_programs import E, H, K, buffer_of, dispatched, hybrid_buffer_of, refused
from winnow.compat import deep_ep
from winnow.errors import Error, InvalidArgument


def by_token(group):
    """One rank's mistake is an error on all, which names rank and argument; the next call works."""
    rank, world = group.rank(), group.size()
    fresh = deep_ep.Buffer(group)
    given = oracle.inputs(world, E, K, H)[rank]
    _, counts = dispatched(buffer_of(group), given)
    right = {"topk_idx": given[1], "topk_weights": given[2], **counts}
    wrongs = [
        ("x", [1, 2]), ("topk_idx", given[1].float()), ("topk_weights", given[2].double()),
        ("is_token_in_rank", None), ("num_tokens_per_rank", "a text"),
        ("num_tokens_per_rdma_rank", [1]), ("config", "a text"), ("handle", (1, 2, 3)),
        ("num_tokens_per_expert", counts["num_tokens_per_expert"].float()),
        ("expert_alignment", 0), ("num_worst_tokens", -1), ("async_finish", given[0]),
        # What is an error of Python or of torch where nobody looks at it first.
        ("x", (given[0].to(torch.float8_e4m3fn), [1.0])), ("topk_idx", given[1].to_sparse()),
        ("topk_weights", "a text"),
        ("is_token_in_rank", counts["is_token_in_rank"].repeat(1, 2)),
    ]  # fmt: skip
    for buffer in (fresh, buffer_of(group)):
        for name, wrong in wrongs:
            call = {"x": given[0], **right, **({name: wrong} if rank == world - 1 else {})}
            text = refused(lambda buffer=buffer, call=call: buffer.dispatch(**call))
            assert f"rank {world - 1}: {name}: want" in text, text
        x, _, _, _, handle, _ = buffer.dispatch(given[0], **right)
    out_of_range = given[1].clone()
    if rank == 1:
        out_of_range[0, 0] = 2**32
    call = {**right, "topk_idx": out_of_range}
    assert "rank 1" in refused(lambda: fresh.dispatch(given[0], **call))
    if oracle.on_gpu:
        return  # what follows is not counted: other ranks hear of it in a later call there
    rows = x[:, :8] if rank == 1 else x
    text = refused(lambda: buffer_of(group).combine(rows, handle))
    assert text.startswith("deep_ep.Buffer.combine: rank 1: x: want"), text
    mistaken = rank == world - 1
    for name, wrong in (("bias", "a text"), ("bias", (given[0], given[0][:, :1])),
                        ("async_finish", given[0]), ("config", "a text")):  # fmt: skip
        call = {name: wrong} if mistaken else {}
        text = refused(lambda call=call: buffer_of(group).combine(x, handle, **call))
        assert f"rank {world - 1}: {name}: want" in text, text
    again = "a text" if mistaken else given[0]
    text = refused(lambda: buffer_of(group).dispatch(again, handle=handle))
    assert f"rank {world - 1}: x: want" in text, text
    values = torch.zeros(1, 1, 1) if rank == 1 else torch.zeros(len(x), K)
    text = refused(lambda: buffer_of(group).combine(x, handle, topk_weights=values))
    assert "rank 1" in text
    assert buffer_of(group).combine(x, handle)[0].shape == given[0].shape


def by_expert(group):
    """The same of rows by expert; and of ElasticBuffer."""
    rank, world = group.rank(), group.size()
    mistaken = rank == world - 1
    x, idx, weights = oracle.inputs(world, E, K, H, seed=2)[rank]
    chosen, probs = deep_ep.indices_to_map(idx, weights, len(x), E)
    by_map = {"hidden": x, "routing_map": chosen, "probs": probs}
    by_index = {"hidden": x, "topk_idx": idx, "topk_weights": weights, "num_of_experts": E}
    by_token = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E}
    hybrid, elastic = hybrid_buffer_of(group), deep_ep.ElasticBuffer(group)
    rows, _, _, _, handle = hybrid.dispatch_with_permute(**by_map)
    arrived, _, _, elastic_handle, _ = elastic.dispatch(**by_token)
    permute, again = hybrid.dispatch_with_permute, {"hidden": x, "handle": handle}
    back = {"x": arrived, "handle": elastic_handle}
    counted = [
        (permute, by_map, "hidden", [1]),
        (permute, by_map, "routing_map", "a text"),
        (permute, by_map, "probs", probs.tolist()),
        (permute, by_map, "pad_multiple", "8"),
        (permute, by_index, "topk_idx", idx + E),
        (permute, by_index, "topk_weights", weights[:, :1]),
        (elastic.dispatch, by_token, "topk_weights", "a text"),
        (elastic.dispatch, by_token, "expert_alignment", -1),
        (elastic.dispatch, by_token, "cumulative_local_expert_recv_stats", torch.zeros(1)),
    ]
    # On a GPU other ranks hear of these in a later call.
    not_counted = [
        (permute, again, "probs", weights),
        (elastic.dispatch, {"x": x, "handle": elastic_handle}, "topk_weights", "a text"),
        (elastic.combine, back, "bias", "a text"),
    ]
    for call, right, name, wrong in counted + ([] if oracle.on_gpu else not_counted):
        given = {**right, name: wrong} if mistaken else right
        text = refused(lambda call=call, given=given: call(**given))
        assert f"rank {world - 1}: {name}: want" in text, text
    # More experts of one token than a layer has.
    many = torch.zeros(len(x), 40 * world, dtype=torch.bool)
    many[:1, : 33 if mistaken else 1] = True
    call = {"hidden": x, "routing_map": many}
    text = refused(lambda: hybrid.dispatch_with_permute(**call))
    assert f"rank {world - 1}: routing_map: want at most 32 experts a token" in text, text
    assert torch.equal(hybrid.dispatch_with_permute(**by_map)[0], rows)


def apart(group):
    """Ranks that call different layers, all of which there are, hear at once how they differ."""
    rank, world = group.rank(), group.size()
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    narrow, wide = ((*oracle.inputs(world, E, K, size)[rank],) for size in (H, 2 * H))
    handles = {}

    def dispatch(given):
        _, counts = dispatched(buffer, given)
        got = buffer.dispatch(given[0], topk_idx=given[1], topk_weights=given[2], **counts)
        handles[given is wide] = (got[0], got[4])

    def combine(given):
        buffer.combine(*handles[given is wide])

    def low_latency(given):
        buffer.low_latency_dispatch(given[0].bfloat16(), given[1], 64, E, use_fp8=False)

    def all_work():
        for given in (narrow, wide, narrow):
            for call in (dispatch, combine, low_latency):
                call(given)

    for call, other in (
        (dispatch, dispatch),
        (low_latency, low_latency),
        (dispatch, low_latency),
        (combine, dispatch),
        (combine, combine),
    ):
        all_work()
        mistaken = rank == world - 1
        begin = time.monotonic()
        kind = Error if call is other is combine else InvalidArgument
        text = refused(lambda: other(wide) if mistaken else call(narrow), kind)  # noqa: B023
        assert time.monotonic() - begin < 10, text
        assert " differs: " in text or "all ranks must make the same calls" in text, text
    all_work()


def of_two_buffers(group):
    """Ranks that combine in two buffers, each in another one: all hear both, and the next call of
    any buffer works."""
    rank, world = group.rank(), group.size()
    given = oracle.inputs(world, E, K, H)[rank]
    buffers = [deep_ep.Buffer(group) for _ in range(2)]
    for _ in range(2):
        arrived = [dispatched(buffer, given)[0] for buffer in buffers]
        at = int(rank == world - 1)
        begin = time.monotonic()
        text = refused(lambda: buffers[at].combine(arrived[at][0], arrived[at][4]))  # noqa: B023
        assert time.monotonic() - begin < 10
        first, second = (buffer._layers.number for buffer in buffers)
        assert f"deep_ep.Buffer.combine of buffer {first} (hidden {H}" in text, text
        assert f"deep_ep.Buffer.combine of buffer {second} (hidden {H}" in text, text
        for buffer in (buffers[0], buffers[1], deep_ep.Buffer(group)):
            got = dispatched(buffer, given)[0]
            assert buffer.combine(got[0], got[4])[0].shape == given[0].shape


def after_two_timeouts(group):
    """Each rank waits in a layer, or for an agreement, in which the others are not; one of them
    longer. Who waits longest is in time for the next call, in which all are again."""
    rank, world = group.rank(), group.size()
    given = oracle.inputs(world, E, K, H)[rank]
    buffer, hybrid = deep_ep.Buffer(group), deep_ep.HybridEPBuffer(group, H, 16, E // world)
    permute = {"hidden": given[0], "topk_idx": given[1], "topk_weights": given[2],
               "num_of_experts": E}  # fmt: skip
    dispatched(buffer, given)
    text = refused(
        lambda: dispatched(buffer, given) if rank else hybrid.dispatch_with_permute(**permute),
        Error,
    )
    assert "waited" in text or "did not come to this call, but to a later one" in text, text
    for _ in range(2):
        dispatched(buffer, given)
        hybrid.dispatch_with_permute(**permute)


def of_a_constructor(group):
    """A rank makes a buffer where the others call a method. Whoever begins, and so ends, first: all
    raise, and the next call works."""
    rank, world = group.rank(), group.size()
    given = oracle.inputs(world, E, K, H)[rank]
    buffers = [deep_ep.Buffer(group, low_latency_mode=True) for _ in range(2)]

    def low_latency(buffer):
        buffer.low_latency_dispatch(given[0].bfloat16(), given[1], 64, E, use_fp8=False)

    def dispatch(buffer):
        dispatched(buffer, given)

    # The others wait in a layer, or hear at once that a rank makes a buffer: a first call agrees.
    for call, first in (dispatch, False), (low_latency, False), (dispatch, True):
        for late in range(2):
            for buffer in buffers:
                dispatch(buffer), low_latency(buffer)
            called = deep_ep.Buffer(group) if first else buffers[1]
            dist.barrier(group)
            time.sleep(0.5 * ((rank == 0) == (late == 0)))
            if rank == 0:  # of which one is refused
                text = refused(lambda: deep_ep.Buffer(group, enable_shrink=late == 1), Error)  # noqa: B023
            else:
                text = refused(lambda: call(called), Error)  # noqa: B023
            assert not first or "deep_ep.Buffer on rank 0" in text or "enable_shrink" in text, text
            for right in dispatch, low_latency:
                for buffer in buffers:
                    right(buffer)


def of_a_call_left_out(group):
    """Rank 0 leaves out a call, so that of the others fails. A new buffer of all mends that; if it
    was the constructor of one that was left out, the second one does."""
    given = oracle.inputs(group.size(), E, K, H)[group.rank()]
    buffer = deep_ep.Buffer(group)
    for left_out in (lambda: deep_ep.Buffer(group), lambda: dispatched(buffer, given)):
        dispatched(buffer, given)
        if group.rank() > 0:
            refused(left_out, Error)
        new = None
        for _ in range(2):
            dist.barrier(group)
            with contextlib.suppress(Error):
                new = deep_ep.Buffer(group)
        for right in buffer, new:
            dispatched(right, given)


def of_no_values(group):
    """Arguments that do not fit the signature, and those of a buffer, are heard by all ranks."""
    rank, world = group.rank(), group.size()
    mistaken = rank == world - 1
    given = oracle.inputs(world, E, K, H)[rank]
    buffer = deep_ep.Buffer(group)
    _, _, pairs, in_rank, _ = buffer.get_dispatch_layout(given[1], E)
    right = {"x": given[0], "is_token_in_rank": in_rank, "num_tokens_per_expert": pairs}
    for _ in range(2):
        for wrong, named in ({"comp_signal": 1}, "comp_signal"), ({"x": None}, "arguments"):
            call = {**right, **(wrong if mistaken else {})}
            if mistaken and named == "arguments":
                del call["x"]
            kind = TypeError if mistaken else InvalidArgument
            text = refused(lambda call=call: buffer.dispatch(**call), kind)
            if not mistaken:
                assert f"deep_ep.Buffer.dispatch: rank {world - 1}: {named}: want" in text, text
        dispatched(buffer, given)
    # The layer carries `world` columns at a time: fewer calls, as many, and more. On a GPU a later
    # call says so.
    rows, _, _, _, handle, _ = buffer.dispatch(**right)
    for columns in () if oracle.on_gpu else (1, 2 * world, 3 * world):
        weights = torch.ones(len(rows), columns if mistaken else world + 1)
        text = refused(lambda weights=weights: buffer.combine(rows, handle, weights))
        differs = f"number of columns of topk_weights differs: {world + 1} on rank 0, {columns} on"
        assert f"Buffer.combine: {differs} rank {world - 1}" in text, text
        _, sums, _ = buffer.combine(rows, handle, torch.ones(len(rows), world + 1))
        assert sums.shape == (len(given[0]), world + 1)
    for make, name in (
        (lambda: deep_ep.Buffer(group, enable_shrink=mistaken), "enable_shrink"),
        (lambda: deep_ep.ElasticBuffer(group, hidden=-1 if mistaken else H), "hidden"),
    ):
        assert f"rank {world - 1}: {name}: want" in refused(make)
    for make in (
        deep_ep.Buffer,
        lambda group, **options: deep_ep.ElasticBuffer(group, hidden=H, **options),
        lambda group, **options: deep_ep.HybridEPBuffer(group, H, 16, E // world, **options),
    ):
        options = {"comp_signal": 1} if mistaken else {}
        kind = TypeError if mistaken else InvalidArgument
        text = refused(lambda make=make, options=options: make(group, **options), kind)
        assert mistaken or f"rank {world - 1}: comp_signal: want no argument" in text, text
    dispatched(deep_ep.Buffer(group), given)
