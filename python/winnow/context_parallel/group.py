"""The ranks that share sequences, and what they agree on."""

import contextlib
import datetime
import functools
import zlib
from array import array
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
    cast,
)

import torch
import torch.distributed as dist
from torch import Tensor

from winnow import _refusal
from winnow._torch_private import in_backward
from winnow.errors import Error

if TYPE_CHECKING:
    from winnow.context_parallel.tokens import Tokens

PLACEMENTS = ("contiguous", "balanced")
KEYS = ("gathered", "sharded")
_VALUES = 6  # that the message of an agreement has room for, beside what it is about
_REASON_BYTES = 256  # of it, for what a rank refuses
_PIECE = datetime.timedelta(milliseconds=100)  # of a wait
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _plain(value: Any) -> Any:
    """Whole numbers of Python in the place of those of torch, numpy and others, and lists in that
    of tensors; what is neither stays as it is, for all ranks to refuse."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)):
        return value
    return [number.tolist() if hasattr(number, "tolist") else number for number in value]


def refuse(argument: str, wanted: str, got: Any) -> NoReturn:
    _refusal.refuse("context_parallel", argument, wanted, got)


def finish(work: dist.Work, result: Tensor) -> None:
    """Waits for a collective: on the CPU in pieces, between which Python looks for signals, so that
    Ctrl-C ends the wait."""
    if result.device.type != "cpu":
        work.wait()
        return
    while True:
        try:
            work.wait(_PIECE)
            return
        except RuntimeError:  # of this piece, or of the collective
            if work.is_completed():
                work.wait()
                return


def refused_on_all_ranks(method: _Method) -> _Method:
    """What a rank refuses in the method is an error on all ranks of self.context."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.context.refusals():
            return method(self, *arguments, **options)

    return cast(_Method, call)


