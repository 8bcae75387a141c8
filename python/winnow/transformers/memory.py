"""The peak memory of a call."""

import ctypes
import gc
from pathlib import Path
from typing import Any, Callable, Tuple

import torch


def _resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(name + ":")[1].split()[0])


def peak(call: Callable[[], Any], device: torch.device) -> Tuple[Any, int]:
    """What `call` returns, and the bytes that it needs at most beside what there is before it.

    On a GPU these are bytes of torch's allocator; on the CPU those of this process that are
    resident, as Linux counts them.

    Raises:
        OSError: on the CPU, this system does not count them.
        torch.OutOfMemoryError: the call does not fit.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # what earlier calls have given back would be taken for free
    Path("/proc/self/clear_refs").write_text("5")  # the highest value begins anew
    before = _resident("VmRSS")
    result = call()
    return result, _resident("VmHWM") - before
