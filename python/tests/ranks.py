"""The ranks of a world as threads of this process."""

import contextlib
import re
import threading

from processes import forked

import winnow
from winnow.expert_parallel import AllToAll, InProcessWorld


def run_each(world_size, body, seconds=60):
    """body(rank) on a thread per rank: what each returned, or the exception that it raised."""
    results = [None] * world_size

    def work(rank):
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a rank hangs"
    return results


def run_all(world_size, body):
    """The same, where no rank may fail."""
    results = run_each(world_size, body)
    failed = [rank for rank in range(world_size) if isinstance(results[rank], BaseException)]
    for rank in failed:
        print(f"rank {rank}: {results[rank]!r}")
    for rank in failed:
        raise results[rank]
    return results


def all_refuse(outcomes, text):
    """Every rank raised a ValueError that begins with this pattern, or has it, and names the
    argument."""
    for outcome in outcomes:
        assert isinstance(outcome, ValueError) and isinstance(outcome, winnow.Error), outcome
        assert re.search(text, str(outcome)), outcome
        named = re.search(r"(\w+): want ", str(outcome))
        assert outcome.argument == (named[1] if named else "")


def new_stream():
    """Makes a stream, which ranks on one GPU must not share, torch's current one for a while."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # its memory comes from here later
    return torch.cuda.stream(stream)


def spawn(body, arguments, processes):
    """body(rank, *arguments) in each of the processes, which all come from one that has imported
    the body's module."""
    import torch

    given = body, arguments, processes
    torch.multiprocessing.start_processes(_fork, given, daemon=False, start_method="forkserver")


def _fork(_, *given):
    import torch

    torch.multiprocessing.start_processes(*given, start_method="fork")


def torchrun(ranks, *command, first="", **options):
    """What torchrun prints and how it ends, whose processes come from one that has run the program
    `first`. `command`: a program, or -m and a package, and arguments."""
    program = f"""
{first}
from processes import execute
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

here = {{"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "here"}}
config = LaunchConfig(1, 1, {ranks}, **here, max_restarts=0, start_method="fork")
elastic_launch(config, execute)(*{[str(one) for one in command]})
"""
    return forked("-c", program, **options)


def meet(rank, world, folder, backend="gloo"):
    """Makes this process a rank of torch's world, which it meets in the folder."""
    import torch

    torch.set_num_threads(1)
    winnow.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{world}"
    torch.distributed.init_process_group(backend, meeting, rank=rank, world_size=world)


class Ranks:
    """A world with a layer on every rank; on a GPU each with a stream of its own."""

    def __init__(self, world_size, **config):
        config = {"timeout": 30, **config}
        on_gpu = str(config.get("device", "cpu")).startswith("cuda")
        self.streams = [
            new_stream() if on_gpu else contextlib.nullcontext() for _ in range(world_size)
        ]
        self.world = InProcessWorld(world_size)
        self.transports = [self.world.transport(rank) for rank in range(world_size)]
        self.layers = run_all(
            world_size, lambda rank: AllToAll(self.transports[rank], self.world.store(), **config)
        )

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        for layer in self.layers:
            layer.close()

    def run(self, body):
        """body(layer, rank) on every rank."""
        return run_all(len(self.layers), lambda rank: self._on_stream(body, rank))

    def try_run(self, body):
        return run_each(len(self.layers), lambda rank: self._on_stream(body, rank))

    def _on_stream(self, body, rank):
        with self.streams[rank]:
            return body(self.layers[rank], rank)
