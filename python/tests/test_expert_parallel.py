"""The all-to-all between threads: rows, sums, options, refusals, memory."""

import gc
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import expert_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks, run_all, run_each

import winnow
from winnow import expert_parallel as ep

SMALL = {"max_tokens": 8, "hidden": 16, "topk": 3, "experts": 8, "dtype": "float32"}


def _payload(rank, tokens, hidden=16):
    """Values that say where they come from."""
    row = 1000 * rank + np.arange(tokens)[:, None]
    return (row + np.arange(hidden)[None, :] / 64).astype(np.float32)


def _routing(rng, tokens, topk=3, experts=8, dropped=0.2):
    indices = rng.integers(0, experts, (tokens, topk), dtype=np.int32)
    nothing = rng.choice(np.array([-1, experts], np.int32), indices.shape)
    return np.where(rng.random(indices.shape) < dropped, nothing, indices).astype(np.int32)


def _problem(seed=0, tokens=(5, 0, 8, 3)):
    rng = np.random.default_rng(seed)
    return (
        [_payload(rank, n) for rank, n in enumerate(tokens)],
        [_routing(rng, n) for n in tokens],
        [rng.random((n, 3)).astype(np.float32) for n in tokens],
    )


def _check_rows(got, rows, inputs, weights=None):
    assert got.output.shape == (len(rows), inputs[0].shape[1])
    for row, pair in enumerate(rows):
        want = 0 if pair is None else inputs[pair[0]][pair[1]]
        np.testing.assert_array_equal(got.output[row], np.broadcast_to(want, got.output[row].shape))
        if weights is not None:
            assert got.weights[row] == (0 if pair is None else weights[pair[0]][pair[1], pair[2]])


@pytest.mark.parametrize("local", [4, 2, 1])
@pytest.mark.parametrize("alignment", [1, 4])
def test_expert_major_rows_come_in_the_documented_order(local, alignment):
    inputs, indices, weights = _problem()
    rows, counts, offsets = oracle.expert_rows(indices, 8, 4, alignment)

    def body(layer, rank):
        got = layer.dispatch(
            inputs[rank], indices[rank], weights=weights[rank], expert_alignment=alignment
        )
        _check_rows(got, rows[rank], inputs, weights)
        described = got.descriptor
        assert described.rows == described.wanted_rows == len(rows[rank])
        assert described.expert_counts.tolist() == counts[rank]
        assert described.expert_offsets.tolist() == offsets[rank]
        assert described.num_dispatch_token_cur_rank == len(inputs[rank])
        assert described.num_input_tokens_per_rank.tolist() == [5, 0, 8, 3]
        assert described.order == "expert_major" and described.has_weights
        assert described.expert_alignment == alignment and described.worst_case_rows == 0
        assert got.expert_ids is None and got.scales is None
        _check_tables(described, rows, indices, rank, local)

    with Ranks(4, **SMALL, local_world_size=local) as ranks:
        ranks.run(body)


