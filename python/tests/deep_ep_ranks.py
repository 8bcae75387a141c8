"""Processes that are the ranks of gloo groups, for all tests of winnow.compat.deep_ep.

A test names a function of a module of this folder, which each process of a group calls with its
group and arguments. Processes take seconds to start, so tests share a pool.
"""

import functools
import importlib
import multiprocessing
import os
import sys
import traceback

PROCESSES = 6
_SECONDS = 240


@functools.cache  # a group of gloo has threads of its own
def alone():
    """A group of this process alone."""
    import torch.distributed as dist

    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _serve(rank, processes, device, port, connection, beside):
    sys.path[:0] = beside
    os.environ.update(OMP_NUM_THREADS="1", WINNOW_TIMEOUT_SECONDS="20")
    import torch
    import torch.distributed as dist

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
    precede the installed ones."""

    def __init__(self, processes=PROCESSES, device="cpu", beside=()):
        context = multiprocessing.get_context("spawn")
        import torch.distributed as dist

        free = dist.TCPStore("127.0.0.1", 0, 1, True)
        port = free.port
        del free
        self._ends, self._processes = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, processes, device, port, theirs, beside), daemon=True
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)
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
        for end, process in zip(self._ends, self._processes, strict=True):
            if process.is_alive():
                end.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
