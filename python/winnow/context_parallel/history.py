"""The tokens before a rank's chunks, which the ranks before have."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from winnow.context_parallel.placement import chunk_owners, chunks_of
from winnow.context_parallel.rows import gathered, scattered

if TYPE_CHECKING:
    from winnow.context_parallel.tokens import Tokens


class _Tails:
    """The last tokens of all chunks, of which as many chunks as `width` spans make a history."""

    def __init__(self, tokens: "Tokens", width: int):
        context = tokens.context
        self.context, self.batch, self.chunk, self.width = (
            context,
            tokens.batch,
            tokens.chunk,
            width,
        )
        self.chunks = chunks_of(context.rank, context.size, context.chunks)
        self.length = min(width, tokens.chunk)
        self.back = -(-width // max(1, self.length))  # chunks that a history spans
        owners = chunk_owners(context.size, context.chunks)
        self.order = [rank * context.chunks + second for rank, second in owners]

    def of_own(self, x: Tensor) -> Tensor:
        """[chunks of the rank, batch, length, ...]"""
        of_chunks = x.unflatten(0, (self.batch, len(self.chunks), self.chunk)).transpose(0, 1)
        return of_chunks[:, :, self.chunk - self.length :]

    def before(self, of_all: Tensor, chunk: int) -> Tensor:
        """[batch, width, ...] of those of all chunks in the order of the ranks."""
        tails = [of_all[self.order[c]] for c in range(max(0, chunk - self.back), chunk)]
        missing = self.width - self.length * len(tails)
        if missing > 0:
            tails.insert(0, of_all.new_zeros(self.batch, missing, *of_all.shape[3:]))
        return torch.cat(tails, 1)[:, -self.width :]

    def add_before(self, of_all: Tensor, chunk: int, gradient: Tensor) -> None:
        """Adds the gradient of before() to that of all chunks."""
        end = self.width
        for c in reversed(range(max(0, chunk - self.back), chunk)):
            begin = max(0, end - self.length)
            of_all[self.order[c]][:, self.length - (end - begin) :] += gradient[:, begin:end]
            end = begin


class _History(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens, width):
        ctx.tails, ctx.shape = _Tails(tokens, width), x.shape
        tails = ctx.tails
        own = tails.of_own(x).contiguous()
        of_all = gathered(tails.context, own).wait()
        before = torch.stack([tails.before(of_all, chunk) for chunk in tails.chunks])
        of_chunks = x.unflatten(0, (tails.batch, len(tails.chunks), tails.chunk)).transpose(0, 1)
        return torch.cat((before, of_chunks), 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        tails = ctx.tails
        wide = torch.promote_types(gradient.dtype, torch.float32)
        shape = len(tails.order), tails.batch, tails.length, *gradient.shape[3:]
        of_all = gradient.new_zeros(shape, dtype=wide)
        for at, chunk in enumerate(tails.chunks):
            tails.add_before(of_all, chunk, gradient[at, :, : tails.width].to(wide))
        own = scattered(tails.context, of_all).wait()
        of_chunks = gradient[:, :, tails.width :].to(wide, copy=True)
        of_chunks[:, :, tails.chunk - tails.length :] += own
        return of_chunks.transpose(0, 1).reshape(ctx.shape).to(gradient.dtype), None, None


def history(tokens: "Tokens", x: Tensor, width: int) -> Tensor:
    if width == 0:
        of_chunks = (tokens.batch, tokens.context.chunks, tokens.chunk)
        return x.unflatten(0, of_chunks).transpose(0, 1)
    return _History.apply(x, tokens, width)
