"""The layers of a process group: each is made when it is first needed, and again if too small.

Every rank makes the same calls in the same order, so every rank makes the same layers. Before a
layer is made, all ranks tell each other in the group's store what they need. The layer gets the
largest counts, and what one rank refuses all refuse.
"""

import contextlib
import socket
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    NoReturn,
    Optional,
    Set,
    Tuple,
)
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Dispatched, LowLatency, Notifier
from winnow.compat._refusal import refuse, refuse_call
from winnow.compat.deep_ep._agreement import Agreement, agree, count_call
from winnow.compat.deep_ep._entry import Why, called, text_of
from winnow.compat.deep_ep._worlds import make, world_of
from winnow.errors import Error, InvalidArgument

# Refusals of these arguments lead all ranks to an agreement: a rank wants a new layer instead of
# the last one, or the layer of the call is too small for it.
_ANOTHER = "another layer"
_TOO_SMALL = {"max_tokens", "topk"}
_WANTS_ANOTHER = f"{_ANOTHER}: want one that is new, got the last"

# The layers are made for so many SMs; a call may use fewer.
_MOST_SMS = 64

# Tests set the ranks per node here, which are otherwise counted.
ranks_per_node: Optional[int] = None


class Sizes(NamedTuple):
    """What a layer is made for. topk 0: the most experts per token that any rank has needed."""

    hidden: int
    topk: int
    experts: int
    dtype: torch.dtype
    device: torch.device
    counted: int = 0  # elements of the counts that a dispatch by ranks takes along; 0: none


class _LowLatencyMade(NamedTuple):
    absent: Tuple[int, ...]  # ranks that have no part in it
    layer: LowLatency
    parts: Dict[int, LowLatency]


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _local_world_size(hosts: List[str]) -> int:
    """Ranks per node: those of a host; 1 unless all hosts have as many, numbered consecutively."""
    local = ranks_per_node or hosts.count(hosts[0])
    blocks = [set(hosts[i : i + local]) for i in range(0, len(hosts), local)]
    if len(hosts) % local or any(len(block) != 1 for block in blocks):
        return 1
    return local


def _gpu() -> Optional[str]:
    """The uuid of torch's current GPU; None if torch uses no GPU yet, or gives no uuid."""
    if not torch.cuda.is_initialized():
        return None
    known = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(known.uuid) if hasattr(known, "uuid") else None


# The Layers of each group. They share its transports, which number the calls of all of them.
_of_group: "WeakKeyDictionary[Any, WeakSet[Layers]]" = WeakKeyDictionary()


def wrong_group(group: Any) -> Optional[Why]:
    if not (callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None))):
        return "group", "a process group of torch", type(group).__name__
    return None


def refuse_new(group: Any, why: Why) -> NoReturn:
    """Takes part in the constructor of a buffer, so that all ranks refuse it."""
    if (wrong := wrong_group(group)) is not None:
        refuse(called(), *wrong)
    _agree_new(group, {"refusal": text_of(why)})
    raise AssertionError("a refusal did not raise")


def _agree_new(group: Any, message: Dict[str, Any]) -> Agreement:
    """The agreement of a constructor. Like any other it forgets all layers if it fails, since the
    others may have failed in a call of a layer, and make new ones."""
    count_call(group)
    with _forgetting(group):
        agreement = agree(group, {}, message)
    if len({said["number"] for said in agreement.heard.values()}) > 1:
        _forget_all(group)  # as the ranks did whose call the others have left out
    return agreement


@contextlib.contextmanager
def _forgetting(group: Any) -> Iterator[None]:
    """If an agreement fails in it, forgets all layers of the group, unless all ranks have heard
    what is wrong."""
    try:
        yield
    except InvalidArgument:
        raise
    except BaseException:
        _forget_all(group)
        raise


def _forget_all(group: Any, broken: Any = None, apart: bool = False) -> None:
    for layers in _of_group.get(group, ()):
        layers._forget(broken, apart)
    if isinstance(broken, AllToAll):
        broken._broken = True


def check_room(layer: AllToAll, tokens: int) -> None:
    """In a call by with_layer(): refuses a dispatch on all ranks if it needs a larger layer."""
    if tokens > layer.max_tokens:
        layer._refuse_dispatch(f"max_tokens: want {tokens}, got {layer.max_tokens}")


