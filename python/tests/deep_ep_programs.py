"""Bodies of test_deep_ep.py, which every rank runs; each checks its own results."""

import contextlib
import itertools
import os
import time
from unittest import mock

import deep_ep_oracle as oracle
import torch
from winnow.compat import deep_ep
from winnow.errors import Error, InvalidArgument

H, K, E = 256, 3, 12

_buffers = {}


def buffer_of(group):
    if group not in _buffers:
        _buffers[group] = deep_ep.Buffer(group, explicitly_destroy=True)
    return _buffers[group]


def start(group, seed=0, topk=K):
    """(rank, number of ranks, the buffer, the inputs of all ranks)"""
    world = group.size()
    return group.rank(), world, buffer_of(group), oracle.inputs(world, E, topk, H, seed)


def elastic_buffer(group, topk=K):
    return deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=H, num_topk=topk)


@contextlib.contextmanager
def seconds(count, name="WINNOW_TIMEOUT_SECONDS"):
    """The timeout of waits and layers that begin inside this context."""
    before, os.environ[name] = os.environ[name], str(count)
    try:
        yield
    finally:
        os.environ[name] = before


def refused(call, kind=InvalidArgument):
    """The text of the error that the call must raise."""
    try:
        call()
    except kind as error:
        text = str(error)
        if ": want " in text:
            assert error.argument == text.partition(": want ")[0].rpartition(": ")[2], text
        return text
    raise AssertionError("it did not refuse")


def dispatched(buffer, given, experts=E, **options):
    x, idx, weights = given
    ranks, nodes, pairs, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
    counts = {
        "num_tokens_per_rank": ranks,
        "num_tokens_per_rdma_rank": nodes,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": pairs,
    }
    return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **counts, **options), counts


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def check_rows(got, sent, rows, padded=True):
    """Each row is that of its (source, token, ...), bit for bit, or zeros where there is none if
    what is there is `padded`; `sent`: the rows that every rank sends."""
    assert len(got) >= len(rows)
    for row, pair in enumerate(rows):
        if pair is None:
            assert not padded or not bits(got[row]).any(), row
        else:
            assert torch.equal(bits(got[row]), bits(sent[pair[0]][pair[1]])), (row, pair)


def tokens_of(given, dtype=torch.bfloat16):
    return [x.to(dtype) for x, _, _ in given]


