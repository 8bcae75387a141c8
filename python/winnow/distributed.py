"""Starts torch.distributed for programs that were written for Triton-distributed."""

import os
import random
from datetime import timedelta
from typing import Optional, Tuple

import torch
import torch.distributed as dist

from winnow.expert_parallel.rendezvous import gpu_for_each_rank

__all__ = ["finalize_distributed", "initialize_distributed"]


def initialize_distributed(
    seed: Optional[int] = None, initialize_shmem: bool = True, *, timeout: Optional[float] = None
) -> Tuple[int, int]:
    """Joins the ranks that torchrun has started, and makes this process's run repeatable.

    Reads RANK, LOCAL_RANK and WORLD_SIZE; alone where torchrun sets none. Where the machine has a
    GPU for each of its ranks, makes that of LOCAL_RANK the current device. Starts the default
    process group (gloo, with nccl for CUDA tensors), in whose store layers meet, seeds torch, numpy
    and random with 3 + seed, and asks torch for deterministic algorithms, with a warning where it
    has none.

    Args:
        seed: None: the rank.
        initialize_shmem: without effect: a layer starts what it needs.
        timeout: seconds that a rank waits for the others to join, and in what it calls of
            torch.distributed later; None: 30 minutes. Layers have a timeout of their own.

    Returns:
        (rank, world_size), where Triton-distributed's function of this name returns the process
        group: that is torch.distributed.group.WORLD.

    Raises:
        RuntimeError: WINNOW_RANK is set and RANK is not; use torchrun.
        torch.distributed.DistError: a rank that does not join within the timeout.
    """
    if "RANK" not in os.environ and "WINNOW_RANK" in os.environ:
        raise RuntimeError(
            "initialize_distributed: start this program with torchrun, which sets RANK"
        )
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available() and gpu_for_each_rank()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        nccl = cuda and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        alone = dist.HashStore() if "MASTER_ADDR" not in os.environ and world_size == 1 else None
        wait = timedelta(seconds=1800 if timeout is None else timeout)
        dist.init_process_group(
            backend, store=alone, rank=rank, world_size=world_size, timeout=wait
        )
    _seed(3 + (rank if seed is None else seed))
    return rank, world_size


def finalize_distributed() -> None:
    """Leaves the default process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _seed(seed: int) -> None:
    torch.set_deterministic_debug_mode("warn")  # the same, without importing all of inductor
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)
