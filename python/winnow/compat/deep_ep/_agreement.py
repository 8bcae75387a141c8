"""How the ranks of a process group exchange messages before they make something together.

Every agreement has a prefix, under which every rank has one key in the group's store. A key is
written once: by the rank itself, or in its place by a rank that has masked it or no longer waits
for it. So all ranks read the same. A rank that comes late fails at once and joins the others in
the next agreement.

Every message says what it is about: the method that was called, the buffer, and what is made. If
ranks come from different calls, they meet in the same agreement, and all of them hear of it. Calls
are counted, since a call may have failed in different places on different ranks: a rank takes no
part in an agreement of a call that is over for it.
"""

import contextlib
import json
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, NoReturn, Tuple, Union
from weakref import WeakKeyDictionary

from winnow._winnow.expert_parallel import default_timeout
from winnow.compat._refusal import error_of
from winnow.compat.deep_ep._entry import called
from winnow.errors import Error, InvalidArgument
from winnow.expert_parallel import rendezvous

_ROOM = "winnow/deep_ep"
_LONGEST_PAUSE = 0.05

# By group: how many calls were made; all ranks make the same ones.
_calls: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
# By group: whether the others no longer waited when this rank last came.
_came_late: "WeakKeyDictionary[Any, bool]" = WeakKeyDictionary()

# Maps each size of a layer to the argument that it belongs to, under the layers' names.
_SIZES = {
    "hidden": "hidden of input",
    "topk": "columns of expert_indices",
    "counted": "elements of tokens_per_expert",
    "dtype": "dtype of input",
    "device": "device of input",
}


class Agreement(NamedTuple):
    """What the ranks that take part have said, and which ranks are absent."""

    prefix: str  # of keys that no other agreement has
    heard: Dict[int, Dict[str, Any]]  # by rank, in ascending order
    absent: Tuple[int, ...]


def count_call(group: Any) -> None:
    _calls[group] = _calls.get(group, 0) + 1


def agree(
    group: Any,
    of: Dict[str, Any],
    message: Dict[str, Any],
    masked: Iterable[int] = (),
    shrink: bool = False,
) -> Agreement:
    """Collective over the ranks that none of them has masked.

    `of`: what must be the same on all ranks, besides the method that was called: "buffer", "makes",
    "sizes". With `shrink` a rank that does not come in time is absent, too; else it is an error.
    Raises what any rank refuses, and how the ranks differ.
    """
    rank, world = group.rank(), group.size()
    message = {"of": {"call": called(), **of}, "number": _calls.get(group, 0), **message}
    if world == 1:
        prefix = rendezvous.next_prefix(group, _ROOM)
        return _compared(Agreement(prefix, {0: message}, ()), message)
    try:
        store = rendezvous._store_of(group)
    except Error as error:  # which names the argument of winnow's own layer
        why = "group: want a process group of torch, got none: call init_process_group() first"
        raise error_of(InvalidArgument, called(), why) from error
    masked = sorted(masked)
    message["masked"] = masked
    prefix = _begin(group, store, message, masked)
    for peer in masked:
        _stands(store, f"{prefix}/{peer}", json.dumps({"masked_by": rank}))
    keys = [f"{prefix}/{peer}" for peer in range(world)]
    _await(store, keys, rank, message["number"])
    said = [_message(key, store.get(key), world) for key in keys]
    late = [peer for peer, one in enumerate(said) if "late" in one]
    absent = {peer for one in said for peer in one.get("masked", ())}
    absent.update(peer for peer, one in enumerate(said) if "masked_by" in one)
    for by, seconds, _ in (said[peer]["late"] for peer in late):
        if seconds is None:
            _fail(f"rank {by} was interrupted while it waited for the others", "interrupted")
    if late and (rank in late or not shrink):
        by, seconds, _ = said[late[0]]["late"]
        text = f"rank {by} waited {seconds:g} s for ranks {', '.join(map(str, late))}"
        _fail(f"{text}, which did not come to the same call", "absent")
    if rank in absent:
        by = [str(peer) for peer, one in enumerate(said) if rank in one.get("masked", ())]
        _fail(f"rank {rank} was masked by ranks {', '.join(by)}")
    absent.update(late)
    heard = {peer: one for peer, one in enumerate(said) if peer not in absent}
    ahead = max(heard, key=lambda peer: heard[peer]["number"])
    if all(_makes_buffer(one) for one in heard.values()):
        # Also those that have left out a call: from here all count the same.
        _calls[group] = heard[ahead]["number"]
    elif any(one["number"] != heard[ahead]["number"] for one in heard.values()):
        if message["number"] < heard[ahead]["number"]:
            _fail(f"rank {ahead} did not come to this call, but to a later one", "call_order")
        return agree(group, of, message, masked, shrink)
    return _compared(Agreement(prefix, heard, tuple(sorted(absent))), message)