def up_to(counts, alignment):
    return [-(-count // alignment) * alignment for count in counts]


def layouts(group):
    rank, world, buffer, given = start(group)
    idx = given[rank][1]
    for typed in (idx, idx.int()):
        ranks, nodes, pairs, in_rank, event = buffer.get_dispatch_layout(typed, E)
        want = oracle.layout(idx, E, world)
        assert nodes is None and event.event is None
        for got, expected in zip((ranks, pairs, in_rank), want, strict=True):
            assert torch.equal(got, expected) and got.dtype == expected.dtype


def by_experts(group, seed, alignment):
    rank, world, buffer, given = start(group, seed)
    rows, local = oracle.arrivals([idx for _, idx, _ in given], E, rank)
    (x, idx, weights, counts, handle, event), _ = dispatched(
        buffer, given[rank], expert_alignment=alignment
    )
    assert event.event is None
    assert x.shape == (len(rows), H) and x.dtype == torch.bfloat16
    check_rows(x, tokens_of(given), rows)
    assert idx.dtype == torch.int64 and torch.equal(idx, local)
    assert weights.dtype == torch.float32
    for row, (source, token) in enumerate(rows):
        want = given[source][2][token].masked_fill(local[row] < 0, 0)
        assert torch.equal(weights[row], want)
    true = [int((local == expert).sum()) for expert in range(E // world)]
    assert counts == up_to(true, alignment)
    # rank_prefix_matrix: the rows from ranks 0 to i.
    ends = [sum(source <= i for source, _ in rows) for i in range(world)]
    assert handle[0].shape == (world, world) and handle[0][:, rank].tolist() == ends
    assert torch.equal(handle[4], oracle.layout(given[rank][1], E, world)[2])

    # Combine adds the rows of all ranks in float32, and returns the weights, also added over ranks.
    bias = torch.full_like(given[rank][0], 0.5), torch.full_like(given[rank][0], 0.25)
    for add in (None, bias[0], bias):
        back, home, event = buffer.combine(x * (rank + 1), handle, topk_weights=weights, bias=add)
        want = torch.zeros(given[rank][0].shape, dtype=torch.float32)
        went = given[rank][2].masked_fill(given[rank][1] < 0, 0)
        for token, choice in enumerate(given[rank][1].tolist()):
            for at in oracle.ranks_of(choice, E, world):
                want[token] += (given[rank][0][token] * (at + 1)).float()
        want += 0 if add is None else 0.5 if add is bias[0] else 0.75
        assert torch.equal(back, want.bfloat16()), (back - want).abs().max()
        assert torch.equal(home, went) and event.event is None

    # A cached dispatch sends other values the same way.
    again, *nothing, event = buffer.dispatch(given[rank][0] * 2, handle=handle)
    assert nothing == [None] * 4 and torch.equal(again, x * 2)
    assert buffer.combine(again, handle)[1] is None


def by_ranks(group):
    """Without topk_idx, is_token_in_rank determines where tokens go."""
    rank, world, buffer, given = start(group, seed=3)
    rows, local = oracle.arrivals([idx for _, idx, _ in given], E, rank)
    _, counts = dispatched(buffer, given[rank])
    x, idx, weights, per_expert, handle, _ = buffer.dispatch(
        given[rank][0], expert_alignment=4, **counts
    )
    assert idx is None and weights is None
    check_rows(x, tokens_of(given), rows)
    assert len(x) == len(rows)
    want = [int((local == expert).sum()) for expert in range(E // world)]
    assert per_expert == up_to(want, 4)
    # Combine returns any weights, also with more columns than the routing has.
    values = torch.arange(len(rows) * 5, dtype=torch.float32).reshape(-1, 5)
    back, home, _ = buffer.combine(x, handle, topk_weights=values)
    assert back.shape == given[rank][0].shape and home.shape == (len(given[rank][0]), 5)
    again = buffer.dispatch(back, handle=handle)[0]
    assert again.shape == x.shape


def sms(group):
    """Buffer.set_num_sms() applies to all later calls, of existing layers too; 64 are the most."""
    rank, world, buffer, given = start(group)
    given, seen = given[rank], []

    class Counting:
        def __init__(self, layer):
            self.layer = layer

        def __getattr__(self, name):
            value = getattr(self.layer, name)
            if name not in ("dispatch", "combine"):
                return value
            return lambda *given, **named: seen.append(named["sm_count"]) or value(*given, **named)

    x, *_, handle, _ = dispatched(buffer, given)[0]
    handle.route.layer = Counting(handle.route.layer)
    before = deep_ep.Buffer.num_sms
    try:
        for number in (8, 64, 200):
            deep_ep.Buffer.set_num_sms(number)
            assert deep_ep.Buffer.get_dispatch_config(world).num_sms == number
            back = buffer.combine(x, handle)[0]
            assert torch.equal(buffer.dispatch(given[0], handle=handle)[0], x)
            assert back.shape == given[0].shape
    finally:
        deep_ep.Buffer.set_num_sms(before)
    assert seen == [8, 8, 64, 64, 64, 64]


def many_ranks(group):
    """Without topk_idx a token may go to at most _MOST_TOPK ranks."""
    from winnow.compat.deep_ep import buffer as module

    rank, world = group.rank(), group.size()
    x = torch.ones(4, H, dtype=torch.bfloat16)
    buffer = deep_ep.Buffer(group)
    two = torch.zeros(4, world, dtype=torch.bool)
    two[:, [rank, (rank + 1) % world]] = True
    three = two.clone()
    three[3] = rank == world - 1 or two[3]
    with mock.patch.object(module, "_MOST_TOPK", 2):
        for worst, in_rank in itertools.product((0, 4 * world), (two, three, two)):
            pairs = in_rank.sum(0).int()
            call = {"is_token_in_rank": in_rank, "num_tokens_per_expert": pairs}
            call["num_worst_tokens"] = worst
            if in_rank is three:
                text = refused(lambda call=call: buffer.dispatch(x, **call))
                want = f"at most 2 ranks a token, got {world}"
                assert f"rank {world - 1}: is_token_in_rank: want {want}" in text
                continue
            rows, _, _, _, handle, _ = buffer.dispatch(x, **call)
            assert len(rows) == (worst or 8)
            assert torch.equal(buffer.combine(rows, handle)[0], x * 2)


def another_map(group):
    """topk_idx overrides is_token_in_rank and the counts; the handle contains these as given."""
    rank, world, buffer, given = start(group, seed=7)
    (x, *_), counts = dispatched(buffer, given[rank])
    zeros = {name: torch.zeros_like(one) for name, one in counts.items() if one is not None}
    for typed in (given[rank][1], given[rank][1].int()):
        rows, *_, handle, _ = buffer.dispatch(given[rank][0], topk_idx=typed, **zeros)
        assert torch.equal(rows, x)
        assert not handle[4].any()


def float8(group):
    """Scales are float32 or packed int32 of any strides and number of columns."""
    rank, world, buffer, given = start(group, seed=1)
    rows, _ = oracle.arrivals([idx for _, idx, _ in given], E, rank)
    sent = tokens_of(given, torch.float8_e4m3fn)
    for dtype, columns in ((torch.float32, 2), (torch.int32, 1)):
        scales = scales_of(given, dtype, columns)
        mine = sent[rank], scales[rank].t().contiguous().t()
        (got, *_, handle, _), _ = dispatched(buffer, (mine, *given[rank][1:]))
        assert got[0].dtype == torch.float8_e4m3fn and got[1].dtype == dtype
        assert got[1].shape == (len(rows), columns)
        check_rows(got[0], sent, rows)
        check_rows(got[1], scales, rows)
        back, _, _ = buffer.combine(got[0].to(torch.bfloat16), handle)
        assert back.dtype == torch.bfloat16
        cached = buffer.dispatch(mine, handle=handle)[0]
        assert torch.equal(bits(cached[0]), bits(got[0]))


def worst_case(group):
    rank, world, buffer, given = start(group, seed=2)
    (x, idx, weights, counts, *_), _ = dispatched(buffer, given[rank])
    worst = 12 * world
    (wide, wide_idx, wide_weights, none, handle, _), _ = dispatched(
        buffer, given[rank], num_worst_tokens=worst
    )
    assert none == [] and len(wide) == len(wide_idx) == len(wide_weights) == worst
    assert torch.equal(wide[: len(x)], x) and torch.equal(wide_idx[: len(x)], idx)
    assert torch.equal(wide_weights[: len(x)], weights)
    assert (wide_idx[len(x) :] == -1).all() and (wide_weights[len(x) :] == 0).all()
    back, home, _ = buffer.combine(wide, handle, topk_weights=wide_weights)
    assert back.shape == given[rank][0].shape and home.shape == given[rank][2].shape
    assert buffer.dispatch(back, handle=handle)[0].shape == (worst, H)


def events(group):
    rank, _, buffer, given = start(group)
    given, before = given[rank], buffer.capture()
    options = {"previous_event": before, "async_finish": True, "allocate_on_comm_stream": True}
    layout = buffer.get_dispatch_layout(given[1], E, **options)
    assert layout[-1].event is not None
    (x, _, _, _, handle, event), _ = dispatched(buffer, given, **options)
    with event:
        pass
    back, _, event = buffer.combine(x, handle, async_finish=True)
    event.current_stream_wait()
    text = refused(lambda: dispatched(buffer, given, allocate_on_comm_stream=True))
    assert "rank 0: allocate_on_comm_stream: want False without" in text
    assert dispatched(buffer, given)[0][0].shape == x.shape


def strange_defaults(group):
    """Results do not depend on torch's defaults, nor on the strides of dimensions of size 1."""
    rank, world, buffer, given = start(group, topk=1)
    x, idx, weights = given[rank]
    odd = weights.as_strided(weights.shape, (1, 7))
    hybrid, elastic = hybrid_buffer_of(group), elastic_buffer(group, topk=1)
    single = torch.ones(1, H, dtype=torch.bfloat16, device="cpu").as_strided((1, H), (3, 1))
    one = torch.zeros(1, 1, dtype=torch.int64, device="cpu").as_strided((1, 1), (5, 9))
    with oracle.strange_defaults():
        (got, local, sent, _, handle, _), _ = dispatched(buffer, (x, idx, odd))
        back, home, _ = buffer.combine(got, handle, topk_weights=sent)
        buffer.dispatch(x, handle=handle)
        chosen, probs = deep_ep.indices_to_map(idx, odd, len(x), E)
        rows, with_rows, _, counts, permuted = hybrid.dispatch_with_permute(
            hidden=x, routing_map=chosen, probs=probs
        )
        sums, dense = hybrid.combine_with_unpermute(hidden=rows, probs=with_rows, handle=permuted)
        arrived, ids, factors, made, _ = elastic.dispatch(
            x, topk_idx=idx, topk_weights=odd, num_experts=E
        )
        again, came, _ = elastic.combine(arrived, made, topk_weights=factors)
        (alone, *_, lonely, _), _ = dispatched(buffer, (single, one, odd.new_ones(1, 1)))
        assert buffer.combine(alone, lonely)[0].shape == (1, H)
    assert {sent.dtype, home.dtype, with_rows.dtype, dense.dtype, factors.dtype, came.dtype} == {
        torch.float32
    }
    results = (home, got, local, back, rows, counts, sums, dense, arrived, ids, again, came)
    assert {tensor.device.type for tensor in results} == {"cpu"}
    for values in (home, came):
        assert torch.equal(values, weights.masked_fill(idx < 0, 0))
    assert torch.equal(dense, probs) and torch.equal(sums, again)


def more_tokens(group):
    """If a layer is too small, all ranks make a larger one; older handles still work."""
    rank, world = group.rank(), group.size()
    buffer = deep_ep.Buffer(group, explicitly_destroy=True)
    small = oracle.inputs(world, E, K, H)[rank]
    (x, *_, handle, _), _ = dispatched(buffer, small)
    tokens = 100 if rank == world - 1 else 3
    large = (torch.ones(tokens, H).bfloat16(), torch.zeros(tokens, K).long(), torch.ones(tokens, K))
    large[1][:] = torch.arange(K)
    (much, *_, second, _), _ = dispatched(buffer, large)
    assert len(much) == (97 + 3 * world if rank == 0 else 0) or world > 2
    back, _, _ = buffer.combine(x, handle)
    assert back.shape == small[0].shape
    assert buffer.combine(much, second)[0].shape == large[0].shape
    buffer.destroy()
    assert "destroyed" in refused(lambda: dispatched(buffer, small), Error)


def hybrid(group, pad):
    """Rows by expert, with a dense map; probabilities are dispatched and returned."""
    rank, world = group.rank(), group.size()
    buffer = hybrid_buffer_of(group)
    given = oracle.inputs(world, E, K, H, seed=4)
    x, idx, weights = given[rank]
    rows, counts = oracle.permuted([idx for _, idx, _ in given], E, rank, pad or 1)
    chosen, probs = deep_ep.indices_to_map(idx, weights, len(x), E)
    assert chosen.sum() == (idx >= 0).sum() and probs.dtype == torch.float32
    options = {"routing_map": chosen, "probs": probs, "pad_multiple": pad}
    got, sent, scales, padded, handle = buffer.dispatch_with_permute(hidden=x, **options)
    assert scales is None and got.shape == (len(rows), H) and len(sent) == len(rows)
    assert padded.dtype == torch.int64
    assert padded.tolist() == up_to(counts, pad or 1)
    check_rows(got, tokens_of(given), rows)
    for row, pair in enumerate(rows):
        assert sent[row] == (0 if pair is None else given[pair[0]][2][pair[1:]])
    back, home = buffer.combine_with_unpermute(hidden=got, probs=sent, handle=handle)
    want = x.float() * (idx >= 0).sum(1, keepdim=True)  # small numbers of 8 bits each: exact
    assert torch.equal(back, want.bfloat16()) and torch.equal(home, probs)
    again = buffer.dispatch_with_permute(hidden=x * 2, handle=handle, pad_multiple=pad)
    assert torch.equal(again[0], got * 2) and again[1] is None
    # Megatron-core passes the sum of the counts as a tensor.
    again = buffer.dispatch_with_permute(
        hidden=x, handle=handle, pad_multiple=pad, num_permuted_tokens=padded.sum()
    )
    assert torch.equal(again[0], got)
    again = buffer.dispatch_with_permute(hidden=x, probs=probs, handle=handle)
    assert torch.equal(again[1], sent)
    assert buffer.combine_with_unpermute(hidden=got, handle=handle)[1] is None
    if not oracle.on_gpu:
        again = {"hidden": x, "handle": handle, "pad_multiple": 16}
        text = refused(lambda: buffer.dispatch_with_permute(**again))
        assert f"pad_multiple: want {pad or 1} as in the handle, got 16" in text
    # With a fixed number of rows the call does not wait; here it gets indices instead of a map.
    worst = 16 * K * world * 4
    by_index = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": E}
    wide, wide_sent, _, wide_padded, handle = buffer.dispatch_with_permute(
        hidden=x, **by_index, pad_multiple=pad, num_permuted_tokens=worst, non_blocking=True
    )
    assert len(wide) == worst and torch.equal(wide[: len(got)], got)
    assert not wide[len(got) :].any() and torch.equal(wide_padded, padded)
    back, home = buffer.combine_with_unpermute(hidden=wide, probs=wide_sent, handle=handle)
    assert torch.equal(back, want.bfloat16()) and torch.equal(home, probs)


def hybrid_grows(group):
    """If one rank has more experts per token than before, all ranks make a larger layer."""
    rank, world = group.rank(), group.size()
    buffer = hybrid_buffer_of(group)
    x = torch.ones(3, H)
    for experts in (1, 5, E, 2):
        chosen = torch.zeros(3, E, dtype=torch.bool)
        chosen[:, : experts if rank == world - 1 else 1] = True
        got, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen)
        back, _ = buffer.combine_with_unpermute(hidden=got, handle=handle)
        assert torch.equal(back, x * chosen.sum(1, keepdim=True))
    wrong = chosen.int() if rank == 0 else chosen
    text = refused(lambda: buffer.dispatch_with_permute(hidden=x, routing_map=wrong))
    assert "rank 0: routing_map: want [3, E], bool" in text
    assert len(buffer.dispatch_with_permute(hidden=x, routing_map=chosen)[0]) == len(got)


def hybrid_buffer_of(group):
    key = ("hybrid", group)
    if key not in _buffers:
        _buffers[key] = deep_ep.HybridEPBuffer(group, H, 16, E // group.size())
    return _buffers[key]


def elastic(group, expand, waits):
    """ElasticBuffer: rows by token or by expert, counted or for the worst case."""
    rank, world = group.rank(), group.size()
    given = oracle.inputs(world, E, K, H, seed=5)
    x, idx, weights = given[rank]
    all_idx = [table for _, table, _ in given]
    tokens, local = oracle.arrivals(all_idx, E, rank)
    pairs, counts = oracle.permuted(all_idx, E, rank, 8)
    rows = pairs if expand else tokens
    buffer = elastic_buffer(group)
    stats = torch.ones(E // world, dtype=torch.int32)
    options = {"num_experts": E, "expert_alignment": 8, "do_expand": expand, "do_cpu_sync": waits}
    got, ids, sent, handle, event = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, cumulative_local_expert_recv_stats=stats, **options
    )
    assert event.event is None and stats.tolist() == [count + 1 for count in counts]
    worst = 16 * world * min(K, E // world) + E // world * 7 if expand else 16 * world
    assert len(got) == (len(rows) if waits else worst) == len(sent)
    check_rows(got, tokens_of(given), rows)
    for row, pair in enumerate(rows if expand else []):
        assert pair is None or sent[row] == given[pair[0]][2][pair[1:]]
    aligned = up_to(counts, 8)
    ends = torch.tensor(aligned).cumsum(0)
    if expand:
        assert ids is None and not got[len(rows) :].any()
        ends += torch.tensor(counts) - torch.tensor(aligned)
    else:
        assert torch.equal(ids[: len(rows)], local) and (ids[len(rows) :] == -1).all()
    sums = [sum(source <= i for source, _ in tokens) for i in range(world)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sums
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends.tolist()
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.num_recv_tokens_per_expert_list == (aligned if waits else [])
    assert handle.num_recv_tokens == (len(tokens) if waits else worst)
    assert torch.equal(handle.topk_idx, idx) and handle.num_sms > 0
    back, home, _ = buffer.combine(got, handle, topk_weights=sent)
    times = (idx >= 0).sum(1) if expand else oracle.layout(idx, E, world)[2].sum(1)
    assert torch.equal(back, (x.float() * times[:, None]).bfloat16())
    assert torch.equal(home, weights.masked_fill(idx < 0, 0))
    again, none, _, same, _ = buffer.dispatch(
        x, handle=handle, num_sms=handle.num_sms, do_expand=expand
    )
    assert none is None and same is handle and torch.equal(again[: len(rows)], got[: len(rows)])
    if waits or not oracle.on_gpu:
        wrong = idx.float() if rank == world - 1 else idx
        text = refused(lambda: buffer.dispatch(x, topk_idx=wrong, **options))
        assert f"rank {world - 1}: topk_idx: want [n, K], int64 or int32" in text
    assert "only dispatch and combine" in refused(lambda: buffer.engram_write, Error)


def scales_of(given, kind, columns):
    """The scales of every rank's tokens, float32 or int32 [n, columns], all with different bits."""
    made = []
    for source, (x, *_) in enumerate(given):
        values = torch.arange(len(x) * columns, dtype=torch.int32) + (source + 1) * 2**20
        made.append(values.reshape(-1, columns).view(kind))
    return made


def elastic_scales(group, expand):
    """(x, scales) arrive together, with scales by row or by column, counted, not, and cached."""
    rank, world = group.rank(), group.size()
    given = oracle.inputs(world, E, K, H, seed=8)
    all_idx = [table for _, table, _ in given]
    pairs = oracle.permuted(all_idx, E, rank, 4)[0]
    rows = pairs if expand else oracle.arrivals(all_idx, E, rank)[0]
    x, idx, weights = given[rank]
    buffer = elastic_buffer(group)
    options = {"num_experts": E, "topk_weights": weights, "do_expand": expand}
    tokens = tokens_of(given, torch.float8_e4m3fn)
    for kind, columns in ((torch.float32, H // 128), (torch.int32, 1)):
        scales = scales_of(given, kind, columns)
        mine = scales[rank].t().contiguous().t() if columns > 1 else scales[rank]
        sent = tokens[rank], mine
        for waits, by_column in ((True, False), (True, True), (False, True)):
            got, _, _, handle, _ = buffer.dispatch(
                sent, topk_idx=idx, expert_alignment=4, do_cpu_sync=waits,
                use_tma_aligned_col_major_sf=by_column, **options,
            )  # fmt: skip
            again = buffer.dispatch(
                sent, handle=handle, do_expand=expand, use_tma_aligned_col_major_sf=by_column
            )[0]
            for values, factors in (got, again):
                assert values.dtype == torch.float8_e4m3fn and factors.dtype == kind
                assert factors.shape == (len(values), columns)
                assert len(values) == len(rows) or not waits
                if by_column and factors.numel() > columns > 1:
                    assert factors.stride() == (1, len(factors))
                check_rows(values, tokens, rows)
                check_rows(factors, scales, rows, padded=False)
            back = buffer.combine(got[0].bfloat16(), handle)[0]
            assert back.shape == x.shape and back.dtype == torch.bfloat16
    wrong = (sent[0], [1.0]) if rank == world - 1 else sent
    text = refused(lambda: buffer.dispatch(wrong, topk_idx=idx, **options))
    assert f"rank {world - 1}: x: want scales" in text


def hybrid_scales(group, pad):
    """The scaling_factor of a row arrives with it, also if the host does not wait."""
    rank, world, buffer = group.rank(), group.size(), hybrid_buffer_of(group)
    given = oracle.inputs(world, E, K, H, seed=9)
    x, idx, weights = given[rank]
    rows = oracle.permuted([table for _, table, _ in given], E, rank, pad or 1)[0]
    chosen, probs = deep_ep.indices_to_map(idx, weights, len(x), E)
    tokens = tokens_of(given, torch.float8_e4m3fn)
    sent = {"hidden": tokens[rank], "routing_map": chosen, "probs": probs}
    for kind, columns in ((torch.float32, H // 128), (torch.int32, 1)):
        scales = scales_of(given, kind, columns)
        for most in (None, 16 * K * world * 4):
            got, _, factors, _, handle = buffer.dispatch_with_permute(
                **sent, scaling_factor=scales[rank], pad_multiple=pad, num_permuted_tokens=most
            )
            again, _, same, _, _ = buffer.dispatch_with_permute(
                hidden=sent["hidden"], scaling_factor=scales[rank], handle=handle
            )
            assert got.dtype == torch.float8_e4m3fn and len(got) == (most or len(rows))
            assert factors.dtype == kind and factors.shape == (len(got), columns)
            check_rows(got, tokens, rows)
            check_rows(again, tokens, rows, padded=False)
            for values in (factors, same):
                check_rows(values, scales, rows, padded=False)
            back, _ = buffer.combine_with_unpermute(hidden=got.bfloat16(), handle=handle)
            assert back.shape == x.shape and back.dtype == torch.bfloat16
    wrong = [1.0] if rank == world - 1 else scales[rank]
    text = refused(lambda: buffer.dispatch_with_permute(**sent, scaling_factor=wrong))
    assert f"rank {world - 1}: scaling_factor: want scales" in text


def elastic_streams(group):
    """allocate_on_comm_stream needs no previous_event here. A cached dispatch may repeat options
    of its handle, but not change them."""
    rank, world = group.rank(), group.size()
    x, idx, weights = oracle.inputs(world, E, K, H)[rank]
    buffer = elastic_buffer(group)
    options = {"async_with_compute_stream": True, "allocate_on_comm_stream": True}
    # More tokens than a rank has, as a power of two.
    most = {"num_max_tokens_per_rank": 32, "do_cpu_sync": False}
    got, _, sent, handle, event = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=E, **most, **options
    )
    event.current_stream_wait()
    assert len(got) == 32 * world and handle.num_max_tokens_per_rank == 32
    back, _, event = buffer.combine(got, handle=handle, num_sms=0, **options)
    event.current_stream_wait()
    assert back.shape == x.shape
    # The call itself returns these tensors: work after it would run on the stream that does not
    # wait for it.
    run, made = buffer._stream.run, []
    buffer._stream.run = lambda *arguments: made.append(run(*arguments)) or made[-1]
    sent = (x.to(torch.float8_e4m3fn), torch.ones(len(x), 2))
    (rows, factors), *_, wide, event = buffer.dispatch(
        sent, topk_idx=idx, num_experts=E, do_expand=True, use_tma_aligned_col_major_sf=True,
        **most, **options,
    )  # fmt: skip
    event.current_stream_wait()
    assert made[0][0][0][0] is rows and made[0][0][0][1] is factors
    buffer._stream.run = run
    again = {"handle": handle, "num_experts": E, "num_max_tokens_per_rank": 32}
    assert buffer.dispatch(x, **again)[0].shape == got.shape
    text = refused(lambda: buffer.dispatch(x, **{**again, "num_experts": 2 * E}))
    assert f"num_experts: want {E} as in the handle, got {2 * E}" in text
    text = refused(lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True))
    assert "do_cpu_sync: want False or None beside a handle" in text
    text = refused(lambda: buffer.dispatch(x, handle=handle, do_expand=True))
    assert "do_expand: want False as in the handle, got True" in text
    counters = torch.zeros(E // world, dtype=torch.int32)
    for stats in (counters, "a text"):
        text = refused(
            lambda stats=stats: buffer.dispatch(
                x, handle=handle, cumulative_local_expert_recv_stats=stats
            )
        )
        assert "cumulative_local_expert_recv_stats: want none beside a handle" in text
    assert not counters.any()


def elastic_epilogue(group):
    """Inputs are not read before previous_event_before_epilogue."""
    rank, world = group.rank(), group.size()
    x, idx, weights = oracle.inputs(world, E, K, H)[rank]
    buffer = elastic_buffer(group)
    late, bias = torch.zeros_like(x), torch.zeros_like(x)

    class Ready(deep_ep.EventHandle):
        def __init__(self, tensor, values):
            super().__init__()
            self.tensor, self.values = tensor, values

        def current_stream_wait(self):
            self.tensor.copy_(self.values)

    arguments = {"topk_idx": idx, "topk_weights": weights, "num_experts": E}
    rows, _, _, handle, _ = buffer.dispatch(
        late, previous_event_before_epilogue=Ready(late, x), **arguments
    )
    assert torch.equal(rows, buffer.dispatch(x, handle=handle)[0])
    late.zero_()
    event = deep_ep.EventOverlap(Ready(late, x))
    again = buffer.dispatch(late, handle=handle, previous_event_before_epilogue=event)[0]
    assert torch.equal(again, rows)
    event = Ready(bias, torch.ones_like(x))
    for previous in (None, buffer.capture()):
        bias.zero_()
        sums, _, _ = buffer.combine(
            rows, handle, bias=bias, previous_event=previous, previous_event_before_epilogue=event
        )
        want = buffer.combine(rows, handle, bias=torch.ones_like(x))[0]
        assert torch.equal(sums, want)


def late(group):
    """The error at the deadline names the missing rank, and the next call works."""
    rank = group.rank()
    with seconds(0.5):
        if rank == 1:
            time.sleep(1.5)
        text = refused(lambda: deep_ep.Buffer(group), Error)
        assert "rank 0 waited 0.5 s for ranks 1, which did not come" in text
    given = oracle.inputs(group.size(), E, K, H)[rank]
    assert len(dispatched(deep_ep.Buffer(group), given)[0]) == 6


def nodes(group):
    """Ranks of two nodes: counts of nodes, and a handle of ten elements."""
    from winnow.compat.deep_ep import _layers

    rank, world = group.rank(), group.size()
    given = oracle.inputs(world, E, K, H, seed=6)
    rows, _ = oracle.arrivals([idx for _, idx, _ in given], E, rank)
    with mock.patch.object(_layers, "ranks_per_node", 2):
        buffer = deep_ep.Buffer(group)
        (x, _, weights, _, handle, _), counts = dispatched(buffer, given[rank])
        by_node = counts["is_token_in_rank"].reshape(-1, world // 2, 2).any(2).sum(0)
        assert counts["num_tokens_per_rdma_rank"].tolist() == by_node.tolist()
        check_rows(x, tokens_of(given), rows)
        sums = [sum(source <= i for source, _ in rows) for i in range(world)]
        assert len(handle) == 10 and handle[-4].tolist() == sums
        back, home, _ = buffer.combine(x, handle, topk_weights=weights)
        want = given[rank][2].masked_fill(given[rank][1] < 0, 0)
        assert back.shape == given[rank][0].shape and torch.equal(home, want)