def _check_tables(described, rows, indices, rank, local):
    nodes = 4 // local
    row_of = {pair: row for mine in rows for row, pair in enumerate(mine) if pair is not None}
    for node in range(nodes):
        source = node * local + rank % local
        n = len(indices[source])
        np.testing.assert_array_equal(described.topk_indices[node, :n], indices[source])
        assert (described.topk_indices[node, n:] == -1).all()
        for (token, k), row in np.ndenumerate(described.token_dst_scatter_idx[node]):
            expert = indices[source][token, k] if token < n else -1
            here = 0 <= expert < 8 and expert // 2 // local == rank // local
            assert row == (row_of[source, token, k] if here else -1)
        if nodes == 1:
            continue
        lives_here = (0 <= indices[source]) & (indices[source] // 2 // local == rank // local)
        wanted = np.flatnonzero(lives_here.any(1)).tolist()
        first, last = described.send_reqs_recv[node]
        assert ((first < 0) == (last < 0)).all()
        sent = [token for a, b in zip(first, last, strict=True) for token in range(a, b)]
        assert wanted == sent
    assert (described.send_reqs_recv is None) == (nodes == 1)
    mine = rows[rank]
    firsts = {}
    for row, pair in enumerate(mine):
        if pair is not None:
            here = [r for r, other in enumerate(mine) if other and other[:2] == pair[:2]]
            firsts[row] = min(here, key=lambda r: mine[r][2])
    for row, first in enumerate(described.skipped_token_mapping_indices):
        assert first == firsts.get(row, -1)
    for row, copies in enumerate(described.skipped_token_topk_mapping_indices):
        want = [-1, -1, -1]
        if firsts.get(row) == row:
            for other, pair in enumerate(mine):
                if pair is not None and pair[:2] == mine[row][:2]:
                    want[pair[2]] = other
        assert copies.tolist() == want


def test_token_major_rows_carry_each_token_once():
    inputs, indices, weights = _problem(seed=1)
    rows = oracle.token_rows(indices, 8, 4)
    sums = oracle.combine(indices, 8, 4, 2, lambda rank, token, k: inputs[rank][token], hidden=16)

    def body(layer, rank):
        got = layer.dispatch(
            inputs[rank], indices[rank], weights=weights[rank], order="token_major"
        )
        assert got.output.shape[0] == len(rows[rank]) and got.descriptor.order == "token_major"
        for row, (source, token, here) in enumerate(rows[rank]):
            np.testing.assert_array_equal(got.output[row], inputs[source][token])
            assert got.expert_ids[row].tolist() == here
            kept = np.where(np.array(here) >= 0, weights[source][token], 0)
            np.testing.assert_array_equal(got.weights[row], kept)
        # Each rank gives the sum over its experts.
        pairs = (got.expert_ids >= 0).sum(1, keepdims=True).astype(np.float32)
        out = layer.combine(got.output * pairs, got.descriptor)
        np.testing.assert_allclose(out, sums[rank], rtol=1e-6)

    with Ranks(4, **SMALL, local_world_size=2) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("local", [4, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("local_combine", [False, True])
def test_combine_rounds_where_the_contract_says(local, dtype, local_combine):
    """Bitwise, with outputs that differ between a token's experts."""
    rng = np.random.default_rng(5)
    _, indices, weights = _problem(seed=2)
    make = oracle.ROUND[dtype]
    expert_row = {
        pair[:3]: make(rng.standard_normal(16).astype(np.float32) * 10.0 ** rng.integers(-2, 3))
        for pair in oracle.kept(indices, 8)
    }
    bias = [make(rng.standard_normal((len(table), 16)).astype(np.float32)) for table in indices]
    rows = oracle.expert_rows(indices, 8, 4)[0]
    typed = getattr(torch, dtype)

    def want(**options):
        return oracle.combine(
            indices, 8, 4, local, lambda *pair: expert_row[pair], dtype,
            hidden=16, local_combine=local_combine, **options,
        )  # fmt: skip

    plain, weighted = want(), want(weights=weights, bias=bias)

    def body(layer, rank):
        tokens = torch.zeros(len(indices[rank]), 16, dtype=typed)
        routing = torch.from_numpy(indices[rank])
        got = layer.dispatch(tokens, routing, weights=torch.from_numpy(weights[rank]))
        outputs = [expert_row[pair] for pair in rows[rank]] or np.zeros((0, 16), np.float32)
        outputs = torch.from_numpy(np.array(outputs, np.float32)).to(typed)
        out = layer.combine(outputs, got.descriptor)
        assert out.dtype == typed and type(out) is torch.Tensor
        np.testing.assert_array_equal(out.float().numpy(), plain[rank])
        buffer = layer.combine_buffer(got.descriptor)
        buffer.copy_(outputs)
        given = torch.full_like(tokens, 7)
        back = layer.combine(
            buffer, got.descriptor, weighted=True, out=given,
            bias=torch.from_numpy(bias[rank]).to(typed),
        )  # fmt: skip
        assert back is given
        np.testing.assert_array_equal(given.float().numpy(), weighted[rank])

    config = {**SMALL, "dtype": typed, "local_world_size": local}
    with Ranks(4, **config, enable_local_combine=local_combine) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("whole", [True, False])
def test_scatter_indices_place_the_rows(whole):
    inputs, indices, weights = _problem(seed=3)
    rng = np.random.default_rng(9)
    table, rows = oracle.scatter_table(indices, 8, 4, lambda pairs: rng.permutation(pairs).tolist())
    ends = np.cumsum([0, 5, 0, 8, 3])

    def body(layer, rank):
        mine = table if whole else table[ends[rank] : ends[rank + 1]]
        got = layer.dispatch(
            inputs[rank], indices[rank], weights=weights[rank], scatter_indices=mine
        )
        _check_rows(got, [tuple(pair) for pair in rows[rank]], inputs, weights)

    with Ranks(4, **SMALL, local_world_size=2) as ranks:
        ranks.run(body)


def test_float8_tokens_travel_with_their_scales():
    _, indices, _ = _problem(seed=4)
    rows = oracle.expert_rows(indices, 8, 4)[0]
    rng = np.random.default_rng(0)
    bytes_of = [rng.integers(0, 120, (len(t), 144)).astype(np.uint8) for t in indices]
    scales = [rng.random((len(t), 2)).astype(np.float32) for t in indices]

    def body(layer, rank):
        got = layer.dispatch(
            torch.from_numpy(bytes_of[rank]).view(torch.float8_e4m3fn),
            torch.from_numpy(indices[rank]),
            scales=torch.from_numpy(scales[rank]),
        )
        assert got.output.dtype == torch.float8_e4m3fn
        for row, (source, token, _) in enumerate(rows[rank]):
            octets = got.output[row].view(torch.uint8).numpy()
            np.testing.assert_array_equal(octets, bytes_of[source][token])
            np.testing.assert_array_equal(got.scales[row].numpy(), scales[source][token])

    config = {**SMALL, "hidden": 144, "dtype": "bfloat16"}
    with Ranks(4, **config, local_world_size=2) as ranks:
        ranks.run(body)


def test_a_cached_dispatch_repeats_the_routing():
    inputs, indices, weights = _problem()
    rows = oracle.expert_rows(indices, 8, 4)[0]

    def body(layer, rank):
        routing = indices[rank].copy()
        first = layer.dispatch(inputs[rank], routing)
        routing[:] = 0  # the descriptor has its own
        other = [values + 0.5 for values in inputs]
        again = layer.dispatch(other[rank], weights=weights[rank], cached=first.descriptor)
        _check_rows(first, rows[rank], inputs)
        _check_rows(again, rows[rank], other, weights)
        assert first.weights is None and again.descriptor.has_weights

    with Ranks(4, **SMALL, local_world_size=2) as ranks:
        ranks.run(body)


def test_worst_case_rows_fix_the_size_and_report_overflow():
    inputs, indices, weights = _problem()
    rows = oracle.expert_rows(indices, 8, 4)[0]
    most = max(map(len, rows))

    def body(layer, rank):
        enough = most + 2
        got = layer.dispatch(
            inputs[rank], indices[rank], weights=weights[rank], worst_case_rows=enough
        )
        assert got.output.shape[0] == enough == got.descriptor.rows
        count = got.descriptor.wanted_rows
        assert count == len(rows[rank])
        np.testing.assert_array_equal(
            got.output[:count], [inputs[s][t] for s, t, _ in rows[rank]] or np.zeros((0, 16))
        )
        assert (got.weights[count:] == 0).all()
        less = layer.dispatch(inputs[rank], indices[rank], worst_case_rows=most - 1)
        assert less.descriptor.rows == most - 1
        with pytest.raises(
            ValueError, match=f"worst_case_rows: want {most} or more, got {most - 1}"
        ):
            layer.barrier()
        layer.barrier()

    with Ranks(4, **SMALL) as ranks:
        ranks.run(body)


@st.composite
def worlds(draw):
    world = draw(st.sampled_from([1, 2, 4]))
    local = draw(st.sampled_from([n for n in (1, 2, 4) if world % n == 0]))
    topk, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = world * per_rank
    expert = st.integers(-1, experts)
    if draw(st.booleans()):
        expert = st.just(draw(expert))  # all to one
    tables = [
        np.array(
            draw(st.lists(st.lists(expert, min_size=topk, max_size=topk), max_size=5)), np.int32
        ).reshape(-1, topk)
        for _ in range(world)
    ]
    return world, local, experts, tables, draw(st.sampled_from([1, 1, 8]))


@settings(
    max_examples=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(worlds())
def test_random_routings_agree_with_the_oracle(problem):
    world, local, experts, indices, alignment = problem
    topk = indices[0].shape[1]
    inputs = [_payload(rank, len(table)) for rank, table in enumerate(indices)]
    weights = [np.arange(table.size, dtype=np.float32).reshape(table.shape) for table in indices]
    rows, _, offsets = oracle.expert_rows(indices, experts, world, alignment)
    sums = oracle.combine(
        indices, experts, world, local,
        lambda rank, token, k: np.float32(k + 1) * inputs[rank][token], hidden=16,
        weights=weights,
    )  # fmt: skip

    def body(layer, rank):
        got = layer.dispatch(
            inputs[rank], indices[rank], weights=weights[rank], expert_alignment=alignment
        )
        _check_rows(got, rows[rank], inputs, weights)
        assert got.descriptor.expert_offsets.tolist() == offsets[rank]
        for row, pair in enumerate(rows[rank]):
            if pair is not None:
                got.output[row] *= np.float32(pair[2] + 1)
        # The output is overwritten in place and read where it lies.
        out = layer.combine(got.output, got.descriptor, weighted=True)
        np.testing.assert_array_equal(out, sums[rank])

    config = {"max_tokens": 5, "hidden": 16, "topk": topk, "experts": experts, "dtype": "float32"}
    with Ranks(world, **config, local_world_size=local) as ranks:
        ranks.run(body)


# ---- refusals


def _refused(ranks, body, text, error=ValueError):
    """Every rank raises an error whose text matches."""
    for outcome in ranks.try_run(body):
        assert isinstance(outcome, error), outcome
        assert isinstance(outcome, winnow.Error)
        assert re.search(text, str(outcome)), str(outcome)


def test_a_mistake_of_one_rank_is_an_error_on_all():
    x, i = _payload(0, 4), np.zeros((4, 3), np.int32)
    bad = np.full((4, 3), 12, np.int32)
    cases = [
        ((_payload(0, 9), np.zeros((9, 3), np.int32)), {}, "input: want at most max_tokens = 8"),
        ((x[:, :8], i), {}, "rank 1: input: want shape"),
        ((x.astype(np.float16), i), {}, "rank 1: input: want dtype f32"),
        ((x, bad), {}, "rank 1: expert_indices: want -1 to 8, got 12 for token 0"),
        ((x, i), {"expert_alignment": 0}, "rank 1: expert_alignment: want 1 to"),
        ((x, i), {"expert_alignment": 2}, "expert_alignment differs: 1 on rank 0, 2 on rank 1"),
        ((x, i), {"weights": np.ones((4, 2), np.float32)}, "rank 1: weights: want shape"),
        ((x, i), {"scatter_indices": i}, "scatter_indices"),
        # What the binding finds wrong, the others hear of too.
        ((x.astype(float), i), {}, "input: want dtype f32.*float64|rank 1: input: want a tensor"),
        ((x, i), {"order": "sideways"}, "order: want expert_major|rank 1: input: want a tensor"),
        (([1.0], i), {}, "got list|rank 1: input: want a tensor"),
        (
            (torch.ones(4, 16, requires_grad=True), i),
            {},
            "no gradient|rank 1: input: want a tensor",
        ),
    ]
    with Ranks(2, **SMALL) as ranks:
        for arguments, options, text in cases:

            def body(layer, rank, arguments=arguments, options=options):
                return layer.dispatch(*(arguments, (x, i))[rank == 0], **(options if rank else {}))

            _refused(ranks, body, text)

        def combine(layer, rank):
            got = layer.dispatch(x, i)
            rows = got.output[:, : 16 - 4 * rank].copy()
            return layer.combine(rows, got.descriptor)

        _refused(ranks, combine, "rank 1: expert_output: want shape")
        ranks.run(lambda layer, rank: layer.dispatch(x, i))  # it works on


def test_ranks_that_differ_are_named():
    world = ep.InProcessWorld(2)
    transports = [world.transport(rank) for rank in range(2)]

    def make(rank):
        config = {**SMALL, "hidden": 16 + 16 * rank}
        return ep.AllToAll(transports[rank], world.store(), timeout=10, **config)

    for outcome in run_each(2, make):
        assert isinstance(outcome, ValueError)
        assert "hidden: want the same on every rank, got 16 (rank 0), 32 (rank 1)" in str(outcome)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "float64"}, "dtype: want one of f32, f16, bf16, got float64"),
        ({"dtype": np.int32}, "dtype: want f32, f16 or bf16, got i32"),
        ({"hidden": 3}, "hidden: want rows of a multiple of 16 bytes"),
        ({"topk": 33}, "topk: want 1 to 32, got 33"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"timeout": -1.0}, "timeout: want 0 seconds to a year"),
        ({"timeout": float("nan")}, "timeout: want 0 seconds to a year, got nan"),
        ({"local_world_size": 3}, "local_world_size"),
    ],
)
def test_sizes_that_are_excluded(change, text):
    world = ep.InProcessWorld(1)
    transport = world.transport(0)
    with pytest.raises(ValueError, match=text) as caught:
        ep.AllToAll(transport, world.store(), **{**SMALL, **change})
    assert caught.value.operation == "expert_parallel::AllToAll"


