"""Runs programs whose tensors are on the CPU with winnow.compat.deep_ep on GPUs.

The arguments of a call are copied to the GPU and its results back, so that the checks of a program
apply to GPUs too.
"""

import threading
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ranks import new_stream, run_all
from winnow.compat import deep_ep
from winnow.compat.deep_ep.elastic import EPHandle

from winnow import expert_parallel
from winnow.expert_parallel import InProcessWorld


class _Call:
    """The copies of one call."""

    def __init__(self):
        self.copies = []  # (on the GPU, on the CPU)

    def give(self, value):
        if isinstance(value, _Handle):
            return value.original
        if isinstance(value, _Attributes):
            return value._original
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            copy = value.to("cuda")
            if value.layout == torch.strided:
                self.copies.append((copy, value))
            return copy
        if type(value) in (tuple, list):
            return type(value)(self.give(one) for one in value)
        return value

    def take(self, value):
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            assert value.dtype == torch.int64, "a result on the CPU that is not a count"
            return value
        if isinstance(value, torch.Tensor):
            for ours, theirs in self.copies:
                if ours is value:
                    return theirs
            copy = torch.empty_like(value, device="cpu")
            self.copies.append((value, copy))
            return copy
        if isinstance(value, deep_ep.EventOverlap):
            if value.event is not None:
                value.current_stream_wait()
            return value
        if isinstance(value, EPHandle):
            return _known.setdefault(id(value), _Attributes(value, self))
        if isinstance(value, tuple) and type(value) is not tuple:
            return _Handle(self.take(one) for one in value).of(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self.take(one) for one in value)
        if callable(value):  # a hook

            def hook():
                value()
                self.fill()

            return hook
        return value

    def fill(self):
        torch.cuda.current_stream().synchronize()
        for ours, theirs in self.copies:
            if theirs.numel() and theirs.stride() == ours.stride():
                theirs.copy_(ours)


class _Handle(tuple):
    def of(self, original):
        self.original = original
        return self


# {id(handle): _Attributes, which keeps the handle alive}
_known = {}


class _Attributes:
    def __init__(self, original, call):
        self._original, self._call = original, call

    def __getattr__(self, name):
        got = self._call.take(getattr(self._original, name))
        self._call.fill()
        return got


def _on_gpu(function):
    def called(*arguments, **options):
        call = _Call()
        given = [call.give(one) for one in arguments]
        named = {name: call.give(one) for name, one in options.items()}
        got = call.take(function(*given, **named))
        call.fill()
        return got

    return called


class _Buffer:
    def __init__(self, kind, *arguments, **options):
        self._buffer = kind(*arguments, **options)

    def __getattr__(self, name):
        value = getattr(self._buffer, name)
        return _on_gpu(value) if callable(value) else value


def module():
    """The replacement of winnow.compat.deep_ep in programs."""

    def of(kind):
        return lambda *arguments, **options: _Buffer(kind, *arguments, **options)

    return SimpleNamespace(
        Buffer=of(deep_ep.Buffer),
        HybridEPBuffer=of(deep_ep.HybridEPBuffer),
        ElasticBuffer=of(deep_ep.ElasticBuffer),
        indices_to_map=_on_gpu(deep_ep.indices_to_map),
        EventOverlap=deep_ep.EventOverlap,
    )


def use(patch=None):
    """Makes the programs of this process run on GPUs, until the end or that of a MonkeyPatch."""
    import deep_ep_low_latency
    import deep_ep_oracle
    import deep_ep_programs
    import deep_ep_refusals

    replace = setattr if patch is None else patch.setattr
    replace(deep_ep_oracle, "on_gpu", True)
    for programs in (deep_ep_programs, deep_ep_low_latency, deep_ep_refusals):
        replace(programs, "deep_ep", module())
    for programs in (deep_ep_programs, deep_ep_low_latency):
        replace(programs, "_buffers", {})


class _Group:
    """A process group for a rank that is a thread, as far as deep_ep uses one."""

    def __init__(self, rank, worlds, size):
        self._rank, self.worlds, self._size = rank, worlds, size
        self.group_name = f"rank {rank} of {size}"
        self.store = worlds["store"]

    def rank(self):
        return self._rank

    def size(self):
        return self._size


WORLDS = (2, 3, 4, 6)  # of ranks that share a GPU


class Threads:
    """Ranks that are threads of this process, each with a stream, on one GPU."""

    def __init__(self):
        self._groups = {}
        self._lock = threading.Lock()
        self._before = (expert_parallel.rendezvous.connect, expert_parallel.rendezvous._store_of)
        expert_parallel.rendezvous.connect = self._connect
        expert_parallel.rendezvous._store_of = lambda group: group.store
        self._streams = [new_stream() for _ in range(max(WORLDS))]

    def close(self):
        expert_parallel.rendezvous.connect, expert_parallel.rendezvous._store_of = self._before
        expert_parallel.rendezvous._begun.clear()

    def _connect(self, group, prefix, rank, world_size, device, timeout):
        with self._lock:
            if prefix not in group.worlds:
                group.worlds[prefix] = InProcessWorld(world_size)
            world = group.worlds[prefix]
        return world.transport(rank), world.store()

    def run(self, size, body, *arguments, alone_first=True):
        """As Pool.run(). `alone_first`: a world of one rank loads the kernels, since none may be
        loaded while another rank's kernel waits."""
        for world in sorted({1, size} if alone_first else {size}):
            if world not in self._groups:
                worlds = {"store": dist.HashStore()}
                self._groups[world] = [_Group(rank, worlds, world) for rank in range(world)]
            groups = self._groups[world]

            def on_stream(rank, groups=groups):
                with self._streams[rank]:
                    return body(groups[rank], *arguments)

            run_all(world, on_stream)