def _makes_buffer(message: Dict[str, Any]) -> bool:
    """Whether it is of a constructor: a method's message names the buffer."""
    return "buffer" not in message["of"]


def _begin(group: Any, store: Any, message: Dict[str, Any], masked: List[int]) -> str:
    """Writes the message in the next agreement of which this rank is a part; returns the prefix.

    This rank skips an agreement in which others have masked it, one in which a rank that it has
    masked stopped waiting for it, and one that belongs to a call before its own. If it makes a
    buffer, and finds for the second time in turn that the others no longer wait, it has left out a
    call rather than come late: it skips what they have given up.
    """
    mine = json.dumps(message)
    while True:
        prefix = rendezvous.next_prefix(group, _ROOM)
        key = f"{prefix}/{group.rank()}"
        stands = _stands(store, key, mine)
        by, seconds, number = _message(key, stands, group.size()).get("late", (None, 0, 0))
        if stands == mine.encode():
            _came_late[group] = False
            return prefix
        if by is None or by in masked or number < message["number"]:
            continue
        interrupted = seconds is None
        if interrupted or not _makes_buffer(message) or not _came_late.get(group):
            _came_late[group] = not interrupted
            return prefix


def _stands(store: Any, key: str, text: str) -> bytes:
    """Writes the text to the key if it has none; returns the text that the key has then."""
    return store.compare_set(key, "", text)


def _await(store: Any, keys: List[str], rank: int, number: int) -> None:
    """Until all keys hold something. This rank writes to the keys of ranks that do not come in
    time, or do not come before it is interrupted."""
    seconds, begin = default_timeout(), time.monotonic()
    try:
        # Not store.wait(), during which Python handles no signal.
        while not store.check(keys):
            waited = time.monotonic() - begin
            if waited >= seconds:
                _stand_in(store, keys, [rank, seconds, number])
                break
            time.sleep(min(_LONGEST_PAUSE, 0.001 + waited / 10))
    except BaseException:
        with contextlib.suppress(RuntimeError):  # of the store; the others have their deadline
            _stand_in(store, keys, [rank, None, number])
        raise


# What a value in a message may be, in a world of so many ranks.
_Bounds = Callable[[Any, int], bool]


def _text(value: Any, world: int) -> bool:
    # JSON may hold halves of characters, which no text outside of Python has.
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _count(value: Any, world: int) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _rank(value: Any, world: int) -> bool:
    return _count(value, world) and value < world


def _if_any(of: _Bounds) -> _Bounds:
    return lambda value, world: value is None or of(value, world)


def _list_of(*bounds: _Bounds) -> _Bounds:
    """A list with one element for each of the bounds, or of any length if there is one bound."""

    def check(value: Any, world: int) -> bool:
        each = bounds * len(value) if isinstance(value, list) and len(bounds) == 1 else bounds
        return (
            isinstance(value, list)
            and len(value) == len(each)
            and all(of(one, world) for of, one in zip(each, value, strict=True))
        )

    return check


def _seconds(value: Any, world: int) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**31


def _size(value: Any, world: int) -> bool:
    return isinstance(value, (str, bool)) or _count(value, world)


