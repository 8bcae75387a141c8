"""Calls of the all-to-all that go wrong, threads, and memory."""

import gc
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_problems import SMALL, payload, routing
from ranks import Ranks, run_each

import winnow
from winnow import expert_parallel as ep


def _refused(ranks, body, text, error=ValueError):
    """Every rank raises an error whose text matches."""
    for outcome in ranks.try_run(body):
        assert isinstance(outcome, error), outcome
        assert isinstance(outcome, winnow.Error)
        assert re.search(text, str(outcome)), str(outcome)


def test_a_mistake_of_one_rank_is_an_error_on_all():
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)
    bad = np.full((4, 3), 12, np.int32)
    cases = [
        ((payload(0, 9), np.zeros((9, 3), np.int32)), {}, "input: want at most max_tokens = 8"),
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


_OPTIONS = [
    ({"order": None}, "order: want expert_major or token_major, got None"),
    ({"order": 3}, "order: want expert_major or token_major, got 3"),
    ({"expert_alignment": "4"}, "expert_alignment: want an integer of 64 bits, got '4'"),
    ({"expert_alignment": 2**70}, "expert_alignment: want an integer of 64 bits, got 1180591"),
    ({"worst_case_rows": 1.5}, "worst_case_rows: want an integer of 64 bits, got 1.5"),
    ({"copy_out": 1}, "copy_out: want True or False, got 1"),
    ({"cached": (1, 2)}, "cached: want a Descriptor, got tuple"),
    ({"stream": "x"}, "stream: want None, a handle, or an object with .*, got 'x'"),
]


@pytest.mark.parametrize(("options", "text"), _OPTIONS)
def test_an_option_of_the_wrong_type_is_an_error_on_all(options, text):
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)
    with Ranks(2, **SMALL) as ranks:
        outcomes = ranks.try_run(
            lambda layer, rank: layer.dispatch(x, i, **(options if rank else {}))
        )
        assert all(isinstance(outcome, ValueError) for outcome in outcomes), outcomes
        assert re.match(f"expert_parallel::dispatch: {text}", str(outcomes[1])), outcomes
        assert "rank 1: input: want a tensor" in str(outcomes[0])
        ranks.run(lambda layer, rank: layer.dispatch(x, i))  # it works on


def test_a_combine_without_its_descriptor_is_an_error_on_all():
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)
    with Ranks(2, **SMALL) as ranks:
        made = ranks.run(lambda layer, rank: layer.dispatch(x, i))

        def refused(change, text, other):
            def body(layer, rank):
                got = made[rank]
                given = {"expert_output": got.output, "descriptor": got.descriptor}
                return layer.combine(**{**given, **(change if rank else {})})

            outcomes = ranks.try_run(body)
            assert all(isinstance(outcome, ValueError) for outcome in outcomes), outcomes
            assert re.match(f"expert_parallel::combine: {text}", str(outcomes[1])), outcomes
            assert f"rank 1: {other}" in str(outcomes[0])

        missing = "descriptor: want one of this layer"
        refused({"descriptor": None}, "descriptor: want a Descriptor, got None", missing)
        given = "descriptor: want a Descriptor, got Dispatched, whose .descriptor is one"
        refused({"descriptor": made[1]}, given, missing)
        output = "expert_output: want a tensor"
        refused({"weighted": 1}, "weighted: want True or False, got 1", output)
        refused({"stream": "x"}, "stream: want None, a handle", output)
        ranks.run(lambda layer, rank: layer.combine(made[rank].output, made[rank].descriptor))


def test_rows_of_a_framework_without_the_dtype_of_the_layer_are_what_is_wrong():
    x, i = torch.ones(4, 16, dtype=torch.bfloat16), torch.zeros(4, 3).int()
    with Ranks(1, **{**SMALL, "dtype": "bfloat16"}) as ranks:
        layer = ranks.layers[0]
        got = layer.dispatch(x, i)
        rows = np.ones((12, 16), np.float32)
        with pytest.raises(ValueError, match="combine: .*expert_output: want dtype bf16, got f32"):
            layer.combine(rows, got.descriptor)
        with pytest.raises(ValueError, match="dispatch: .*input: want dtype bf16 .*, got f32"):
            layer.dispatch(rows[:4], i.numpy())


