"""The layers of a process group: made when they are first needed, larger when they must be.

Every rank makes the same calls in the same order, so every rank makes the same layers. Before one
is made all ranks say in the group's store what they need of it: the largest counts, and what one
of them has to refuse all refuse.
"""

import re
import socket
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, NoReturn, Optional, Set, Tuple

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Dispatched, LowLatency, Notifier
from winnow.compat._refusal import refuse_call
from winnow.compat.deep_ep._agreement import Agreement, agree
from winnow.compat.deep_ep._worlds import make, world_of
from winnow.errors import Error, InvalidArgument

# What the layer, and dispatch() below, say of a call that a larger layer could do.
_TOO_MANY = re.compile(r"want at most max_tokens = \d+ tokens|want at most K = \d+ experts a token")

# What a rank says in a call of the last layer when it wants one that is not made yet.
_ANOTHER = "another layer"
# What the library says of ranks that wait in calls of different layers, on the CPU.
_APART = "all ranks must make the same calls in the same order"

# The sizes of a call that is refused, beside those of others.
_REFUSED = "those of a refused call"

# Of the layers; a call may take fewer.
_MOST_SMS = 64

# Of tests: ranks a node, where they shall not be counted.
ranks_per_node: Optional[int] = None


class Sizes(NamedTuple):
    """What a layer is made for. topk 0: for as many experts a token as any rank has needed."""

    hidden: int
    topk: int
    experts: int
    dtype: torch.dtype
    device: torch.device


class _LowLatencyMade(NamedTuple):
    absent: Tuple[int, ...]  # who has no part in it
    layer: LowLatency
    parts: Dict[int, LowLatency]


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _local_world_size(hosts: List[str]) -> int:
    """Ranks a node: those of a host, where they stand together and every host has as many."""
    local = ranks_per_node or hosts.count(hosts[0])
    blocks = [set(hosts[i : i + local]) for i in range(0, len(hosts), local)]
    if len(hosts) % local or any(len(block) != 1 for block in blocks):
        return 1
    return local


def _gpu() -> Optional[str]:
    """Which one is torch's current GPU; None where torch uses none yet, or does not say."""
    if not torch.cuda.is_initialized():
        return None
    known = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(known.uuid) if hasattr(known, "uuid") else None


