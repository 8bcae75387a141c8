"""How the ranks of a torch process group connect. The one place that chooses a transport."""

import os
import warnings
from collections import Counter
from typing import Any, Optional, Tuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from winnow._refusal import refuse
from winnow._winnow import backends
from winnow._winnow.expert_parallel import (
    AllToAll,
    InProcessWorld,
    Store,
    Transport,
    create_nvshmem,
    create_shared_memory,
    nvshmem_obstacle,
)

# How many worlds this process has begun to make, by group and room; every rank begins the same ones
# in the same order. The key is not the group's name, since torch gives it to a later default group
# again, which may have processes that were in no group before.
_begun: "WeakKeyDictionary[Any, Counter]" = WeakKeyDictionary()


def next_prefix(group: Any, room: str = "winnow") -> str:
    """The prefix of the store's keys for a group's next world; None: the default group.

    Worlds of different rooms are counted separately. Call this before anything can fail on this
    rank alone, since the other ranks count the world, too.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:  # torch.distributed is not initialised: one rank alone
        return f"{room}/1"
    worlds = _begun.setdefault(group, Counter())
    worlds[room] += 1
    return f"{room}/{worlds[room]}"


def gpu_for_each_rank() -> bool:
    """Whether this machine has a GPU for each of its ranks, which torchrun counts.

    All ranks of a machine find the same.
    """
    return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _gpu_obstacle() -> str:
    """Why a layer of all ranks cannot be on this machine's GPUs; empty if it can. There are GPUs.

    All ranks of a machine find the same.
    """
    if not gpu_for_each_rank():
        return f"there are {os.environ['LOCAL_WORLD_SIZE']} ranks on this machine"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"want compute capability 9.0, got {major}.{minor}"
    for backend in backends():
        if backend["name"] == "cuda" and not backend["supported"]:
            return backend["reason"]
    return nvshmem_obstacle() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""


def default_device() -> torch.device:
    """This process's current GPU where a layer of all ranks can be on GPUs, else the CPU.

    If it is the CPU although there are GPUs, a RuntimeWarning says why.
    """
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu")
    obstacle = _gpu_obstacle()
    if not obstacle:
        return torch.device("cuda", torch.cuda.current_device())
    warnings.warn(
        f"winnow.expert_parallel: on the CPU, although this process sees {gpus} GPUs: {obstacle}",
        RuntimeWarning,
        stacklevel=4,  # the caller that makes a layer or a context
    )
    return torch.device("cpu")


def resolve(device: Any) -> torch.device:
    """A device with its index; None: default_device()."""
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def connect(
    group: Any,
    prefix: str,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: Optional[float],
) -> Tuple[Transport, Any]:
    """Collective: this rank's transport, and the store through which its layers connect."""
    if world_size == 1:
        world = InProcessWorld(1)
        return world.transport(rank), world.store()
    store = _store_of(group)
    if device.type == "cpu":
        made = create_shared_memory(store, rank, world_size, timeout=timeout, prefix=prefix)
    else:
        made = create_nvshmem(store, rank, world_size, device, timeout=timeout, prefix=prefix)
    return made, store


def barrier_layer(
    rank: int, world_size: int, local_world_size: int, timeout: Optional[float]
) -> AllToAll:
    """Collective: the smallest possible layer, made for its barriers."""
    prefix = next_prefix(None)
    device = default_device()
    transport, store = connect(None, prefix, rank, world_size, device, timeout)
    return AllToAll(
        transport,
        store,
        max_tokens=1,
        hidden=4,
        topk=1,
        experts=world_size,
        dtype="float32",
        local_world_size=local_world_size,
        timeout=timeout,
        device=device,
    )


def _store_of(group: Any) -> Store:
    if not dist.is_initialized():
        got = "none: call winnow.distributed.initialize_distributed() first"
        refuse("expert_parallel::AllToAll", "ep_group", "a process group", got)
    group = dist.group.WORLD if group is None else group
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)  # torch before 2.7
