"""``torchrun --nproc-per-node N -m winnow bench context_parallel``: a training step of one
attention layer of DeepSeek-V3.2 whose sequence the ranks share, beside the same step without what
moves between the ranks.

The latter is the time of one rank with its part of the queries if it had the rows of all ranks
already: each collective returns at once what it returned in a step before. Times and peak memory
are the largest of all ranks; the memory is that beside the layer's weights and input. On GPUs the
layer has its real dimensions, in bfloat16; on the CPU it is small.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from winnow.context_parallel.group import KEYS, ContextParallel
from winnow.transformers.bench import _Layer, add_arguments
from winnow.transformers.memory import peak
from winnow.transformers.placed import Placed
from winnow.transformers.registry import prepare

_REPETITIONS = 5
_TOKENS = {"cpu": [512], "cuda": [131072, 524288]}
_LIMIT = 1.15  # of the time of the step without communication


class _Recorded(ContextParallel):
    """Records the results of all collectives in the first step. In later steps it returns them
    without communication, and takes it that the ranks agree."""

    def __init__(self, group: dist.ProcessGroup, keys: str):
        super().__init__(group, "balanced", keys)
        self._results: List[Tensor] = []
        self._at = 0
        self.records = True

    def again(self) -> None:
        """From now on collectives return what was recorded, from its beginning."""
        self.records, self._at = False, 0

    def agree(self, call: str, **values: str) -> None:
        if self.records:
            super().agree(call, **values)

    def _move(self, begin: Callable[[], dist.Work], result: Tensor) -> Optional[dist.Work]:
        if self.records:
            begin().wait()
            self._results.append(result.clone())
        else:
            result.copy_(self._results[self._at])
            self._at += 1
        return None

    def begin_all_gather(self, whole: Tensor, local: Tensor) -> Optional[dist.Work]:
        begin = super().begin_all_gather
        return self._move(lambda: begin(whole, local), whole)

    def begin_reduce_scatter(self, local: Tensor, whole: Tensor) -> Optional[dist.Work]:
        begin = super().begin_reduce_scatter
        return self._move(lambda: begin(local, whole), local)

    def begin_broadcast(self, rows: Tensor, source: int) -> Optional[dist.Work]:
        begin = super().begin_broadcast
        return self._move(lambda: begin(rows, source), rows)

    def begin_reduce(self, gradient: Tensor, target: int) -> Optional[dist.Work]:
        begin = super().begin_reduce
        return self._move(lambda: begin(gradient, target), gradient)


class _SharedLayer(_Layer):
    """A layer whose sequence the ranks of a context share."""

    def __init__(self, device: torch.device, context: ContextParallel):
        super().__init__(device)
        self.context = context

    def positions(self, tokens: int) -> Tensor:
        self.tokens_of_ranks = self.context.tokens(tokens)
        return self.tokens_of_ranks.shard(super().positions(tokens), 1)

    def mask(self, hidden: Tensor, positions: Tensor) -> Placed:
        ranges = torch.stack((torch.zeros_like(positions), positions + 1), -1).int()
        return Placed(self.tokens_of_ranks, ranges, positions, None)


def _slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """The median of some steps, which all ranks begin together; each counts its slowest rank."""
    times = []
    for _ in range(_REPETITIONS):
        dist.barrier()
        begun = time.perf_counter()
        run()
        times.append(_slowest(time.perf_counter() - begun, device))
    return statistics.median(times)


def measure(device: torch.device, lengths: List[int], keys: str) -> Iterator[Dict[str, Any]]:
    """A row for each length of the sequence, the same on all ranks. A collective call."""
    prepare(_SharedLayer.family)
    for tokens in lengths:
        context = ContextParallel(dist.group.WORLD, "balanced", keys)
        shared = _SharedLayer(device, context).call("winnow", "training step", tokens)
        _, needed = peak(shared, device)
        seconds = _seconds(shared, device)
        del shared
        recorded = _Recorded(dist.group.WORLD, keys)
        silent = _SharedLayer(device, recorded).call("winnow", "training step", tokens)
        silent()

        def alone(silent=silent, recorded=recorded) -> None:
            recorded.again()
            silent()

        alone()
        without = _seconds(alone, device)
        ratio = seconds / without
        yield {
            "operation": "context_parallel",
            "benchmark": f"training step, {keys}, {tokens} tokens, {context.size} ranks",
            "device": device.type,
            "seconds": seconds,
            "seconds_without_communication": without,
            "ratio": ratio,
            "peak_bytes": int(_slowest(needed, device)),
            **({"limit": _LIMIT, "reached": ratio <= _LIMIT} if device.type == "cuda" else {}),
        }


def _line(row: Dict[str, Any]) -> str:
    text = (
        f"{row['benchmark']:56}{1e3 * row['seconds']:10.1f} ms"
        f"{row['peak_bytes'] / 2**30:9.2f} GiB"
        f"   {row['ratio']:.2f} of {1e3 * row['seconds_without_communication']:.1f} ms"
    )
    if "reached" in row:
        text += f"   limit {row['limit']}  {'reached' if row['reached'] else 'MISSED'}"
    return text


def main(arguments: List[str]) -> int:
    """Prints the table on rank 0; 1 if --check is given and a limit is missed."""
    description = str(__doc__).replace("``", "")
    parser = argparse.ArgumentParser(prog="winnow bench context_parallel", description=description)
    add_arguments(parser)
    parser.add_argument("--keys", choices=KEYS, nargs="+", default=KEYS[:1],
                        help=f"one or both; default: {KEYS[0]}")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is missed")
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun, which sets LOCAL_RANK")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device(options.device)
    dist.init_process_group()  # NCCL for GPUs, and gloo, through which ranks agree
    rows = []
    try:
        for keys in options.keys:
            for row in measure(device, options.tokens or _TOKENS[device.type], keys):
                rows.append(row)
                if not options.json and dist.get_rank() == 0:
                    print(_line(row), flush=True)
        if options.json and dist.get_rank() == 0:
            print(json.dumps(rows, indent=2))
    finally:
        dist.destroy_process_group()
    return 1 if options.check and not all(row.get("reached", True) for row in rows) else 0
