"""What all comparisons share: finding a peer, checking and timing both sides, the record.

A peer is a Python package that somebody has installed. It is imported, never fetched or built.
"""

import dataclasses
import datetime
import functools
import importlib
import importlib.metadata
import inspect
import random
import statistics
import time
from typing import Any, Callable, Dict, List

import torch

import winnow

PEERS = {  # the module: what pip calls it, and where it comes from
    "cudnn": ("nvidia-cudnn-frontend", "https://github.com/NVIDIA/cudnn-frontend"),
    "deep_ep": ("deep_ep", "https://github.com/deepseek-ai/DeepEP"),
    "deep_gemm": ("deep_gemm", "https://github.com/deepseek-ai/DeepGEMM"),
    "flash_mla": ("flash_mla", "https://github.com/deepseek-ai/FlashMLA"),
}
CALLS_OF_A_GRAPH = 20


def find(name: str) -> Any:
    """The module of a peer, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def of_hopper(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FlashMLA with Hopper's kernels, which sgl-flash-mla has behind an argument."""
    if "use_legacy" in inspect.signature(function).parameters:
        return functools.partial(function, use_legacy=True)
    return function


def missing(name: str) -> str:
    """What to say of a peer that find() has not found."""
    return f"{name} is not installed, so it is not measured; it comes from {PEERS[name][1]}"


def version(name: str) -> str:
    """The versions of one peer, or of several that are named "one + another"."""
    versions = []
    for module in name.split(" + "):
        distribution = PEERS.get(module, (module,))[0]
        try:
            versions.append(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            versions.append(str(getattr(find(module), "__version__", "unknown")))
    return " + ".join(versions)


def cosine(ours: Any, theirs: Any) -> float:
    """The least cosine between two tensors, or between two lists of tensors."""
    if isinstance(ours, (tuple, list)):
        return min(cosine(a, b) for a, b in zip(ours, theirs, strict=True))
    a, b = (tensor.reshape(-1).double() for tensor in (ours, theirs))
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


def chosen(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The share of their chosen rows that are ours, too; a query's rows have no order."""
    a, b = (rows.reshape(-1, rows.shape[-1]).int().sort().values for rows in (ours, theirs))
    places = torch.searchsorted(a, b).clamp(max=a.shape[-1] - 1)
    return float((a.gather(-1, places) == b).double().mean())


@dataclasses.dataclass
class Problem:
    """One operation on one set of inputs: Winnow's call, and those of its peers by name."""

    operation: str
    benchmark: str
    shape: str
    winnow: Callable[[], Any]
    peers: Dict[str, Callable[[], Any]]
    agreement: Callable[[Any, Any], float]
    least: float
    """Peers whose results agree less than that are not timed."""
    flops: float = 0
    graph: bool = False
    """Calls are so short that a CUDA graph of several is timed, to leave out the host."""


class World:
    """The processes that take part; all of them repeat a call equally often."""

    def __init__(self, device: torch.device, group: Any = None):
        self.device, self.group, self.gpu = device, group, device.type == "cuda"

    def greatest(self, number: int) -> int:
        """The greatest of the ranks' numbers."""
        tensor = torch.tensor([number], device=self.device)
        if self.group is not None:
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, self.group)
        return int(tensor.item())

    def time(self, call: Callable[[], Any], calls: int) -> float:
        """Seconds of so many calls; all ranks begin together."""
        if self.gpu:
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            torch.distributed.barrier(self.group)
        if not self.gpu:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def _graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """Several calls as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_OF_A_GRAPH):
            call()
    return graph.replay


def _medians(
    calls: Dict[str, Callable[[], Any]], world: World, repetitions: int, seconds: float, graph: bool
) -> Dict[str, float]:
    """Seconds of each call: all of them run in turn, in a random order each time."""
    graph = graph and world.gpu
    sides = {name: _graph(call) if graph else call for name, call in calls.items()}
    often, times, order = {}, {name: [] for name in sides}, list(sides)
    for name, call in sides.items():
        once = min(world.time(call, 1) for _ in range(2))  # the first warms up
        often[name] = world.greatest(max(1, round(seconds / max(once, 1e-7))))
    generator = random.Random(1)
    for _ in range(repetitions):
        generator.shuffle(order)
        for name in order:
            times[name].append(world.time(sides[name], often[name]) / often[name])
    share = CALLS_OF_A_GRAPH if graph else 1
    return {name: statistics.median(of_one) / share for name, of_one in times.items()}


def measure(problem: Problem, world: World, repetitions: int, seconds: float) -> Dict[str, Any]:
    """A result of a record. Peers with other results than Winnow's are not timed."""
    calls: Dict[str, Callable[[], Any]] = {"winnow": problem.winnow}
    peers: List[Dict[str, Any]] = []
    ours = problem.winnow()
    for name, call in problem.peers.items():
        peer: Dict[str, Any] = {"name": name, "version": version(name)}
        peers.append(peer)
        try:
            peer["agreement"] = problem.agreement(ours, call())
        except Exception as error:  # it may refuse this GPU, or be another version than we know
            peer["error"] = f"{type(error).__name__}: {error}"
            continue
        if peer["agreement"] >= problem.least:
            calls[name] = call
        else:
            peer["error"] = f"its results agree by {peer['agreement']:.6f}, not {problem.least}"
    size = 8192 if world.gpu else 256
    if problem.flops > 0:
        a, b, c = (torch.randn(size, size, device=world.device).bfloat16() for _ in range(3))
        calls["product"] = lambda: torch.matmul(a, b, out=c)
    medians = _medians(calls, world, repetitions, seconds, problem.graph)
    result = {
        "operation": problem.operation,
        "benchmark": problem.benchmark,
        "shape": problem.shape,
        "seconds": medians["winnow"],
        "peers": peers,
    }
    for peer in peers:
        if peer["name"] in medians:
            peer["seconds"] = medians[peer["name"]]
            peer["times_as_fast"] = peer["seconds"] / result["seconds"]
    if problem.flops > 0:
        result["gflops_per_second"] = problem.flops / result["seconds"] * 1e-9
        result["ceiling"], result["ceiling_seconds"] = "matmul", medians["product"]
        result["ceiling_gflops_per_second"] = 2.0 * size**3 / medians["product"] * 1e-9
        result["ratio"] = result["gflops_per_second"] / result["ceiling_gflops_per_second"]
    return result


def report(results: List[Dict[str, Any]], world: World, repetitions: int) -> Dict[str, Any]:
    """What `winnow bench --json` prints, of these results."""
    return {
        "version": winnow.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "where": torch.cuda.get_device_name(world.device) if world.gpu else "CPU",
        "repetitions": repetitions,
        "results": results,
    }


def lines(result: Dict[str, Any]) -> List[str]:
    """The rows of the table for a result."""
    head = f"{result['operation']:28} {result['benchmark']:32} {1e6 * result['seconds']:11.1f} us"
    rows: List[str] = []
    for peer in result["peers"]:
        text = peer.get("error")
        if text is None:
            text = (
                f"{1e6 * peer['seconds']:.1f} us, Winnow {peer['times_as_fast']:.2f} times as fast"
            )
        rows.append(f"{head}  {peer['name']} {peer['version']}: {text}")
    return rows
