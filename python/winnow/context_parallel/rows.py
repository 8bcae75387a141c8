"""Rows that come from all ranks, and their gradients, which go back."""

from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from winnow._operators import AUTOCAST
from winnow._torch_private import graph_task, in_backward
from winnow.context_parallel.group import ContextParallel
from winnow.context_parallel.placement import Placement

Part = Tuple[Optional[int], Tensor]
"""Which rank's rows, and these: [capacity, ...]; or None and the rows of all ranks: [total, ...]"""


class Arriving:
    """The result of a collective under way, with the tensors that it uses."""

    def __init__(
        self, work: Any, result: Tensor, used: Tensor, then: Optional[Callable[..., Tensor]] = None
    ):
        """then: makes of the result what wait() returns."""
        self._work, self._result, self._used, self._then = work, result, used, then

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._used = None
            if self._then is not None:
                self._result = self._then(self._result)
        return self._result


def cast(tensor: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Where torch.autocast is on, the tensor in `dtype`, or in autocast's."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return tensor
    dtype = dtype or torch.get_autocast_dtype(device)
    return tensor.to(dtype) if {tensor.dtype, dtype} <= set(AUTOCAST) else tensor


def bytes_of(rows: Tensor) -> Tensor:
    """What is moved: not every engine knows every dtype."""
    return rows.flatten().view(torch.uint8)


def gathered(
    context: ContextParallel, local: Tensor, then: Optional[Callable[..., Tensor]] = None
) -> Arriving:
    """[ranks * n, ...] of [n, ...] on each rank, and what `then` makes of it; local is
    contiguous."""
    shape = context.size * local.shape[0], *local.shape[1:]
    whole = torch.empty(shape, dtype=local.dtype, device=local.device)
    work = context.begin_all_gather(bytes_of(whole), bytes_of(local))
    return Arriving(work, whole, local, then)


def scattered(context: ContextParallel, whole: Tensor) -> Arriving:
    """[n, ...] of [ranks * n, ...] on each rank: its part of their sum."""
    whole = whole.contiguous()
    shape = whole.shape[0] // context.size, *whole.shape[1:]
    local = torch.empty(shape, dtype=whole.dtype, device=whole.device)
    work = context.begin_reduce_scatter(local.flatten(), whole.flatten())
    return Arriving(work, local, whole)


class Source:
    """Where the rows of a handle come from, and where their gradient goes. It outlives the handle
    in what autograd keeps, so that it holds no rows between forward and backward pass."""

    def __init__(
        self, context: ContextParallel, placement: Placement, learns: bool, device: torch.device
    ):
        self.context, self.placement, self.device = context, placement, device
        self.learns = learns  # whether a gradient goes back
        self.uses = 0  # calls that autograd has recorded
        self._task = -1
        self._reset()

    def begin(self, local: Tensor) -> Arriving:
        return gathered(self.context, local, self.placement.in_order)

    def parts(self, local: Tensor, arriving: Optional[Arriving]) -> Iterator[Part]:
        """All parts, one after the other."""
        if not self.context.sharded:
            arriving = self.begin(local) if arriving is None else arriving
            yield None, arriving.wait()
            return
        self.context.agree("use of rows", shape=str(list(local.shape)), dtype=str(local.dtype))
        coming = self._send(0, local)
        for rank in range(self.context.size):
            rows = coming.wait()
            if rank + 1 < self.context.size:
                coming = self._send(rank + 1, local)
            yield rank, rows

    def _send(self, rank: int, local: Tensor) -> Arriving:
        rows = local if rank == self.context.rank else torch.empty_like(local)
        work = self.context.begin_broadcast(bytes_of(rows), rank)
        return Arriving(work, rows, local)

    # ---- in the backward pass

    def _reset(self) -> None:
        self._again: Optional[Arriving] = None  # rows that came again
        self._sum: Optional[Tensor] = None  # of gradients, of all rows; sharded: of own ones
        self._sums: List[Arriving] = []  # under way
        self._left = self.uses

    def enter(self) -> None:
        """Forgets what another backward pass left, one that did not reach the rows."""
        task = graph_task()
        if task != self._task:
            self._task = task
            self._reset()

    def begin_again(self, local: Tensor) -> None:
        self.enter()
        if not self.context.sharded and self._again is None:
            self._again = self.begin(local)

    def parts_again(self, local: Tensor) -> Iterator[Part]:
        self.begin_again(local)
        return self.parts(local, self._again)

    def add(self, part: Optional[int], gradient: Tensor) -> None:
        """Of the rows of a part, in float32 or float64."""
        if not self.learns:
            return
        if part is None:
            self._sum = gradient if self._sum is None else self._sum.add_(gradient)
            return
        if len(self._sums) > 1:
            self._take(self._sums.pop(0))
        gradient = gradient.contiguous()
        work = self.context.begin_reduce(gradient.flatten(), part)
        own = gradient if part == self.context.rank else gradient[:0]
        self._sums.append(Arriving(work, own, gradient))

    def _take(self, arriving: Arriving) -> None:
        own = arriving.wait()
        if own.shape[0]:
            self._sum = own if self._sum is None else self._sum.add_(own)

    def leave(self) -> Optional[Tensor]:
        """At the end of a use; returns the gradient of the carrier. After the last use the
        gradients are summed over the ranks, while the backward pass goes on."""
        self._left -= 1
        if self._left == 0 or not self.learns:
            self._again = None
        if self._left == 0 and self.learns:
            self._begin_sum()
        return torch.zeros((), device=self.device) if self.learns else None

    def _begin_sum(self) -> None:
        if not self.context.sharded and self._sum is not None:
            self._sums.append(scattered(self.context, self.placement.by_rank(self._sum)))
            self._sum = None

    def gradient(self) -> Optional[Tensor]:
        """Of this rank's rows, [capacity, ...]."""
        self.enter()
        self._begin_sum()
        for arriving in self._sums:
            self._take(arriving)
        result = self._sum
        self._reset()
        return result


class _Reading(torch.autograd.Function):
    """Rows to a carrier, a number that stands for them in what is recorded; the gradient of the
    rows takes another way, by Source. Its backward comes behind that of all readers and, being
    recorded before what was computed meanwhile, behind that too."""

    @staticmethod
    def forward(ctx, local, source):
        ctx.source, ctx.shape, ctx.dtype = source, local.shape, local.dtype
        return local.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_carrier):
        gradient = ctx.source.gradient()
        if gradient is None:
            return None, None
        return gradient.view(ctx.shape).to(ctx.dtype), None