def test_a_keyword_that_there_is_not_is_an_error_on_all():
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)
    with Ranks(2, **SMALL) as ranks:
        for call in ("dispatch", "combine"):

            def body(layer, rank, call=call):
                given = (x, i)
                if call == "combine":
                    got = layer.dispatch(x, i)
                    given = got.output, got.descriptor
                return getattr(layer, call)(*given, **({"wieghted": True} if rank else {}))

            other, own = ranks.try_run(body)
            assert isinstance(own, TypeError) and f"{call}() got an unexpected" in str(own), own
            assert isinstance(other, ValueError) and "rank 1: " in str(other), other
        ranks.run(lambda layer, rank: layer.dispatch(x, i))


def test_a_barrier_of_which_an_option_is_wrong_lets_the_others_pass():
    with Ranks(2, **SMALL) as ranks:
        for options in ({"stream": "x"}, {"intra_node_only": 1}):
            other, own = ranks.try_run(
                lambda layer, rank, options=options: layer.barrier(**(options if rank else {}))
            )
            assert other is None, other
            assert isinstance(own, ValueError) and f"barrier: {next(iter(options))}" in str(own)
        ranks.run(lambda layer, rank: layer.barrier())


@pytest.mark.parametrize(
    ("change", "text", "other"),
    [
        ({"topk": "3"}, "topk: want an integer of 32 bits, got '3'", "topk"),
        ({"topk": 2**32 + 2}, "topk: want an integer of 32 bits, got 4294967298", "topk"),
        ({"experts": None}, "experts: want an integer of 32 bits, got None", "experts"),
        ({"sm_count": "all"}, "sm_count: want an integer of 32 bits, got 'all'", "max_tokens"),
        ({"enable_local_combine": 1}, "enable_local_combine: want True or False", "max_tokens"),
        ({"dtype": "float64"}, "dtype: want one of f32, f16, bf16, got float64", "max_tokens"),
        ({"timeout": "soon"}, "timeout: want 0 seconds to a year, got 'soon'", "max_tokens"),
    ],
)
def test_a_size_of_the_wrong_type_is_an_error_on_all(change, text, other):
    world = ep.InProcessWorld(2)
    transports = [world.transport(rank) for rank in range(2)]

    def make(rank):
        config = {**SMALL, "timeout": 30, **(change if rank else {})}
        return ep.AllToAll(transports[rank], world.store(), **config)

    outcomes = run_each(2, make)
    assert all(isinstance(outcome, ValueError) for outcome in outcomes), outcomes
    assert str(outcomes[1]).startswith(f"expert_parallel::AllToAll: {text}")
    assert f"{other}: want the same on every rank" in str(outcomes[0])


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
        ({"dtype": "float64"}, "AllToAll: dtype: want one of f32, f16, bf16, got float64"),
        ({"weight_dtype": float}, "AllToAll: weight_dtype: want one of f32, f16, bf16, got float"),
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


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu:0")])
def test_the_cpu_has_two_names(device):
    with Ranks(1, **SMALL, device=device) as ranks:
        assert ranks.layers[0].device == "cpu"
    assert winnow.supports("sparse_mla.forward", device=device)


def test_closed_and_foreign():
    with Ranks(1, **SMALL) as one, Ranks(1, **SMALL) as other:
        layer, x, i = one.layers[0], payload(0, 2), np.zeros((2, 3), np.int32)
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


def test_a_rank_that_does_not_come_is_a_timeout():
    x, i = payload(0, 2), np.zeros((2, 3), np.int32)
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
    x, i = payload(0, 2), np.zeros((2, 3), np.int32)
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
    x, i = payload(0, 2), np.zeros((2, 3), np.int32)
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
    x, i = payload(0, 8), np.arange(24, dtype=np.int32).reshape(8, 3) % 8
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


class _Mark:
    """Of which there may be weak references."""


def test_tensors_that_know_their_call_are_collected():
    """A tensor of torch may hold the result that holds it."""
    x, i = torch.ones(4, 16), torch.zeros(4, 3).int()
    world = ep.InProcessWorld(1)
    notifier = ep.Notifier(world.transport(0), world.store(), experts=8)
    with Ranks(1, **SMALL) as ranks:
        for make in (
            lambda: (got := ranks.layers[0].dispatch(x, i), got.output),
            lambda: (got := notifier.notify(*ep.layout(i, 8, 1, 1)), got.num_recv_tokens),
        ):
            got, tensor = make()
            tensor.made_by, tensor.mark = got, _Mark()
            mark = weakref.ref(tensor.mark)
            del got, tensor
            gc.collect()
            assert mark() is None