class Layers:
    """The layers of one buffer on a group. Collective to make."""

    def __init__(self, group: Any, operation: str, sm_count: int) -> None:
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self.sm_count = sm_count  # of the next calls
        self._operation = operation
        self._made: Dict[Sizes, AllToAll] = {}
        self._notifiers: Dict[Tuple[int, torch.device], Notifier] = {}
        self._low_latency: Dict[Any, _LowLatencyMade] = {}
        self._masked: Set[int] = set()
        self._last: Optional[AllToAll] = None
        self._last_low_latency: Optional[LowLatency] = None
        self._closed = False
        self._own_columns: Dict[torch.device, Tensor] = {}
        heard = self._agree({"place": [socket.gethostname(), _gpu()]}).heard
        places = [said["place"] for said in heard.values()]
        self.local_world_size = _local_world_size([host for host, _ in places])
        mine = places[self.rank]
        # Or may do so, for all that is known.
        self.shares_gpu = mine[1] is None or places.count(mine) > 1

    def dispatch(
        self,
        sizes: Sizes,
        input: Tensor,
        indices: Tensor,
        *,
        tokens: int = 0,
        **options: Any,
    ) -> Tuple[AllToAll, Dispatched]:
        """AllToAll.dispatch() on a layer of these sizes, for `tokens` or more tokens a rank.

        With sizes.topk 0 the indices may have any number of columns, and those that a layer has
        beyond them are pairs that are dropped.
        """
        columns = indices.shape[1]

        def call(layer: AllToAll) -> Dispatched:
            if sizes.topk != 0:
                return layer.dispatch(input, indices, **options)
            padded = widened(indices, layer.topk)
            if padded is None:
                text = f"want at most K = {layer.topk} experts a token, got {columns}"
                layer._refuse_dispatch(f"routing_map: {text}")
            wide = {**options}
            if options.get("weights") is not None:
                wide["weights"] = widened(options["weights"], layer.topk, 0)
            return layer.dispatch(input, padded, **wide)

        # Where the host does not wait the others hear of it in a later call only.
        grows = sizes.device.type != "cuda" or options.get("worst_case_rows", 0) == 0
        made = self._made.get(sizes)
        if not grows and sizes.topk == 0 and made is not None and made.topk < columns:
            # The tables of such calls are equally wide on all ranks, so that all make a larger one.
            del self._made[sizes]
        return self.with_layer(sizes, max(len(input), tokens), columns, call, grows)

    def with_layer(
        self, sizes: Sizes, tokens: int, topk: int, call: Any, grows: bool = True
    ) -> Tuple[AllToAll, Any]:
        """A layer of these sizes and call(layer), which a larger layer may do if one is too small
        for a rank: all ranks hear of it in the call."""
        self._check_open()
        if sizes not in self._made and self._last is not None:
            # They may be in a call of the last layer, where one rank is mistaken.
            self._speak(self._last, _ANOTHER, wish=_named(sizes))
        while True:
            layer = self._layer(sizes, tokens, topk)
            self._last = layer
            try:
                return layer, call(layer)
            except InvalidArgument as error:
                if _ANOTHER in str(error):
                    self._make_anew(sizes, tokens, topk)
                    continue
                if not (grows and _TOO_MANY.search(str(error))):
                    raise
                # Handles may still use the old one, which goes with the last of them.
                del self._made[sizes]
            except Error as error:
                self.forget_broken(layer, error, _named(sizes))
                raise

    def _speak(self, layer: Any, text: str, tell: Any = None, wish: Any = _REFUSED) -> None:
        """Takes part in the layer's call that the other ranks make, and refuses it: all raise what
        any has to refuse; unless a rank wants another layer: then all say next, to each other, what
        they want."""
        try:
            (tell or type(layer)._refuse_dispatch)(layer, text)
        except InvalidArgument as error:
            if _ANOTHER not in str(error):
                raise
        except Error as error:
            self.forget_broken(layer, error, wish)
            raise

    def answer(self, error: InvalidArgument, wish: Any, masked: Iterable[int] = ()) -> None:
        """After a call that another rank refused for another layer: raises how they differ."""
        if _ANOTHER in str(error):
            self._agree({"sizes": wish}, masked)

    def _make_anew(self, sizes: Sizes, tokens: int, topk: int) -> None:
        """The same, where that rank may want a layer of these sizes, too."""
        kept = self._made.pop(sizes)
        try:
            self._layer(sizes, tokens, topk)
        except InvalidArgument:
            self._made[sizes] = kept
            raise

    def own_column(self, device: torch.device) -> Tensor:
        """int32 [W]: 1 of this rank, 0 of the others."""
        if device not in self._own_columns:
            column = [int(rank == self.rank) for rank in range(self.world_size)]
            # Which waits for the copy: calls of other streams will read it.
            self._own_columns[device] = torch.tensor(column, dtype=torch.int32, device=device)
        return self._own_columns[device]

    @property
    def call_sms(self) -> int:
        return max(1, min(self.sm_count, _MOST_SMS))

    def notifier(self, experts: int, device: torch.device) -> Notifier:
        """For counts that travel without tokens. Collective where it is made."""
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

            agreement = self._meet(device, {"sizes": [experts, "notifier", device.type]})
            self._notifiers[experts, device] = make(self.group, device, agreement, part)[self.rank]
        return self._notifiers[experts, device]

    def low_latency(self, key: Any, enable_shrink: bool) -> LowLatency:
        """A layer for a _low_latency.Key. Collective where it is made, over the ranks that are not
        masked."""
        self._check_open()
        on_gpu = key.device.type == "cuda"
        if key in self._low_latency:
            if enable_shrink and not on_gpu:  # there it would wait for calls that are under way
                self._mask_in(self._low_latency[key].layer)
            return self._low_latency[key].layer
        # On a GPU the others would hear of it in a later call.
        if self._last_low_latency is not None and not on_gpu:
            if enable_shrink:
                self._mask_in(self._last_low_latency)
            self._speak(self._last_low_latency, _ANOTHER, wish=_named_low_latency(key))
        message, masked = {"sizes": _named_low_latency(key)}, self.masked()
        if masked and on_gpu:
            message["refusal"] = _all_must_make(masked)
        shrink = enable_shrink and not on_gpu
        agreement = self._meet(key.device, message, masked, shrink)

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
        """For all low-latency layers, those of later calls, too."""
        self.masked()
        (self._masked.add if masked else self._masked.discard)(rank)
        if not masked:  # it has no part in these, so that all ranks have to make them anew
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
        """call(), of this layer: the next one is probably of it, too, unless it breaks."""
        self._last_low_latency = layer
        try:
            return call()
        except InvalidArgument as error:
            self.answer(error, _named_low_latency(key), self._masked)
            raise
        except Error as error:
            self.forget_broken(layer, error, _named_low_latency(key))
            raise

    def refuse_low_latency(self, tell: Any, why: Tuple[str, str, Any]) -> NoReturn:
        """Takes part in the call that the other ranks make, by tell(layer, text)."""
        self._check_open()
        argument, wanted, got = why
        text = f"{argument}: want {wanted}, got {got}"
        if self._last_low_latency is not None:
            self._speak(self._last_low_latency, text, tell)
        self._agree({"refusal": text}, self._masked)
        raise AssertionError("a refusal did not raise")

    def refuse(self, sizes: Optional[Sizes], text: str) -> NoReturn:
        """Takes part in the dispatch that the other ranks make, so that all refuse it."""
        self._check_open()
        layer = self._last if sizes is None else self._made.get(sizes, self._last)
        if layer is not None:
            self._speak(layer, text)
        self._agree({"refusal": text})
        raise AssertionError("a refusal did not raise")

    def refuse_handle(self, handle: Any) -> NoReturn:
        """The same of a combine whose handle is none."""
        text = f"handle: want one of a dispatch of this buffer, got {type(handle).__name__}"
        if self._last is not None:
            self._speak(self._last, text, type(self._last)._refuse_combine)
        refuse_call(self._operation, text)

    def forget_broken(self, layer: Any, error: Error, wish: Any) -> None:
        """After a timeout, say, all ranks that live may go on with a new one.

        Where ranks have called different layers all layers are broken, and every rank is here:
        raises how they differ.
        """
        if error.code == "invalid_argument":
            return
        for key, made in self._low_latency.items():
            if key.device.type == "cpu":  # elsewhere it would wait for calls that are under way
                self._hear_masks(made.layer)
        if _APART in str(error):
            self._made, self._low_latency = {}, {}
            self._last = self._last_low_latency = None
        self._made = {key: made for key, made in self._made.items() if made is not layer}
        self._low_latency = {
            key: made for key, made in self._low_latency.items() if made.layer is not layer
        }
        self._last = None if self._last is layer else self._last
        if self._last_low_latency is layer:
            self._last_low_latency = None
        self._notifiers.clear()
        if _APART in str(error):
            self._agree({"sizes": wish}, self._masked if isinstance(layer, LowLatency) else ())

    def close(self) -> None:
        """Idempotent; never waits for other ranks."""
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
            refuse_call(self._operation, "the buffer is destroyed")

    def _layer(self, sizes: Sizes, tokens: int, topk: int) -> AllToAll:
        self._check_open()
        if sizes not in self._made:
            message = {"sizes": _named(sizes), "tokens": tokens, "topk": topk}
            agreement = self._meet(sizes.device, message)
            heard = agreement.heard.values()
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
        """On a GPU enough for two dispatches, of which one need not wait for the other."""
        return tokens * min(self.world_size, topk) * 9 // 8 if device.type == "cuda" else 0

    def _agree(
        self, message: Dict[str, Any], masked: Iterable[int] = (), shrink: bool = False
    ) -> Agreement:
        return agree(self.group, self._operation, message, masked, shrink)

    def _meet(
        self,
        device: torch.device,
        message: Dict[str, Any],
        masked: Iterable[int] = (),
        shrink: bool = False,
    ) -> Agreement:
        """The same before make()."""
        return self._agree({**message, "world": world_of(self.group, device)}, masked, shrink)


def _named(sizes: Sizes) -> List[Any]:
    """As all ranks compare them."""
    return [sizes.hidden, sizes.topk, sizes.experts, str(sizes.dtype), sizes.device.type]


def _all_must_make(masked: Iterable[int]) -> str:
    ranks = ", ".join(map(str, sorted(masked)))
    return (
        f"on a GPU no low-latency layer of new sizes can be made without ranks {ranks}, which are "
        "masked: make a dispatch of every size before, or start all processes again"
    )


def _named_low_latency(key: Any) -> List[Any]:
    return [*key[:-1], "low latency", key.device.type]


def widened(table: Tensor, columns: int, fill: int = -1) -> Optional[Tensor]:
    """The table with more columns; None: it has more already."""
    missing = columns - table.shape[1]
    if missing == 0:
        return table
    if missing < 0:
        return None
    return torch.cat([table, table.new_full((len(table), missing), fill)], 1)