def test_closed_and_foreign():
    with Ranks(1, **SMALL) as one, Ranks(1, **SMALL) as other:
        layer, x, i = one.layers[0], _payload(0, 2), np.zeros((2, 3), np.int32)
        got = layer.dispatch(x, i)
        with pytest.raises(ValueError, match="descriptor: want one of this layer, got another"):
            other.layers[0].combine(got.output, got.descriptor)
        with pytest.raises(ValueError, match="cached: want a descriptor of this layer"):
            other.layers[0].dispatch(x, cached=got.descriptor)
        with pytest.raises(ValueError, match="descriptor: want one of this layer"):
            other.layers[0].combine_buffer(got.descriptor)
        layer.close()
        layer.close()
        assert layer.arena_bytes == 0
        for call in (
            lambda: layer.dispatch(x, i),
            lambda: layer.combine(got.output, got.descriptor),
            lambda: layer.barrier(),
            lambda: layer.combine_buffer(got.descriptor),
        ):
            with pytest.raises(ValueError, match="the layer is closed"):
                call()
        with pytest.raises(TypeError):
            layer.dispatch(x, i, None)  # keywords after the tensors
        with pytest.raises(TypeError):
            layer.combine(got.output, None)


def test_a_rank_that_does_not_come_is_a_timeout():
    x, i = _payload(0, 2), np.zeros((2, 3), np.int32)
    with Ranks(2, **SMALL, timeout=0.3) as ranks:
        start = time.monotonic()
        with pytest.raises(winnow.Error, match="rank 0 waited 0.3 s for .* rank 1") as caught:
            ranks.layers[0].dispatch(x, i)
        assert time.monotonic() - start < 5
        assert caught.value.code == "timeout" and not isinstance(caught.value, ValueError)
        # The one that comes late hears why, at once; so does the next call.
        for layer in ranks.layers[::-1]:
            with pytest.raises(winnow.Error, match="rank 0 waited 0.3 s") as caught:
                layer.dispatch(x, i)
            assert caught.value.code == "timeout"
    world = ep.InProcessWorld(2)
    transport = world.transport(0)
    with pytest.raises(winnow.Error, match="rank 1 has not arrived within 0.2 s"):
        ep.AllToAll(transport, world.store(), **SMALL, timeout=0.2)


