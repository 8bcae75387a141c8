"""Processes that are the ranks of gloo groups, for all tests of winnow.compat.deep_ep.

A test names a function of a module of this folder, which each process of a group calls with its
group and arguments. Processes take seconds to start, so tests share a pool.
"""

import contextlib
import functools
import importlib
import os
import signal
import sys
import traceback

from processes import FORKS, ONE_THREAD

PROCESSES = 6
_SECONDS = 240


@functools.cache  # a group of gloo has threads of its own
def alone():
    """A group of this process alone."""
    import torch.distributed as dist

    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def load():
    """Imports what most tests call."""
    for name in ("winnow.compat.deep_ep", "winnow.torch", "context_parallel_models"):
        with contextlib.suppress(ImportError):  # of transformers
            importlib.import_module(name)


def _fork(connections, device, port, beside, load):
    """Starts the ranks, which have what this process imports."""
    os.setpgrp()
    sys.path[:0] = beside
    os.environ.update(ONE_THREAD, WINNOW_TIMEOUT_SECONDS="20")
    if load is not None:
        load()
    for rank in range(len(connections)):
        if os.fork() == 0:
            try:
                _serve(rank, connections, device, port)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def _serve(rank, connections, device, port):
    import torch
    import torch.distributed as dist

    processes, connection = len(connections), connections.pop(rank)
    while connections:
        connections.pop().close()
    torch.set_num_threads(1)
    if device == "cuda":
        import deep_ep_on_gpu

        torch.cuda.set_device(rank)
        deep_ep_on_gpu.use()
    store = dist.TCPStore("127.0.0.1", port, processes, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, processes + 1)}
    connection.send(None)  # this process is ready
    while (task := connection.recv()) is not None:
        size, module, name, arguments = task
        try:
            result = getattr(importlib.import_module(module), name)(groups[size], *arguments)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    connection.send((True, None))
    os._exit(0)


class Pool:
    """With `device` "cuda" each process uses the GPU of its rank. `beside`: folders whose packages
    precede the installed ones. `load`: called once, imports what all ranks need."""

    def __init__(self, processes=PROCESSES, device="cpu", beside=(), load=None):
        import torch.distributed as dist

        free = dist.TCPStore("127.0.0.1", 0, 1, True)
        port = free.port
        del free
        pipes = [FORKS.Pipe() for _ in range(processes)]
        self._ends = [ours for ours, _ in pipes]
        given = [theirs for _, theirs in pipes], device, port, beside, load
        self._process = FORKS.Process(target=_fork, args=given, daemon=True)
        self._process.start()
        for _, theirs in pipes:
            theirs.close()
        for rank, end in enumerate(self._ends):
            assert end.poll(_SECONDS), f"rank {rank} did not start"
            end.recv()

    def run(self, size, body, *arguments, lost=()):
        """Calls body(group, *arguments) on each rank of a group of that size, and returns the
        results of the ranks that are not in `lost`; those end in the call."""
        for end in self._ends[:size]:
            end.send((size, body.__module__, body.__name__, arguments))
        answers = []
        for rank, end in enumerate(self._ends[:size]):
            if rank in lost:
                continue
            assert end.poll(_SECONDS), f"rank {rank} of {size} does not answer"
            answers.append(end.recv())
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def close(self):
        for end in self._ends:
            with contextlib.suppress(OSError):  # of a rank that has ended
                end.send(None)
        self._process.join(10)
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
