"""How the ranks of a group reach each other, and how layers are made on that."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Tuple, TypeVar

import torch

from winnow.compat.deep_ep._agreement import Agreement
from winnow.errors import InvalidArgument
from winnow.expert_parallel import rendezvous

Made = TypeVar("Made")


class _World(NamedTuple):
    prefix: str  # identifies it
    absent: Tuple[int, ...]
    store: Any
    transports: Dict[int, Any]  # of the ranks for which this one acts


# A process has one NVSHMEM world, so everything that is made on a group shares its transport.
_worlds: "weakref.WeakKeyDictionary[Any, Dict[torch.device, _World]]" = weakref.WeakKeyDictionary()


def world_of(group: Any, device: torch.device) -> Optional[str]:
    """The prefix of the world that this rank has. In the agreement before make() all ranks send it,
    as "world" of their message."""
    world = _worlds.get(group, {}).get(device)
    return world and world.prefix


def make(
    group: Any, device: torch.device, agreement: Agreement, part: Callable[[Any, Any], Made]
) -> Dict[int, Made]:
    """part(transport, store) by rank; part is collective over all ranks of the group.

    Only on the CPU ranks may be absent. The lowest rank that is present makes their parts, too:
    nobody uses these, but ranks and experts keep their numbers.
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
    """The world that all ranks have; a new one if any rank has given it up."""
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
    """call(rank) of each rank, at the same time, since the calls wait for each other."""
    ranks = list(ranks)
    if len(ranks) == 1:
        return {ranks[0]: call(ranks[0])}
    with ThreadPoolExecutor(len(ranks)) as threads:
        results = {rank: threads.submit(call, rank) for rank in ranks}
    return {rank: result.result() for rank, result in results.items()}