# ---- threads, memory


def test_the_interpreter_runs_while_a_rank_waits():
    """Two ranks are two threads: with the lock held in a wait, the second would never come."""
    x, i = _payload(0, 2), np.zeros((2, 3), np.int32)
    ticks = []

    def body(layer, rank):
        if rank == 1:
            for _ in range(20):
                ticks.append(time.monotonic())
                time.sleep(0.005)
        start = time.monotonic()
        got = layer.dispatch(x, i)
        layer.combine(got.output, got.descriptor)
        layer.barrier()
        return start

    with Ranks(2, **SMALL, timeout=10) as ranks:
        start, _ = ranks.run(body)
    assert sum(tick > start for tick in ticks) > 10


def test_overlapping_calls_are_refused():
    x, i = _payload(0, 2), np.zeros((2, 3), np.int32)
    with Ranks(2, **SMALL, timeout=10) as ranks:
        waits = threading.Thread(target=lambda: ranks.layers[0].dispatch(x, i))
        waits.start()
        deadline = time.monotonic() + 10
        text = ""
        while "another thread is in a call" not in text and time.monotonic() < deadline:
            try:
                ranks.layers[0].arena_bytes  # noqa: B018
            except ValueError as error:
                text = str(error)
        assert "another thread is in a call of the same object" in text
        ranks.layers[1].dispatch(x, i)
        waits.join(10)
        assert not waits.is_alive()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_outputs_outlive_the_layer(kind):
    as_kind = torch.from_numpy if kind == "torch" else np.asarray
    x, i = _payload(0, 8), np.arange(24, dtype=np.int32).reshape(8, 3) % 8
    ranks = Ranks(1, **SMALL, arena_rows=8)
    layer = ranks.layers[0]
    got = layer.dispatch(as_kind(x), as_kind(i))
    rows, tables = got.output, got.descriptor.token_dst_scatter_idx
    want, want_tables = np.asarray(rows).copy(), np.asarray(tables).copy()
    buffer = layer.combine_buffer(got.descriptor)
    buffer[:] = 3
    del got
    for _ in range(20):  # others do not take its place
        layer.dispatch(as_kind(x + 1), as_kind(i))
    layer.close()
    del layer, ranks
    gc.collect()
    np.testing.assert_array_equal(np.asarray(rows), want)
    np.testing.assert_array_equal(np.asarray(tables), want_tables)
    assert (np.asarray(buffer) == 3).all()