def test_what_describes_the_routing_is_read_only_in_numpy():
    with Ranks(1, **SMALL) as ranks:
        got = ranks.layers[0].dispatch(payload(0, 2), np.zeros((2, 3), np.int32))
        with pytest.raises(ValueError, match="read-only"):
            got.descriptor.topk_indices[0, 0, 0] = 3
        got.output[0, 0] = 3  # the caller's


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("options", [{}, {"worst_case_rows": 30}, {"order": "token_major"}])
def test_out_takes_the_rows(kind, options):
    as_kind = torch.from_numpy if kind == "torch" else np.asarray
    rng = np.random.default_rng(4)
    inputs = [as_kind(payload(rank, 8)) for rank in range(2)]
    indices = [as_kind(routing(rng, 8)) for _ in range(2)]

    def body(layer, rank):
        x, i = inputs[rank], indices[rank]
        want = layer.dispatch(x, i, **options)
        used = want.descriptor.wanted_rows
        settled = layer.arena_bytes
        for _ in range(40):
            out = as_kind(np.full((40, 16), -7, np.float32))
            got = layer.dispatch(x, i, out=out, **options)
            assert np.shares_memory(np.asarray(got.output), np.asarray(out))
            assert got.output.shape == want.output.shape
            np.testing.assert_array_equal(got.output[:used], want.output[:used])
            assert (out[len(got.output) :] == -7).all()
        assert layer.arena_bytes == settled  # none of it borrows the arena
        exactly = out[: len(got.output)]
        again = layer.dispatch(x, cached=want.descriptor, out=exactly)
        assert again.output is exactly
        np.testing.assert_array_equal(
            layer.combine(again.output, again.descriptor),
            layer.combine(want.output, want.descriptor),
        )

    with Ranks(2, **SMALL, arena_rows=200) as ranks:
        ranks.run(body)


def test_an_out_that_is_too_small_is_an_error_on_all():
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)  # 24 rows to rank 0
    with Ranks(2, **SMALL) as ranks:

        def body(layer, rank):
            return layer.dispatch(x, i, out=np.empty((24 - 24 * rank, 16), np.float32))

        assert [len(got.output) for got in ranks.run(body)] == [24, 0]

        def small(layer, rank):
            return layer.dispatch(x, i, out=np.empty((23 - 23 * rank, 16), np.float32))

        _refused(ranks, small, "out: want 24 rows or more on rank 0, got 23")
        for bad, text in (
            (np.empty((24, 16)), "out: want dtype f32, .* got float64"),
            (np.empty((24, 8), np.float32), "out: want shape"),
            (np.broadcast_to(np.float32(0), (24, 16)), "read-only"),
        ):
            outcomes = ranks.try_run(
                lambda layer, rank, bad=bad: layer.dispatch(x, i, out=bad if rank == 1 else None)
            )
            assert all(isinstance(outcome, ValueError) for outcome in outcomes)
            assert re.search(text, str(outcomes[1]))
        ranks.run(body)


def test_copied_outputs_leave_the_arena():
    x, i = payload(0, 8), np.zeros((8, 3), np.int32)
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


_SAYS_RECORDING = """
_Bool recording;
_Bool _ZN6winnow10in_captureENS_6DeviceENS_6StreamE(void) { return recording; }
"""
_RECORDED = """
import ctypes, os
import numpy as np
from winnow.expert_parallel import AllToAll, InProcessWorld

recording = ctypes.c_bool.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "recording")
x, i = np.ones((8, 16), np.float32), np.zeros((8, 3), np.int32)
sizes = {"max_tokens": 8, "hidden": 16, "topk": 3, "experts": 8, "dtype": "float32"}
for records in ((), ("dispatch",), ("combine",)):
    world = InProcessWorld(1)
    with AllToAll(world.transport(0), world.store(), **sizes, arena_rows=64) as layer:
        for call in range(50):
            recording.value = "dispatch" in records
            got = layer.dispatch(x, i)
            recording.value = "combine" in records
            layer.combine(got.output, got.descriptor)
            if call == 1:
                settled = layer.arena_bytes
        print(layer.arena_bytes > settled)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="has no C compiler")
def test_what_a_graph_records_stays_with_the_layer(tmp_path):
    """Where a library says, in place of CUDA, that a graph is recorded."""
    library = tmp_path / "recording.so"
    source = library.with_suffix(".c")
    source.write_text(_SAYS_RECORDING)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    result = subprocess.run(
        [sys.executable, "-c", _RECORDED], env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.stdout.split() == ["False", "True", "True"], result


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
    x, i = payload(0, 2), np.zeros((2, 3), np.int32)
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
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)

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
