"""How the ranks of a torch process group meet. The one place that chooses a transport."""

from collections import Counter
from typing import Any, Tuple

import torch
import torch.distributed as dist

from winnow._winnow.expert_parallel import (
    AllToAll,
    InProcessWorld,
    Store,
    Transport,
    create_shared_memory,
)
from winnow.errors import Error, InvalidArgument

# How ranks whose tensors are on that device reach each other.
_TRANSPORTS = {"cpu": create_shared_memory}

# Worlds that this process has made, by group: every rank makes the same ones in the same order.
_made: Counter = Counter()


def default_device() -> torch.device:
    """That of this process's GPU where the library can use it, else the CPU."""
    cuda = torch.cuda.is_available() and "cuda" in _TRANSPORTS
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def connect(group: Any, rank: int, world_size: int, device: torch.device) -> Tuple[Transport, Any]:
    """Collective: this rank's transport, and the store in which its layers meet."""
    if device.type not in _TRANSPORTS:
        error = Error(
            f"expert_parallel::AllToAll: expert_parallel has no {device.type} backend in this build"
        )
        error.operation, error.code = "expert_parallel::AllToAll", "unsupported"
        raise error
    if world_size == 1 and device.type == "cpu":
        world = InProcessWorld(1)
        return world.transport(rank), world.store()
    store = _store_of(group)
    number = _made[getattr(group, "group_name", "")]
    _made[getattr(group, "group_name", "")] += 1
    make = _TRANSPORTS[device.type]
    return make(store, rank, world_size, prefix=f"winnow/{number}"), store


def barrier_layer(group: Any, rank: int, world_size: int, local_world_size: int) -> AllToAll:
    """Collective: a layer as small as can be, for its barriers."""
    transport, store = connect(group, rank, world_size, torch.device("cpu"))
    return AllToAll(
        transport,
        store,
        max_tokens=1,
        hidden=4,
        topk=1,
        experts=world_size,
        dtype="float32",
        local_world_size=local_world_size,
    )


def _store_of(group: Any) -> Store:
    if not dist.is_initialized():
        text = "expert_parallel::AllToAll: ep_group: want a process group, got none: call "
        raise InvalidArgument(text + "winnow.distributed.initialize_distributed() first")
    group = dist.group.WORLD if group is None else group
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)  # torch before 2.7