def test_what_describes_the_routing_is_read_only_in_numpy():
    with Ranks(1, **SMALL) as ranks:
        got = ranks.layers[0].dispatch(_payload(0, 2), np.zeros((2, 3), np.int32))
        with pytest.raises(ValueError, match="read-only"):
            got.descriptor.topk_indices[0, 0, 0] = 3
        got.output[0, 0] = 3  # the caller's


def test_copied_outputs_leave_the_arena():
    x, i = _payload(0, 8), np.zeros((8, 3), np.int32)
    with Ranks(1, **SMALL, arena_rows=64) as ranks:
        layer = ranks.layers[0]
        kept = [layer.dispatch(x, i, copy_out=True).output]
        settled = layer.arena_bytes
        kept += [layer.dispatch(x, i, copy_out=True).output for _ in range(50)]
        assert layer.arena_bytes == settled
        kept += [layer.dispatch(x, i).output for _ in range(50)]
        assert layer.arena_bytes > settled
        for rows in kept:
            np.testing.assert_array_equal(rows, np.repeat(x, 3, axis=0))


class _Foreign:
    """An array that has nothing but the protocol."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __array_namespace__(self):
        return _Foreign

    float32 = np.float32

    @staticmethod
    def empty(shape, dtype):
        return _Foreign(np.empty(shape, dtype))

    @staticmethod
    def from_dlpack(tensor):
        return _Foreign(np.from_dlpack(tensor))


def test_another_framework_gets_its_own_kind():
    x, i = _payload(0, 2), np.zeros((2, 3), np.int32)
    with Ranks(1, **SMALL) as ranks:
        layer = ranks.layers[0]
        got = layer.dispatch(_Foreign(x), _Foreign(i))
        assert type(got.output) is _Foreign
        np.testing.assert_array_equal(got.output._array, np.repeat(x, 3, axis=0))
        out = layer.combine(got.output, got.descriptor)
        np.testing.assert_array_equal(out._array, 3 * x)


def _held():
    """Open files and mappings of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\n")


