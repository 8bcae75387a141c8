"""What all comparisons share: finding a peer, checking and timing both sides, the record.

A peer is a Python package that somebody has installed. It is imported, never fetched or built.
"""

import dataclasses
import datetime
import importlib
import importlib.metadata
import random
import statistics
import time
from typing import Any, Callable, Dict, List, Optional

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
    """The processes that take part, which repeat their calls equally often."""

    def __init__(self, device: torch.device, group: Any = None):
        self.device, self.group = device, group

    def greatest(self, number: int) -> int:
        if self.group is None:
            return number
        tensor = torch.tensor([number], device=self.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, self.group)
        return int(tensor.item())

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            torch.distributed.barrier(self.group)


class Side:
    """A call that is timed in turn with others."""

    def __init__(self, call: Callable[[], Any], world: World, seconds: float, graph: bool):
        self.world, self.call, self.calls_of_a_run, self.times = world, call, 1, []
        if graph and world.device.type == "cuda":
            self.call, self.calls_of_a_run = self._captured(call), CALLS_OF_A_GRAPH
        self.runs = 1
        once = self._time()  # warms up, too
        self.runs = world.greatest(max(1, round(seconds / max(min(once, self._time()), 1e-7))))

    def _captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        call()
        torch.cuda.synchronize(self.world.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_OF_A_GRAPH):
                call()
        return graph.replay

    def _time(self) -> float:
        """Seconds of all runs of a turn."""
        self.world.wait()
        if self.world.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(self.runs):
                self.call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self.runs):
            self.call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def turn(self) -> None:
        self.times.append(self._time() / (self.runs * self.calls_of_a_run))

    def median(self) -> float:
        return statistics.median(self.times)


def _product(device: torch.device) -> Callable[[], Any]:
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=product)


def measure(problem: Problem, world: World, repetitions: int, seconds: float) -> Dict[str, Any]:
    """A result of a record. Every peer is checked first; then all sides run in turn, at random."""
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
    if problem.flops > 0:
        calls["product"] = _product(world.device)
    sides = {name: Side(call, world, seconds, problem.graph) for name, call in calls.items()}
    order, generator = list(sides.values()), random.Random(1)
    for _ in range(repetitions):
        generator.shuffle(order)
        for side in order:
            side.turn()
    result = {
        "operation": problem.operation,
        "benchmark": problem.benchmark,
        "shape": problem.shape,
        "seconds": sides["winnow"].median(),
        "peers": peers,
    }
    for peer in peers:
        if peer["name"] in sides:
            peer["seconds"] = sides[peer["name"]].median()
            peer["times_as_fast"] = peer["seconds"] / result["seconds"]
    if problem.flops > 0:
        size = 8192 if world.device.type == "cuda" else 256
        result["gflops_per_second"] = problem.flops / result["seconds"] * 1e-9
        result["ceiling"], ceiling = "matmul", sides["product"].median()
        result["ceiling_seconds"] = ceiling
        result["ceiling_gflops_per_second"] = 2.0 * size**3 / ceiling * 1e-9
        result["ratio"] = result["gflops_per_second"] / result["ceiling_gflops_per_second"]
    return result


def report(results: List[Dict[str, Any]], world: World, repetitions: int) -> Dict[str, Any]:
    """What `winnow bench --json` prints, of these results."""
    gpu = world.device.type == "cuda"
    where = torch.cuda.get_device_name(world.device) if gpu else "CPU"
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "version": winnow.__version__,
        "date": date,
        "where": where,
        "repetitions": repetitions,
        "results": results,
    }


def lines(result: Dict[str, Any]) -> List[str]:
    """The rows of the table for a result."""
    first = f"{result['operation']:28} {result['benchmark']:32} {1e6 * result['seconds']:11.1f} us"
    rows: List[str] = []
    for peer in result["peers"]:
        text: Optional[str] = peer.get("error")
        if text is None:
            text = f"{1e6 * peer['seconds']:11.1f} us  {peer['times_as_fast']:.2f} times as fast"
        head = first if not rows else " " * len(first)
        rows.append(f"{head}  {peer['name']} {peer['version']}: {text}")
    return rows