def context_parallel(
    group: Optional[dist.ProcessGroup] = None,
    *,
    placement: str = "contiguous",
    keys: str = "gathered",
) -> "ContextParallel":
    """Has the ranks of a group share sequences: each has some of the tokens.

    A collective call.

    Args:
        group: of torch.distributed; None: the default group. NCCL for CUDA tensors, gloo on the
            CPU.
        placement: which tokens of n * s a rank has. "contiguous": rank i has those from i * s on.
            "balanced": the tokens are 2 n chunks, of which rank i has chunks i and 2 n - 1 - i, so
            that under a causal mask all ranks have the same work.
        keys: "gathered": a rank has the rows of all ranks while a layer runs, and again in the
            layer's backward pass. "sharded": it has those of two ranks at a time, for very long
            sequences: choices are the same, and results equal up to rounding. Rows then come anew
            for each call.

    Returns:
        A ContextParallel, whose tokens() describes the tokens of a call.

    Raises:
        ValueError: an argument is not as described, torch.distributed is not initialised, this
            process is not in the group, or the ranks gave different arguments.
    """
    if not dist.is_available() or not dist.is_initialized():
        refuse(
            "group", "torch.distributed, initialised", "none: init_process_group() was not called"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        got = "a group without this process" if isinstance(group, int) else type(group).__name__
        refuse("group", "a ProcessGroup of torch.distributed that this process is in", got)
    made = ContextParallel(group, placement, keys)
    # First of all, so that what is refused of one rank is refused on all.
    made.agree("context_parallel", placement=str(placement), keys=str(keys))
    if placement not in PLACEMENTS:
        refuse("placement", " or ".join(PLACEMENTS), placement)
    if keys not in KEYS:
        refuse("keys", " or ".join(KEYS), keys)
    return made


class ContextParallel:
    """The ranks of a group, and how sequences lie on them. context_parallel() makes it."""

    def __init__(self, group: dist.ProcessGroup, placement: str, keys: str):
        self.group, self.placement, self.keys = group, placement, keys
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sharded = keys == "sharded" and self.size > 1
        self.chunks = 2 if placement == "balanced" else 1  # of a rank
        cpu = "cpu" in dist.get_backend_config(group)
        self._device = "cpu" if cpu else f"cuda:{torch.cuda.current_device()}"

    def __deepcopy__(self, memo: Dict[int, Any]) -> "ContextParallel":
        """Itself, as a model's copy is of the same ranks."""
        return self

    def tokens(
        self, count: int, *, batch: int = 1, cu_seqlens: Union[Tensor, Sequence[int], None] = None
    ) -> "Tokens":
        """The tokens of a call, of which this rank has its part. A collective call.

        Args:
            count: of all ranks, in each row of the batch: a multiple of the ranks (balanced: of
                twice the ranks). Pad sequences that are not.
            batch: rows of the batch, each with `count` tokens on all ranks, and placed alike.
            cu_seqlens: where each of several packed sequences begins, and where the last one ends:
                from 0 to at most batch * count, ascending. They may cross the borders of ranks, but
                not those of the batch's rows. Tokens behind the last sequence are padding. None:
                each row of the batch is one sequence.

        Raises:
            ValueError: an argument is not as described, or the ranks gave different ones.
        """
        from winnow.context_parallel.tokens import Tokens, checked_lengths

        with self.refusals():
            count, batch, starts = _plain(count), _plain(batch), _plain(cu_seqlens)
            self.agree("tokens", count=str(count), batch=str(batch), cu_seqlens=str(starts))
        return Tokens(self, count, batch, *checked_lengths(self, count, batch, starts))

    def agree(self, call: str, **values: str) -> None:
        """An error on all ranks where they do not give the same values in the same call, or one of
        them has refused something.

        It comes before every call that moves tensors: a collective in which ranks differ would end
        the process (gloo) or never end (NCCL). That a rank has given the same values before says
        nothing of what the others give now.
        """
        try:
            self._agree(call, values)
        except Exception as error:
            error._winnow_told = True  # type: ignore[attr-defined]
            raise

    def _agree(self, call: str, values: Dict[str, str]) -> None:
        texts = [" ".join((call, *values)), *values.values()]
        own = [zlib.crc32(text.encode()) for text in texts]
        table = self._exchange(own, "")
        for rank, (_, reason) in enumerate(table):
            if reason:
                refuse(call, "what no rank refuses", f"that of rank {rank}: {reason}")
        for at, text in enumerate(texts):
            for rank, (theirs, _) in enumerate(table):
                if theirs[at] == own[at]:
                    continue
                if at == 0:
                    refuse("order of calls", f"{call}() on all ranks", f"another on rank {rank}")
                got = f"{_short(text)} on rank {self.rank}, another on rank {rank}"
                refuse(f"{call}: {list(values)[at - 1]}", "the same on all ranks", got)

    def taken(self, call: str, **values: str) -> None:
        """agree() behind what may refuse the arguments of a call. One that checkpointing makes
        again in a backward pass can end before it comes here, and not on all ranks alike."""
        if not in_backward():
            self.agree(call, **values)

    def _exchange(self, own: List[int], refused: str) -> List[Tuple[List[int], str]]:
        """(own, refused) of each rank"""
        text = refused.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        words = [*own, *[0] * (_VALUES + 1 - len(own)), *array("q", text)]
        message = torch.tensor(words, dtype=torch.int64, device=self._device)
        of_all = message.new_empty(self.size * len(words))
        work = dist.all_gather_into_tensor(of_all, message, group=self.group, async_op=True)
        finish(work, of_all)
        table = []
        for row in of_all.view(self.size, -1).tolist():
            reason = array("q", row[_VALUES + 1 :]).tobytes().rstrip(b"\0")
            table.append((row, reason.decode(errors="ignore")))
        return table

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """What this rank refuses within is an error on the others in the agreement that they make
        next, where they would wait for this rank in vain."""
        try:
            yield
        except Exception as error:
            if not in_backward() and not getattr(error, "_winnow_told", False):
                kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
                reason = kind + str(error).removeprefix("context_parallel: ")
                with contextlib.suppress(RuntimeError):  # nobody is there to hear it
                    self._exchange([], _short(reason, 200))
                error._winnow_told = True  # type: ignore[attr-defined]
            raise

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        finish(dist.all_reduce(value, group=self.group, async_op=True), value)
        return value

    # ---- what moves rows and gradients: each begins, and returns what waits for the end

    def begin_all_gather(self, whole: Tensor, local: Tensor) -> dist.Work:
        """[ranks * n] of [n] on each rank."""
        return dist.all_gather_into_tensor(whole, local, group=self.group, async_op=True)

    def begin_reduce_scatter(self, local: Tensor, whole: Tensor) -> dist.Work:
        """[n] on each rank: its part of the sum of [ranks * n]."""
        return dist.reduce_scatter_tensor(local, whole, group=self.group, async_op=True)

    def begin_broadcast(self, rows: Tensor, source: int) -> dist.Work:
        """In place, from rank `source` of the group."""
        return dist.broadcast(rows, group_src=source, group=self.group, async_op=True)

    def begin_reduce(self, gradient: Tensor, target: int) -> dist.Work:
        """The sum over the ranks, in place on rank `target` of the group."""
        return dist.reduce(gradient, group_dst=target, group=self.group, async_op=True)