def test_a_hundred_layers_leave_nothing():
    x, i = _payload(0, 4), np.zeros((4, 3), np.int32)

    def once():
        with Ranks(2, **SMALL) as ranks:
            ranks.run(lambda layer, rank: layer.combine(
                (got := layer.dispatch(x, i)).output, got.descriptor))  # fmt: skip

    for _ in range(10):
        once()
    files, maps = _held()
    for _ in range(100):
        once()
    files_after, maps_after = _held()
    assert files_after == files
    assert maps_after <= maps + 10  # the allocator's own


# ---- stores and shared memory


class _Dictionary:
    """What torch.distributed.Store has, in Python; `wait` alone, without `check`."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def wait(self, keys, timeout):
        if not all(key in self.values for key in keys):
            time.sleep(timeout.total_seconds())
            raise RuntimeError("wait timeout")


STORES = {
    "folder": lambda folder: folder / "meet",
    "text": lambda folder: str(folder / "meet"),
    "FileStore": lambda folder: ep.FileStore(str(folder / "files")),
    "dictionary": lambda folder: _Dictionary(),
    "torch.HashStore": lambda folder: torch.distributed.HashStore(),
    "torch.FileStore": lambda folder: torch.distributed.FileStore(str(folder / "torch"), 2),
    "torch.PrefixStore": lambda folder: torch.distributed.PrefixStore(
        "x", torch.distributed.HashStore()
    ),
}


@pytest.mark.parametrize("kind", STORES)
def test_ranks_meet_in_any_store(kind, tmp_path):
    store = STORES[kind](tmp_path)
    x, i = _payload(0, 2), np.array([[0, 3, 5]] * 2, np.int32)

    def body(rank):
        for attempt in range(2):  # the same keys again
            transport = ep.create_shared_memory(store, rank, 2, timeout=20)
            assert (transport.rank, transport.world_size) == (rank, 2)
            assert transport.name == "shared_memory"
            assert "running" in transport.describe_peer(1 - rank)
            with ep.AllToAll(transport, store, timeout=20, **SMALL) as layer:
                got = layer.dispatch(x + attempt, i)
                out = layer.combine(got.output, got.descriptor)
                np.testing.assert_array_equal(out, 3 * (x + attempt))
                layer.barrier()
        return transport.world_id

    first, second = run_all(2, body)
    assert first == second


LAUNCHED = """
import numpy as np
from winnow import expert_parallel as ep

here = ep.launch_environment()
transport = ep.create_shared_memory(here.rendezvous, here.rank, here.world_size)
sizes = dict(max_tokens=4, hidden=16, topk=1, experts=4, local_world_size=here.local_world_size)
with ep.AllToAll(transport, ep.FileStore(here.rendezvous), dtype=np.float32, **sizes) as layer:
    tokens = np.full((4, 16), here.rank + 1, np.float32)
    got = layer.dispatch(tokens, np.arange(4, dtype=np.int32)[:, None])
    assert got.output[:, 0].tolist() == [1, 2, 1, 2], got.output
    assert (layer.combine(2 * got.output, got.descriptor) == 2 * tokens).all()
    print(f"rank {here.rank} of nodes of {here.local_world_size}: done", flush=True)