class Layers:
    """The layers of one buffer on a group. The constructor is collective."""

    def __init__(self, group: Any, sm_count: int) -> None:
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self.sm_count = sm_count  # of the next calls
        self._made: Dict[Sizes, AllToAll] = {}
        self._notifiers: Dict[Tuple[int, torch.device], Notifier] = {}
        self._low_latency: Dict[Any, _LowLatencyMade] = {}
        self._masked: Set[int] = set()
        self._last: Optional[AllToAll] = None
        self._last_low_latency: Optional[LowLatency] = None
        self._closed = False
        self._own_columns: Dict[torch.device, Tensor] = {}
        others = _of_group.setdefault(group, WeakSet())
        before = max((layers.number for layers in others), default=0)
        message = {"place": [socket.gethostname(), _gpu()], "before": before}
        heard = _agree_new(group, message).heard
        self.number = 1 + max(said["before"] for said in heard.values())
        others.add(self)
        places = [said["place"] for said in heard.values()]
        self.local_world_size = _local_world_size([host for host, _ in places])
        mine = places[self.rank]
        # Also true if the GPU is not known.
        self.shares_gpu = mine[1] is None or places.count(mine) > 1

    def count_call(self) -> None:
        count_call(self.group)

    def dispatch(
        self, sizes: Sizes, input: Tensor, indices: Tensor, *, tokens: int = 0, **options: Any
    ) -> Tuple[AllToAll, Dispatched]:
        """AllToAll.dispatch() on a layer of these sizes, for `tokens` or more tokens a rank.

        With sizes.topk 0 the indices may have any number of columns; -1 fills those that only the
        layer has.
        """
        columns = indices.shape[1]
        # If the host does not wait, the others would learn too late that a layer is too small.
        grows = sizes.device.type != "cuda" or options.get("worst_case_rows", 0) == 0

        def call(layer: AllToAll) -> Dispatched:
            if grows:
                check_room(layer, len(input))
            if sizes.topk != 0:
                return layer.dispatch(input, indices, **options)
            padded = widened(indices, layer.topk)
            if padded is None:
                layer._refuse_dispatch(f"topk: want {columns}, got {layer.topk}")
            wide = {**options}
            if options.get("weights") is not None:
                wide["weights"] = widened(options["weights"], layer.topk, 0)
            return layer.dispatch(input, padded, **wide)

        made = self._made.get(sizes)
        if not grows and sizes.topk == 0 and made is not None and made.topk < columns:
            # Such calls have equally many columns on all ranks, so all ranks make a larger layer.
            del self._made[sizes]
        return self.with_layer(sizes, max(len(input), tokens), columns, call, grows)

    def with_layer(
        self, sizes: Sizes, tokens: int, topk: int, call: Any, grows: bool = True
    ) -> Tuple[AllToAll, Any]:
        """A layer of these sizes and the result of call(layer). With `grows`, if the layer is too
        small for a rank, all ranks learn it in the call and repeat the call with a larger layer."""
        self._check_open()
        if sizes not in self._made and self._last is not None:
            # If only this rank wants another layer, the others are in a call of the last one, where
            # they learn of it.
            self._speak(self._last, AllToAll._refuse_dispatch, _WANTS_ANOTHER, named(sizes))
        while True:
            layer = self._layer(sizes, tokens, topk)
            self._last = layer
            try:
                return layer, call(layer)
            except InvalidArgument as error:
                if error.argument == _ANOTHER:
                    self._make_anew(sizes, tokens, topk)
                    continue
                if not (grows and error.argument in _TOO_SMALL):
                    raise
                # Handles may still use the old layer, which is freed with the last of them.
                del self._made[sizes]
            except BaseException as error:
                self.forget_broken(layer, error, named(sizes))
                raise

    def _speak(
        self,
        layer: Any,
        tell: Callable[[Any, str], Any],
        text: str,
        sizes: Any = None,
        masked: Iterable[int] = (),
    ) -> None:
        """Takes part in the layer's call that the other ranks make, and refuses it: all ranks raise
        what any has refused. Returns only if a rank wants another layer: all ranks then go on to an
        agreement."""
        try:
            tell(layer, text)
        except InvalidArgument as error:
            if not _leads_to_agreement(error):
                raise
        except Error as error:
            self.forget_broken(layer, error, sizes, masked, None if sizes else text)
            raise

    def answer(self, error: InvalidArgument, sizes: Any, masked: Iterable[int] = ()) -> None:
        """If the error says that another rank goes on to an agreement, joins it, which raises how
        the ranks differ."""
        if _leads_to_agreement(error):
            self._agree({"sizes": sizes}, {}, masked)

    def _make_anew(self, sizes: Sizes, tokens: int, topk: int) -> None:
        """Joins the agreement to which another rank has gone. If that rank wants a layer of these
        sizes, all ranks make a new one; else raises how the ranks differ and keeps the layer."""
        kept = self._made.pop(sizes)
        try:
            self._layer(sizes, tokens, topk)
        except InvalidArgument:
            self._made[sizes] = kept
            raise

    def own_column(self, device: torch.device) -> Tensor:
        """int32 [W]: 1 for this rank, 0 for the others."""
        if device not in self._own_columns:
            column = [int(rank == self.rank) for rank in range(self.world_size)]
            # torch.tensor() waits for the copy, so that calls of other streams may read it.
            self._own_columns[device] = torch.tensor(column, dtype=torch.int32, device=device)
        return self._own_columns[device]

    @property
    def call_sms(self) -> int:
        return max(1, min(self.sm_count, _MOST_SMS))

    def notifier(self, experts: int, device: torch.device) -> Notifier:
        """The notifier for counts that travel without tokens. Collective where it is made."""
        self._check_open()
        if (experts, device) not in self._notifiers:

            def part(transport: Any, store: Any) -> Notifier:
                return Notifier(
                    transport,
                    store,
                    experts=experts,
                    local_world_size=self.local_world_size,
                    device=device,
                )

            of = {"makes": "a notifier", "sizes": {"experts": experts, "device": device.type}}
            agreement = self._meet(device, of, {})
            self._notifiers[experts, device] = make(self.group, device, agreement, part)[self.rank]
        return self._notifiers[experts, device]

    def low_latency(self, key: Any, enable_shrink: bool) -> LowLatency:
        """The layer for a _low_latency.Key. Where it is made, the call is collective over the ranks
        that are not masked."""
        self._check_open()
        on_gpu = key.device.type == "cuda"
        if key in self._low_latency:
            if enable_shrink and not on_gpu:  # on a GPU this would wait for calls under way
                self._mask_in(self._low_latency[key].layer)
            return self._low_latency[key].layer
        # On a GPU the other ranks would learn of it only in a later call.
        if self._last_low_latency is not None and not on_gpu:
            if enable_shrink:
                self._mask_in(self._last_low_latency)
            tell, sizes = LowLatency._refuse_dispatch, _named_low_latency(key)
            self._speak(self._last_low_latency, tell, _WANTS_ANOTHER, sizes, self._masked)
        of = {"makes": "a low-latency layer", "sizes": _named_low_latency(key)}
        message, masked = {}, self.masked()
        if masked and on_gpu:
            message["refusal"] = _all_must_make(masked)
        shrink = enable_shrink and not on_gpu
        agreement = self._meet(key.device, of, message, masked, shrink)

        def part(transport: Any, store: Any) -> LowLatency:
            return LowLatency(
                transport,
                store,
                max_tokens=key.max_tokens,
                hidden=key.hidden,
                topk=key.topk,
                experts=key.experts,
                enable_shrink=enable_shrink,
                device=key.device,
            )

        parts = make(self.group, key.device, agreement, part)
        layer = parts[self.rank]
        self._low_latency[key] = _LowLatencyMade(agreement.absent, layer, parts)
        self._masked.update(agreement.absent)
        self._mask_in(layer)
        return layer

    def masked(self) -> Set[int]:
        """The ranks that were masked, or that did not come to a low-latency call."""
        for made in self._low_latency.values():
            self._hear_masks(made.layer)
        return self._masked

    def set_mask(self, rank: int, masked: bool) -> None:
        """Masks or unmasks a rank in all low-latency layers, including those made later."""
        self.masked()
        (self._masked.add if masked else self._masked.discard)(rank)
        if not masked:  # all ranks must make anew the layers without this rank
            self._low_latency = {
                key: made for key, made in self._low_latency.items() if rank not in made.absent
            }
        layers = [made.layer for made in self._low_latency.values()]
        if all(self._last_low_latency is not layer for layer in layers):
            self._last_low_latency = None
        for layer in layers:
            layer.set_mask(rank, masked)

    def _hear_masks(self, layer: LowLatency) -> None:
        self._masked.update(rank for rank, masked in enumerate(layer.mask()) if masked)

    def _mask_in(self, layer: LowLatency) -> None:
        for rank in self.masked():
            layer.set_mask(rank, True)

    def call_low_latency(self, key: Any, layer: LowLatency, call: Callable[[], Any]) -> Any:
        """Makes `layer` the last one, and returns the result of call(), a call of it."""
        self._last_low_latency = layer
        try:
            return call()
        except InvalidArgument as error:
            self.answer(error, _named_low_latency(key), self._masked)
            raise
        except BaseException as error:
            self.forget_broken(layer, error, _named_low_latency(key), self._masked)
            raise

    def refuse(self, why: Why, sizes: Optional[Sizes] = None) -> NoReturn:
        """Takes part in the dispatch that the other ranks make, so that all refuse it."""
        layer = self._made.get(sizes, self._last) if sizes else self._last
        self.refuse_in(layer, AllToAll._refuse_dispatch, why)

    def refuse_combine(self, why: Why) -> NoReturn:
        """The same for a combine whose route is not known."""
        if self._last is None:  # no layer in which the other ranks would learn of it
            refuse(called(), *why)
        self.refuse_in(self._last, AllToAll._refuse_combine, why)

    def refuse_low_latency(self, tell: Callable[[Any, str], Any], why: Why) -> NoReturn:
        """The same for a low-latency call."""
        self.refuse_in(self._last_low_latency, tell, why, self._masked)

    def refuse_in(
        self, layer: Any, tell: Callable[[Any, str], Any], why: Why, masked: Iterable[int] = ()
    ) -> NoReturn:
        """Takes part, by tell(layer, text), in the layer's call that the other ranks make."""
        self._check_open()
        text = text_of(why)
        if layer is not None:
            self._speak(layer, tell, text, masked=masked)
        self._agree({}, {"refusal": text}, masked)
        raise AssertionError("a refusal did not raise")

    def forget_broken(
        self,
        layer: Any,
        error: BaseException,
        sizes: Any,
        masked: Iterable[int] = (),
        refusal: Optional[str] = None,
    ) -> None:
        """Forgets a layer that an error has broken, so that the living ranks can make a new one.

        If the ranks have called different layers, of this buffer or of others, every rank comes
        here when it first learns that, and raises how they differ.
        """
        if isinstance(error, InvalidArgument):
            return
        failed = isinstance(error, Error)  # an interrupt may have come before the call
        apart = failed and self._apart(layer, error)
        _forget_all(self.group, layer if failed else None, apart)
        if apart:
            self._agree({"sizes": sizes}, {"refusal": refusal}, masked)

    def _apart(self, layer: Any, error: Error) -> bool:
        """Whether the error says, for the first time, that the ranks called different layers."""
        if isinstance(layer, LowLatency):
            first = any(made.layer is layer for made in self._low_latency.values())
        else:
            first = not getattr(layer, "_broken", False)
        return first and error.reason == "call_order"

    def _forget(self, broken: Any, apart: bool) -> None:
        """Forgets the broken layer, and all layers on the CPU: if a call has failed on this rank,
        calls have failed on the others, perhaps of other layers, so all ranks make new ones.
        Handles keep their layers."""

        def stays(device: torch.device, layer: Any) -> bool:
            return device.type != "cpu" and layer is not broken

        for key, made in self._low_latency.items():
            if key.device.type == "cpu":  # on a GPU it would wait for calls under way
                self._hear_masks(made.layer)
        if apart:
            for layer in self._made.values():
                layer._broken = True
        self._made = {key: made for key, made in self._made.items() if stays(key.device, made)}
        self._low_latency = {
            key: made for key, made in self._low_latency.items() if stays(key.device, made.layer)
        }
        self._notifiers.clear()
        if self._last not in self._made.values():
            self._last = None
        if self._last_low_latency not in [made.layer for made in self._low_latency.values()]:
            self._last_low_latency = None

    def close(self) -> None:
        """Closes all layers. It may be called again, and never waits for other ranks."""
        self._closed = True
        for layer in self._made.values():
            layer.close()
        for made in self._low_latency.values():
            for part in made.parts.values():
                part.close()
        self._made, self._notifiers, self._low_latency = {}, {}, {}
        self._last = self._last_low_latency = None

    def _check_open(self) -> None:
        if self._closed:
            refuse_call(called(), "the buffer is destroyed")

    def _layer(self, sizes: Sizes, tokens: int, topk: int) -> AllToAll:
        self._check_open()
        if sizes not in self._made:
            of = {"makes": "a layer", "sizes": named(sizes)}
            notifiers = sorted(str(key) for key in self._notifiers)
            message = {"tokens": tokens, "topk": topk, "notifiers": notifiers}
            agreement = self._meet(sizes.device, of, message)
            heard = agreement.heard.values()
            if any(said["notifiers"] != notifiers for said in heard):
                self._notifiers.clear()  # some rank has forgotten its own
            topk = sizes.topk or max(said["topk"] for said in heard)
            most = _power_of_two(max(16, *(said["tokens"] for said in heard)))

            def part(transport: Any, store: Any) -> AllToAll:
                return AllToAll(
                    transport,
                    store,
                    max_tokens=most,
                    hidden=sizes.hidden,
                    topk=topk,
                    experts=sizes.experts,
                    dtype=sizes.dtype,
                    weight_dtype=torch.float32,
                    local_world_size=self.local_world_size,
                    sm_count=_MOST_SMS,
                    arena_rows=self._arena_rows(sizes.device, most, topk),
                    device=sizes.device,
                )

            self._made[sizes] = make(self.group, sizes.device, agreement, part)[self.rank]
        return self._made[sizes]

    def _arena_rows(self, device: torch.device, tokens: int, topk: int) -> int:
        """On a GPU room for two dispatches, so that the second need not wait for the first: with
        copy_out a dispatch takes half of what arena_rows allows for."""
        return tokens * min(self.world_size, topk) * 9 // 8 if device.type == "cuda" else 0

    def _agree(
        self,
        of: Dict[str, Any],
        message: Dict[str, Any],
        masked: Iterable[int] = (),
        shrink: bool = False,
    ) -> Agreement:
        with _forgetting(self.group):
            return agree(self.group, {"buffer": self.number, **of}, message, masked, shrink)

    def _meet(
        self,
        device: torch.device,
        of: Dict[str, Any],
        message: Dict[str, Any],
        masked: Iterable[int] = (),
        shrink: bool = False,
    ) -> Agreement:
        """_agree() before make(): the message also says which world this rank has."""
        world = world_of(self.group, device)
        return self._agree(of, {**message, "world": world}, masked, shrink)


def _leads_to_agreement(error: InvalidArgument) -> bool:
    return error.argument == _ANOTHER or error.argument in _TOO_SMALL


def named(sizes: Sizes) -> Dict[str, Any]:
    """The sizes as all ranks compare them."""
    named = {**sizes._asdict(), "dtype": str(sizes.dtype), "device": sizes.device.type}
    return {name: size for name, size in named.items() if name != "counted" or size}


def _all_must_make(masked: Iterable[int]) -> str:
    ranks = ", ".join(map(str, sorted(masked)))
    return (
        f"on a GPU no low-latency layer of new sizes can be made without ranks {ranks}, which are "
        "masked: make a dispatch of every size before, or start all processes again"
    )


def _named_low_latency(key: Any) -> Dict[str, Any]:
    return {**key._asdict(), "device": key.device.type}


def widened(table: Tensor, columns: int, fill: int = -1) -> Optional[Tensor]:
    """The table with `fill` in further columns; None if it has too many already."""
    missing = columns - table.shape[1]
    if missing == 0:
        return table
    if missing < 0:
        return None
    return torch.cat([table, table.new_full((len(table), missing), fill)], 1)
