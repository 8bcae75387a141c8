"""How the ranks of a process group hear each other before they make something together.

Every agreement has a number, and every rank a key for it in the group's store, which is written
once: by the rank itself, or in its place by one that has masked it or no longer waits for it. So
all ranks read the same, and one that comes late fails at once and is at the next number with the
others.
"""

import json
from datetime import timedelta
from typing import Any, Dict, Iterable, List, NamedTuple, NoReturn, Tuple

from winnow._winnow.expert_parallel import default_timeout
from winnow.compat._refusal import argument_of
from winnow.errors import Error, InvalidArgument
from winnow.expert_parallel import rendezvous

_ROOM = "winnow/deep_ep"


class Agreement(NamedTuple):
    """What the ranks that take part have said, and who does not."""

    prefix: str  # of keys that no other agreement has
    heard: Dict[int, Dict[str, Any]]  # by rank, in ascending order
    absent: Tuple[int, ...]


def agree(
    group: Any,
    operation: str,
    message: Dict[str, Any],
    masked: Iterable[int] = (),
    shrink: bool = False,
) -> Agreement:
    """Collective over the ranks that none of them has masked.

    With `shrink` those that do not come in time are absent, too, else they are an error. Raises
    what any of them refuses.
    """
    rank, world = group.rank(), group.size()
    if world == 1:
        prefix = rendezvous.next_prefix(group, _ROOM)
        return _compared(operation, Agreement(prefix, {0: message}, ()))
    store = rendezvous._store_of(group)
    masked = sorted(masked)
    prefix = _begin(group, store, {**message, "masked": masked}, masked)
    for peer in masked:
        _stands(store, f"{prefix}/{peer}", json.dumps({"masked_by": rank}))
    keys = [f"{prefix}/{peer}" for peer in range(world)]
    said, cause = _read(store, keys, rank)
    late = [peer for peer, one in enumerate(said) if "late" in one]
    absent = {peer for one in said for peer in one.get("masked", ())}
    absent.update(peer for peer, one in enumerate(said) if "masked_by" in one)
    if late and (rank in late or not shrink):
        by, seconds = said[late[0]]["late"]
        text = f"rank {by} waited {seconds:g} s for ranks {', '.join(map(str, late))}"
        _raise(operation, Error, f"{text}, which did not come to the same call", cause)
    if rank in absent:
        by = [str(peer) for peer, one in enumerate(said) if rank in one.get("masked", ())]
        _raise(operation, Error, f"rank {rank} was masked by ranks {', '.join(by)}")
    absent.update(late)
    heard = {peer: one for peer, one in enumerate(said) if peer not in absent}
    return _compared(operation, Agreement(prefix, heard, tuple(sorted(absent))))


def _begin(group: Any, store: Any, message: Dict[str, Any], masked: List[int]) -> str:
    """Says the message in the next agreement of which this rank is a part.

    It is no part of those that others have begun while they had masked it, nor of those that only
    ranks have begun that it has masked itself.
    """
    mine = json.dumps(message)
    while True:
        prefix = rendezvous.next_prefix(group, _ROOM)
        stands = _stands(store, f"{prefix}/{group.rank()}", mine)
        by, _ = json.loads(stands).get("late", (None, 0))
        if stands == mine or by is not None and by not in masked:
            return prefix


def _stands(store: Any, key: str, text: str) -> str:
    """What stands there: this, where nothing has."""
    return store.compare_set(key, "", text).decode()


def _read(store: Any, keys: List[str], rank: int) -> Tuple[List[Dict[str, Any]], Any]:
    """What stands in all places, and the error of the store's wait, if any."""
    seconds, cause = default_timeout(), None
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:  # torch's DistStoreError
        cause = error
        for key in keys:
            if not store.check([key]):
                _stands(store, key, json.dumps({"late": [rank, seconds]}))
    return [json.loads(store.get(key)) for key in keys], cause


def _compared(operation: str, agreement: Agreement) -> Agreement:
    for rank, said in agreement.heard.items():
        if said.get("refusal"):
            _raise(operation, InvalidArgument, f"rank {rank}: {said['refusal']}")
    first = min(agreement.heard)
    want = agreement.heard[first].get("sizes")
    for rank, said in agreement.heard.items():
        if said.get("sizes") != want:
            names = "[hidden, topk, experts, dtype, device]"
            text = f"{want} on rank {first}, {said.get('sizes')} on rank {rank}"
            _raise(operation, InvalidArgument, f"{names} differs: {text}")
    return agreement


def _raise(operation: str, kind: type, text: str, cause: Any = None) -> NoReturn:
    error = kind(f"{operation}: {text}")
    error.operation, error.argument = operation, argument_of(text)
    if kind is Error:
        error.code = "timeout"
    raise error from cause