"""


def test_ranks_that_winnow_launch_starts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED)
    result = subprocess.run(
        [sys.executable, "-m", "winnow", "launch", "-n", "2", "--nodes", "2", "--",
         sys.executable, program],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank} of nodes of 1: done" in result.stdout


def test_a_store_that_fails_says_so():
    class Broken(_Dictionary):
        def check(self, keys):
            raise ConnectionError("the host is gone\nand a backtrace")

    with pytest.raises(winnow.Error, match="cannot get .*: the host is gone$") as caught:
        ep.create_shared_memory(Broken(), 0, 2, timeout=5)
    assert caught.value.code == "resource"
    with pytest.raises(ValueError, match="store: want a folder, or an object with set, get and"):
        ep.create_shared_memory(7, 0, 2)
    with pytest.raises(winnow.Error, match="rank 1 has not arrived within 0.2 s"):
        ep.create_shared_memory(_Dictionary(), 0, 2, timeout=0.2)
    with pytest.raises(ValueError, match=r"rank: want in \[0, 2\), got 2"):
        ep.create_shared_memory(_Dictionary(), 2, 2)


# ---- layout, notify, sizes


@pytest.mark.parametrize("as_kind", [np.asarray, torch.from_numpy])
def test_layout(as_kind):
    rng = np.random.default_rng(7)
    indices = _routing(rng, 300, topk=6, experts=24)
    want = oracle.layout(indices, 24, 6, 2)
    got = ep.layout(as_kind(indices), 24, 6, 2)
    assert str(got[3].dtype).endswith("bool")
    for one, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)
    out = tuple(as_kind(np.zeros_like(np.asarray(one))) for one in got)
    assert ep.layout(as_kind(indices), 24, 6, 2, out=out)[0] is out[0]
    for one, expected in zip(out, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)
    flags = as_kind(np.zeros((300, 6), np.uint8))
    ep.layout(as_kind(indices), 24, 6, 2, out=(None, None, None, flags))
    np.testing.assert_array_equal(np.asarray(flags), want[3])
    with pytest.raises(ValueError, match="experts"):
        ep.layout(as_kind(indices), 25, 6, 2)
    with pytest.raises(ValueError, match="expert_indices: .* token 0"):
        ep.layout(as_kind(np.full((1, 2), 99, np.int32)), 24, 6, 2)


def test_notify_tells_what_comes():
    rng = np.random.default_rng(3)
    tokens, channels, alignment = [7, 0, 12, 5], 4, 8
    indices = [_routing(rng, n) for n in tokens]
    layouts = [oracle.layout(table, 8, 4, 2) for table in indices]
    world = ep.InProcessWorld(4)

    def body(rank):
        notifier = ep.Notifier(
            world.transport(rank), world.store(), experts=8, local_world_size=2, timeout=20
        )
        ranks, nodes, experts, in_rank = ep.layout(indices[rank], 8, 4, 2)
        got = notifier.notify(
            ranks, nodes, experts, in_rank, channels=channels, expert_alignment=alignment
        )
        per = -(-tokens[rank] // channels)
        ends = [min(per * (c + 1), tokens[rank]) for c in range(channels)]
        by_node = in_rank.reshape(tokens[rank], 2, 2).any(2)
        for c, end in enumerate(ends):
            np.testing.assert_array_equal(
                got.rank_channel_prefix_matrix[:, c], in_rank[:end].sum(0)
            )
            np.testing.assert_array_equal(
                got.node_channel_prefix_matrix[:, c], by_node[:end].sum(0)
            )
        received = np.cumsum([layouts[source][0][rank] for source in range(4)])
        np.testing.assert_array_equal(got.recv_rank_prefix_sum, received)
        passed = np.cumsum([layouts[2 * node + rank % 2][1][rank // 2] for node in range(2)])
        np.testing.assert_array_equal(got.recv_node_prefix_sum, passed)
        pairs = sum(layouts[source][2][2 * rank : 2 * rank + 2] for source in range(4))
        aligned = -(-pairs // alignment) * alignment
        np.testing.assert_array_equal(got.recv_pairs_per_expert, aligned)
        assert got.num_recv_tokens.tolist() == [received[-1]]
        assert got.num_forward_tokens.tolist() == [passed[-1]]
        assert notifier.totals.recv_tokens == received[-1]
        assert notifier.totals.forward_tokens == passed[-1]
        assert notifier.totals.recv_pairs_per_expert == aligned.tolist()
        again = ep.notify(
            notifier, ranks, nodes, experts, in_rank, channels=channels, out=got,
            worst_case_rows=99,
        )  # fmt: skip
        assert again.recv_rank_prefix_sum is got.recv_rank_prefix_sum
        np.testing.assert_array_equal(got.recv_pairs_per_expert, pairs)
        assert notifier.totals.recv_tokens == -1
        too_small = ep.QueueBuffers(
            bytes_per_token=64, node_recv_tokens=4, local_recv_tokens=4,
            node_buffer_bytes=10, local_buffer_bytes=10,
        )  # fmt: skip
        with pytest.raises(ValueError, match="got 10"):
            notifier.notify(ranks, nodes, experts, in_rank, queues=too_small)
        with pytest.raises(ValueError, match="rank 0: |tokens_per_rank: .*got list"):
            notifier.notify([1] if rank == 0 else ranks, nodes, experts, in_rank)
        with pytest.raises(ValueError, match="channels differs"):
            notifier.notify(ranks, nodes, experts, in_rank, channels=1 + rank)

    run_all(4, body)


def test_sizes():
    assert [ep.source_meta_bytes(n) for n in (1, 8, 32, 33, 72)] == [8, 8, 8, 12, 16]
    # payload | source | scales | indices | weights
    assert ep.bytes_per_token(14336, 56, 8, 8) == 14336 + 8 + 224 + 32 + 32 + 8
    shape = {"bytes_per_token": 64, "recv_tokens": 10, "nodes": 4, "channels": 3}
    node = ep.node_buffer_layout(**shape, local_world_size=8)
    assert node.control_offset == 64 * 10 * 4 * 2 * 3
    assert node.control_words == (2 * 8 + 4) * 4 * 2 * 3
    assert node.bytes == node.control_offset + 4 * node.control_words
    local = ep.local_buffer_layout(**shape, local_world_size=8)
    assert local.control_offset == 64 * 10 * 8 * 3
    assert local.control_words == 8 * (2 * 4 + 2) * 3
    clean = ep.classic_clean_meta("between_nodes", **shape)
    assert (clean.offset, clean.count) == (node.control_offset // 4, node.control_words)
    clean = ep.classic_clean_meta("inside_node", **shape)
    assert (clean.offset, clean.count) == (local.control_offset // 4, local.control_words)
    with pytest.raises(ValueError, match="local_world_size"):
        ep.classic_clean_meta("inside_node", **shape, local_world_size=4)
    with pytest.raises(ValueError, match="route: want between_nodes or inside_node"):
        ep.classic_clean_meta("sideways", **shape)
    with pytest.raises(ValueError, match="bytes_per_token"):
        ep.bytes_per_token(2**62, 2**62, 1, 1)


# ---- what is there


def test_supports():
    for op in ("dispatch", "combine", "layout", "notify"):
        assert winnow.supports(f"expert_parallel.{op}"), op
        answer = winnow.supports(f"expert_parallel.{op}", device="cuda")
        assert answer.supported == (answer.reason == "")
    assert winnow.supports("expert_parallel.dispatch", dtype="bfloat16", hidden=7168, topk=8)
    answer = winnow.supports("expert_parallel.dispatch", dtype="bfloat16", hidden=7)
    assert "hidden: want rows of a multiple of 16 bytes, got 7" in answer.reason
    assert "topk: want 1 to 32" in winnow.supports("expert_parallel.combine", topk=40).reason
    assert not winnow.supports("expert_parallel.dispatch", dtype="float8_e4m3fn")
    with pytest.raises(TypeError, match="unknown size 'rows'"):
        winnow.supports("expert_parallel.dispatch", rows=3)


def test_launch_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RENDEZVOUS"):
        monkeypatch.delenv(f"WINNOW_{name}", raising=False)
    assert ep.launch_environment() is None
    monkeypatch.setenv("WINNOW_RANK", "1")
    with pytest.raises(ValueError):
        ep.launch_environment()
    monkeypatch.setenv("WINNOW_WORLD_SIZE", "4")
    monkeypatch.setenv("WINNOW_RENDEZVOUS", "/tmp/x")
    here = ep.launch_environment()
    assert (here.rank, here.world_size, here.local_world_size) == (1, 4, 4)
    assert here.rendezvous == "/tmp/x"
    monkeypatch.setenv("WINNOW_TIMEOUT_SECONDS", "2.5")
    assert ep.default_timeout() == 2.5
    monkeypatch.setenv("WINNOW_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="WINNOW_TIMEOUT_SECONDS"):
        ep.default_timeout()