def _sizes(value: Any, world: int) -> bool:
    return isinstance(value, dict) and all(_size(size, world) for size in value.values())


def _about(value: Any, world: int) -> bool:
    return _fields(value, _OF, world) and "call" in value


_OF = {"call": _text, "buffer": _count, "makes": _text, "sizes": _if_any(_sizes)}
# All that one rank reads of another in an agreement.
_MESSAGE = {
    "of": _about,
    "number": _count,
    "masked": _list_of(_rank),
    "refusal": _if_any(_text),
    "place": _list_of(_text, _if_any(_text)),  # host name and GPU
    "before": _count,  # the greatest number of a buffer of this rank
    "tokens": _count,
    "topk": _count,
    "notifiers": _list_of(_text),
    "world": _if_any(_text),
}
# In the place of a rank that does not come.
_STAND_INS = {"masked_by": _rank, "late": _list_of(_rank, _if_any(_seconds), _count)}


def _fields(value: Any, bounds: Dict[str, _Bounds], world: int) -> bool:
    return isinstance(value, dict) and all(
        name in bounds and bounds[name](field, world) for name, field in value.items()
    )


def _message(key: str, text: Union[str, bytes], world: int) -> Dict[str, Any]:
    """What a rank has written; an error for anything else, as programs share the store."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if _fields(said, _STAND_INS, world) and len(said) == 1:
        return said
    if _fields(said, _MESSAGE, world) and {"of", "number"} <= said.keys():
        return said
    why = f"{key} of the store holds {text[:80]!r}, which no rank has written"
    raise error_of(Error, called(), why, code="internal")


def _stand_in(store: Any, keys: List[str], late: List[Any]) -> None:
    for key in keys:
        if not store.check([key]):
            _stands(store, key, json.dumps({"late": late}))


def _compared(agreement: Agreement, mine: Dict[str, Any]) -> Agreement:
    """Returns the agreement, unless a rank refuses, differs, or lacks a field that `mine` has."""
    for rank, said in agreement.heard.items():
        if said.get("refusal"):
            raise error_of(InvalidArgument, called(), f"rank {rank}: {said['refusal']}")
    first = min(agreement.heard)
    want = agreement.heard[first]["of"]
    for rank, said in agreement.heard.items():
        if said["of"] != want:
            raise _difference(want, first, said["of"], rank)
    for rank, said in agreement.heard.items():
        if missing := mine.keys() - said.keys() - {"refusal"}:
            why = f"rank {rank} says nothing of {', '.join(sorted(missing))}"
            raise error_of(Error, called(), why, code="internal")
    return agreement


def _difference(
    want: Dict[str, Any], first: int, got: Dict[str, Any], rank: int
) -> InvalidArgument:
    what, a, b = "the call", _described(want), _described(got)
    sizes, others = want.get("sizes") or {}, got.get("sizes") or {}
    if want["call"] == got["call"] and want.get("buffer") == got.get("buffer"):
        for size in sizes if sizes.keys() == others.keys() else ():
            if sizes[size] != others[size]:
                what, a, b = _SIZES.get(size, size), sizes[size], others[size]
                break
    text = f"{what} differs: {a} on rank {first}, {b} on rank {rank}"
    fields = {"reason": "arguments_differ", "differing": what.split()[-1]}
    return error_of(InvalidArgument, called(), text, **fields)


def _described(of: Dict[str, Any]) -> str:
    """ "deep_ep.Buffer.dispatch of buffer 2, which makes a layer (hidden 256, topk 3)" """
    text = of["call"]
    if "buffer" in of:
        text += f" of buffer {of['buffer']}"
    if "makes" in of:
        text += f", which makes {of['makes']}"
    if sizes := of.get("sizes"):
        text += f" ({', '.join(f'{name} {size}' for name, size in sizes.items())})"
    return text


def _fail(text: str, reason: str = "") -> NoReturn:
    raise error_of(Error, called(), text, code="timeout", reason=reason)
