"""Calls of the all-to-all on threads, and the memory of what they return."""

import gc
import os
import shutil
import subprocess
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_problems import SMALL, payload, routing
from foreign import Foreign
from processes import python
from ranks import Ranks

from winnow import expert_parallel as ep


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
        while "another call of the same object" not in text and time.monotonic() < deadline:
            try:
                ranks.layers[0].arena_bytes  # noqa: B018
            except ValueError as error:
                text = str(error)
        assert "another call of the same object has not ended: of another thread" in text
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
    result = python("-c", _RECORDED, add={"LD_PRELOAD": str(library)})
    assert result.stdout.split() == ["False", "True", "True"], result


class _Foreign(Foreign):
    @classmethod
    def from_dlpack(cls, tensor):
        return cls(np.from_dlpack(tensor))


def test_another_framework_gets_its_own_kind():
    x, i = payload(0, 2), np.zeros((2, 3), np.int32)
    with Ranks(1, **SMALL) as ranks:
        layer = ranks.layers[0]
        got = layer.dispatch(_Foreign(x), _Foreign(i))
        assert type(got.output) is _Foreign
        np.testing.assert_array_equal(got.output.array, np.repeat(x, 3, axis=0))
        out = layer.combine(got.output, got.descriptor)
        np.testing.assert_array_equal(out.array, 3 * x)


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
