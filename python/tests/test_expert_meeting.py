"""How processes meet: stores, shared memory, launchers."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from expert_launch import documented_program
from expert_problems import SMALL, payload
from interrupt import interrupted
from processes import python
from ranks import run_all, torchrun

import winnow
from winnow import expert_parallel as ep
from winnow.expert_parallel import rendezvous


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
    "FileStore": lambda folder: ep.FileStore(str(folder / "files"), job="test"),
    "dictionary": lambda folder: _Dictionary(),
    "torch.HashStore": lambda folder: torch.distributed.HashStore(),
    "torch.FileStore": lambda folder: torch.distributed.FileStore(str(folder / "torch"), 2),
    "torch.PrefixStore": lambda folder: torch.distributed.PrefixStore(
        "x", torch.distributed.HashStore()
    ),
}


@pytest.mark.parametrize("kind", STORES)
def test_ranks_meet_in_any_store(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("WINNOW_JOB", "test")
    store = STORES[kind](tmp_path)
    x, i = payload(0, 2), np.array([[0, 3, 5]] * 2, np.int32)

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


def _torchrun(tmp_path, source, **environment):
    program = tmp_path / "program.py"
    program.write_text(source)
    add = {"WINNOW_RENDEZVOUS": str(tmp_path / "meet"), **environment}
    return torchrun(2, program, add=add, check=True).stdout


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


def test_ranks_on_two_nodes(tmp_path):
    output = _torchrun(tmp_path, LAUNCHED, WINNOW_LOCAL_WORLD_SIZE="1")
    for rank in range(2):
        assert f"rank {rank} of nodes of 1: done" in output


def test_the_documented_program_runs(tmp_path):
    source, output = documented_program("launch")
    said = _torchrun(tmp_path, source)
    for line in output.splitlines():  # of two processes, in any order
        assert line in said
    alone = {name: text for name, text in os.environ.items() if not name.startswith("WINNOW_")}
    bare = python(tmp_path / "program.py", env=alone)
    assert bare.returncode == 1
    assert bare.stderr.startswith("Set WINNOW_RENDEZVOUS to a folder, and start the ranks with ")


def test_a_folder_belongs_to_a_job(tmp_path, monkeypatch):
    monkeypatch.delenv("WINNOW_JOB", raising=False)
    with pytest.raises(ValueError, match="job: want a name that no other job has, .*, got none"):
        ep.create_shared_memory(tmp_path, 0, 1)
    transport = ep.create_shared_memory(ep.FileStore(tmp_path, job="a/b"), 0, 1)
    assert transport.world_size == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a%2Fb"]


def test_a_store_that_fails_says_so():
    class Broken(_Dictionary):
        def check(self, keys):
            raise ConnectionError("the host is gone\nand a backtrace")

    with pytest.raises(winnow.Error, match="cannot get .*: the host is gone$") as caught:
        ep.create_shared_memory(Broken(), 0, 2, timeout=5)
    assert caught.value.code == "resource"

    class Interrupted(_Dictionary):
        def check(self, keys):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ep.create_shared_memory(Interrupted(), 0, 2, timeout=5)
    with pytest.raises(ValueError, match="store: want a folder, or an object with set, get and"):
        ep.create_shared_memory(7, 0, 2)
    with pytest.raises(winnow.Error, match="rank 1 has not arrived within 0.2 s"):
        ep.create_shared_memory(_Dictionary(), 0, 2, timeout=0.2)
    with pytest.raises(ValueError, match=r"rank: want in \[0, 2\), got 2"):
        ep.create_shared_memory(_Dictionary(), 2, 2)


def test_an_interrupt_ends_the_wait_for_a_rank_that_does_not_come(tmp_path):
    store = ep.FileStore(tmp_path, job="test")
    assert interrupted(lambda: ep.create_shared_memory(store, 0, 2, timeout=60), 0.5) < 20


@pytest.mark.parametrize("part", ["all_to_all", "both", "receive"])
def test_an_interrupt_ends_a_call_and_the_other_rank_is_told(part):
    """Rank 1 makes no call: rank 0 waits for its rows, or for those of a low-latency call."""
    world, made, over, told = ep.InProcessWorld(2), threading.Event(), threading.Event(), []
    kind, sizes, options = ep.AllToAll, SMALL, {}
    given = payload(0, 2), np.array([[0, 3, 5]] * 2, np.int32)
    if part != "all_to_all":
        kind, sizes = ep.LowLatency, {"max_tokens": 4, "hidden": 128, "topk": 1, "experts": 2}
        given = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)
        options["part"] = part

    def other():
        layer = kind(world.transport(1), world.store(), timeout=60, **sizes)
        made.set()
        over.wait()
        with pytest.raises(winnow.Error, match="rank 0 was interrupted") as e:
            layer.dispatch(*given)
        told.append(e.value)

    thread = threading.Thread(target=other, daemon=True)  # a failure here does not wait for it
    thread.start()
    layer = kind(world.transport(0), world.store(), timeout=60, **sizes)
    made.wait()
    if part == "receive":
        options["out"] = layer.dispatch(*given, part="send")
    assert interrupted(lambda: layer.dispatch(*given, **options), 0.5) < 20
    over.set()
    thread.join()
    assert [error.code for error in told] == ["timeout"]
    with pytest.raises(winnow.Error, match="rank 0 was interrupted"):
        layer.barrier() if part == "all_to_all" else layer.dispatch(*given)
    if part == "all_to_all":
        assert "reported by rank 0" in str(told[0]) and told[0].reason == "interrupted"
    else:
        again = ep.LowLatency(ep.InProcessWorld(1).transport(0), ep.MemoryStore(), **sizes)
        assert again.dispatch(*given, format="bfloat16").counts.tolist() == [2, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_gpus_that_are_not_there_are_an_error_on_every_rank():
    first, second, store = ep.InProcessWorld(2), ep.InProcessWorld(2), ep.MemoryStore()

    def make_layer(world, rank, device):
        return ep.AllToAll(world.transport(rank), world.store(), **SMALL, device=device)

    def make_notifier(world, rank, device):
        return ep.Notifier(world.transport(rank), world.store(), experts=8, device=device)

    def body(rank):
        with pytest.raises(
            winnow.Error, match="rank 0: device: want a GPU, but there is none"
        ) as e:
            ep.create_nvshmem(store, rank, 2, f"cuda:{rank}", timeout=20)
        assert e.value.code == "unsupported" and e.value.operation == "expert_parallel::nvshmem"
        for world, make in ((first, make_layer), (second, make_notifier)):
            with pytest.raises(
                winnow.Error, match="backend: want a backend for tensors on cuda:0"
            ) as e:
                make(world, rank, "cuda")
            assert e.value.code == "unsupported"
        with pytest.raises(ValueError, match="device: want cpu, cuda or cuda:INDEX, got cuda:-1"):
            make_layer(ep.InProcessWorld(1), 0, "cuda:-1")

    run_all(2, body)


def test_nvshmem_is_not_opened_before_its_first_use():
    program = (
        "import numpy, winnow.expert_parallel as ep\n"
        "from pathlib import Path\n"
        "world = ep.InProcessWorld(1)\n"
        "sizes = {'max_tokens': 1, 'hidden': 8, 'topk': 1, 'experts': 1}\n"
        "ep.AllToAll(world.transport(0), world.store(), **sizes).close()\n"
        "assert 'nvshmem' not in Path('/proc/self/maps').read_text()\n"
        "try:\n"
        "    ep.create_nvshmem(ep.MemoryStore(), 0, 2, 'cuda', timeout=0.1)\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    result = python("-c", program)
    assert "expert_parallel::nvshmem" in result.stdout, result


def test_the_timeout_of_the_environment(monkeypatch):
    monkeypatch.setenv("WINNOW_TIMEOUT_SECONDS", "2.5")
    assert ep.default_timeout() == 2.5
    monkeypatch.setenv("WINNOW_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="WINNOW_TIMEOUT_SECONDS"):
        ep.default_timeout()


def test_worlds_are_counted_by_group_and_not_by_its_name():
    """torch calls every default group "0": a process that had one before meets a new process."""

    class Group:
        group_name = "0"

    first, second = Group(), Group()
    assert [rendezvous.next_prefix(first) for _ in range(2)] == ["winnow/1", "winnow/2"]
    assert rendezvous.next_prefix(first, "room") == "room/1"
    assert rendezvous.next_prefix(second) == "winnow/1"
