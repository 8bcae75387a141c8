"""How the ranks of a group reach each other, and what is made on that."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Tuple, TypeVar

import torch

from winnow.compat.deep_ep._agreement import Agreement
from winnow.errors import InvalidArgument
from winnow.expert_parallel import rendezvous

Made = TypeVar("Made")


class _World(NamedTuple):
    prefix: str  # which one it is
    absent: Tuple[int, ...]
    store: Any
    transports: Dict[int, Any]  # of the ranks for which this one acts


# A process has one NVSHMEM world: everything that stands on a group shares its transport.
_worlds: "weakref.WeakKeyDictionary[Any, Dict[torch.device, _World]]" = weakref.WeakKeyDictionary()


def world_of(group: Any, device: torch.device) -> Optional[str]:
    """Which one this rank has. Before an agreement to make() something all ranks say it: as "world"
    of their message."""
    world = _worlds.get(group, {}).get(device)
    return world and world.prefix


def make(
    group: Any, device: torch.device, agreement: Agreement, part: Callable[[Any, Any], Made]
) -> Dict[int, Made]:
    """part(transport, store), which is collective over all ranks of the group, by rank.

    For ranks that are absent, which only on the CPU any may be, the lowest one that is there makes
    the parts, too. Nobody uses them; but so ranks and experts keep their numbers and places.
    """
    worlds = _worlds.setdefault(group, {})
    try:
        worlds[device] = world = _joined(worlds.get(device), group, device, agreement)
        return _at_once(world.transports, lambda rank: part(world.transports[rank], world.store))
    except InvalidArgument:
        raise
    except BaseException:  # an interrupt, too: nothing else can be made there
        worlds.pop(device, None)
        raise


def _joined(
    world: Optional[_World], group: Any, device: torch.device, agreement: Agreement
) -> _World:
    """The one that all have, or a new one, also where one rank alone has given it up."""
    if world is not None and world.absent == agreement.absent:
        if all(said.get("world") == world.prefix for said in agreement.heard.values()):
            return world
    prefix, size = f"{agreement.prefix}/world", group.size()
    acts_for_absent = group.rank() == min(agreement.heard)
    ranks = (group.rank(), *(agreement.absent if acts_for_absent else ()))
    made = _at_once(ranks, lambda rank: rendezvous.connect(group, prefix, rank, size, device, None))
    transports = {rank: transport for rank, (transport, _) in made.items()}
    return _World(prefix, agreement.absent, made[group.rank()][1], transports)


def _at_once(ranks: Iterable[int], call: Callable[[int], Made]) -> Dict[int, Made]:
    """call(rank) of each, of which one waits for the others."""
    ranks = list(ranks)
    if len(ranks) == 1:
        return {ranks[0]: call(ranks[0])}
    with ThreadPoolExecutor(len(ranks)) as threads:
        results = {rank: threads.submit(call, rank) for rank in ranks}
    return {rank: result.result() for rank, result in results.items()}