class _BeginsAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, local, source):
        ctx.save_for_backward(local)
        ctx.source = source
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.source.begin_again(*ctx.saved_tensors)
        return gradient, None, None


class Rows:
    """Rows of all ranks, which are on their way: what Tokens.gather() returns.

    It holds them, if keys are "gathered", as long as it exists, or until release(). The backward
    pass lets them come again, so that nothing but this rank's own rows is kept for it.
    """

    def __init__(self, context: ContextParallel, placement: Placement, local: Tensor):
        """local: [n, ...] of up to placement.capacity rows."""
        missing = placement.capacity - local.shape[0]
        if missing:
            local = torch.cat((local, local.new_zeros(missing, *local.shape[1:])))
        local = local.contiguous()
        learns = torch.is_grad_enabled() and local.requires_grad
        self.context, self.placement = context, placement
        self.source = Source(context, placement, learns, local.device)
        self.carrier: Optional[Tensor] = _Reading.apply(local, self.source) if learns else None
        self.local = local.detach()
        self._arriving: Optional[Arriving] = None
        if not context.sharded:
            self._arriving = self.source.begin(self.local)

    @property
    def shape(self) -> torch.Size:
        """Of the rows of all ranks."""
        return torch.Size((self.placement.total, *self.local.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def parts(self) -> Iterator[Part]:
        if in_backward():  # of a call that is made again, behind which nobody would let go of rows
            return self.source.parts_again(self.local)
        if self._arriving is None and not self.context.sharded:
            self._arriving = self.source.begin(self.local)
        return self.source.parts(self.local, self._arriving)

    def read(self) -> Optional[Tensor]:
        """The carrier, for a call that autograd records."""
        if torch.is_grad_enabled():
            self.source.uses += 1
        return self.carrier

    def release(self) -> None:
        """Lets go of the rows of other ranks; a later call lets them come again."""
        self._arriving = None

    def begin_again_with(self, tensor: Tensor) -> Tensor:
        """The same tensor, one computed of the attention's result. In the backward pass its
        gradient lets the rows come again, which the gradient of the attention needs, while what
        lies between is computed."""
        if self.context.sharded or not tensor.requires_grad:
            return tensor
        return _BeginsAgain.apply(tensor, self.local, self.source)
