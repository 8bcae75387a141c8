"""One routing of tokens to ranks, which every handle of this package keeps."""

from typing import Any, List, NamedTuple, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Descriptor
from winnow.compat.deep_ep._entry import Why
from winnow.compat.deep_ep._layers import Layers, Sizes, named, widened
from winnow.errors import InvalidArgument
from winnow.expert_parallel import gradients, layout

FLOAT8 = torch.float8_e4m3fn

# What the methods call the arguments of a layer, for entry(); and which part of it that is.
OF_ROWS = {
    "input": "x",
    "expert_output": "x",
    "scales": "x, scales",
    "hidden": "x",
    "dtype": "x",
    "device": "x",
    "expert_indices": "topk_idx",
    "topk": "topk_idx",
    "weights": "topk_weights",
    "pair_values": "topk_weights",
    "second_bias": "bias",
    "cached": "handle",
    "descriptor": "handle",
}


class Arrived(NamedTuple):
    """R rows of a dispatch, in memory of their own."""

    rows: Tensor  # [R, H]
    scales: Optional[Tensor]  # [R, columns] of the dtype that was sent
    weights: Optional[Tensor]  # token-major [R, K], expert-major [R]; float32
    expert_ids: Optional[Tensor]  # token-major [R, K], int32: local experts, or -1


def int32_indices(topk_idx: Tensor, experts: int) -> Tensor:
    """Indices as layout() takes them. Those that name no expert stay so: an int64 is not cut."""
    return dense(topk_idx).clamp(min=-2, max=experts + 1).to(torch.int32)


def report_later(indices: Tensor, wrong: Tensor, experts: int) -> None:
    """Gives the tokens that are wrong an index that the layer reports in a later call, for calls in
    which the host does not wait."""
    beyond = indices.new_full((), experts + 1)
    indices[:, -1] = torch.where(wrong, beyond, indices[:, -1])


def dense(tensor: Tensor) -> Tensor:
    """Without gradients, and with rows whose elements stand side by side.

    torch calls a tensor contiguous whatever the stride of a dimension of one element is.
    """
    tensor = tensor.detach()
    if tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _columns(scales: Any) -> Any:
    """[n, columns] of scales of any number of dimensions; what is none the layer refuses."""
    if not isinstance(scales, Tensor) or scales.dim() == 0:
        return scales
    return scales.detach().reshape(scales.shape[0], scales.shape[1:].numel())


class Route:
    """A dispatch with counts, and what follows its routing: repeats, and sums on the way back."""

    def __init__(
        self,
        layers: Layers,
        sizes: Sizes,
        input: Tensor,
        scales: Any,
        indices: Tensor,
        *,
        weights: Optional[Tensor] = None,
        order: str = "token_major",
        expert_alignment: int = 1,
        worst_case_rows: int = 0,
        by_rank: bool = False,
    ) -> None:
        """Collective. `indices` [n, K]: see AllToAll.dispatch(). The arrived rows: `arrived`.

        `by_rank`: the indices are ranks, and any number of values may come home.
        """
        self._layers, self.sizes, self._by_rank = layers, sizes, by_rank
        self.indices = indices
        self._options = {
            "order": order,
            "expert_alignment": expert_alignment,
            "worst_case_rows": worst_case_rows,
        }
        self.layer, self.descriptor, self.arrived = self._dispatch(
            sizes, input, scales, weights=weights
        )

    @property
    def tokens(self) -> int:
        return self.indices.shape[0]

    @property
    def rows(self) -> int:
        return self.descriptor.rows

    @property
    def token_major(self) -> bool:
        return self._options["order"] == "token_major"

    def aligned_counts(self, alignment: int) -> List[int]:
        """Pairs of each local expert rounded up, on the host; empty where it does not know them."""
        counts = (self.descriptor.host_expert_counts if self._host_knows else None) or []
        return (
            counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]
        )

    @property
    def _host_knows(self) -> bool:
        return self._options["worst_case_rows"] == 0

    def layout(self) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """winnow.expert_parallel.layout() of the indices that the layer has taken: one that names
        no expert was refused, or a GPU ignores it until a later call tells."""
        layers = self._layers
        world, local = layers.world_size, layers.local_world_size
        return layout(self.indices.to(torch.int32), self.sizes.experts, world, local)

    def tokens_of_sources(self) -> Tuple[Tensor, Optional[int]]:
        """(int32 [W]: the tokens that come here from ranks 0 to r, each once; all of them, where
        the host waits). Collective."""
        worst = self._options["worst_case_rows"]
        told, totals = self.notify(self.sizes.experts, *self.layout(), worst_case_rows=worst)
        total = totals.recv_tokens
        return told.recv_rank_prefix_sum, None if total < 0 else total

    def notify(self, experts: int, *counts: Tensor, **options: Any) -> Tuple[Any, Any]:
        """(what Notifier.notify() returns, its totals). Collective."""
        notifier = self._layers.notifier(experts, self.sizes.device)
        return self._calling(lambda: notifier.notify(*counts, **options)), notifier.totals

    @property
    def own_column(self) -> Tensor:
        """int32 [W]: 1 of this rank, 0 of the others."""
        return self._layers.own_column(self.sizes.device)

    def take_arrived(self) -> Arrived:
        """The rows of the dispatch itself, once: a handle does not keep them."""
        arrived, self.arrived = self.arrived, None
        assert arrived is not None
        return arrived

    def with_zeros(self, rows: Tensor) -> Tensor:
        """The rows with zeros where the worst case has no token."""
        return gradients.used_rows(rows, self.descriptor)

    def repeat(self, input: Any, scales: Any, weights: Optional[Tensor] = None) -> Arrived:
        """Other values along the same way. Collective; nothing is counted."""
        return self._calling(lambda: self._repeat(input, scales, weights))

    def combine(
        self, rows: Any, bias: Any = None, values: Optional[Tensor] = None
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """([n, H]: the sum of each token's rows, [n, K]: the values of its pairs). Collective.

        bias: one, or a tuple of two. values: token-major [R, K], expert-major [R].
        """
        first, second = bias if isinstance(bias, tuple) and len(bias) == 2 else (bias, None)
        if first is None:
            first, second = second, None
        topk = self.sizes.topk
        if values is not None and self.token_major and not self._by_rank:
            # More columns would be more calls than the other ranks make.
            if values.dim() != 2 or values.shape[1] != topk:
                got = f"{list(values.shape)}"
                self.refuse_combine(("topk_weights", f"[{self.rows}, {topk}]", got))
        given = [dense(one) if isinstance(one, Tensor) else one for one in (rows, first, second)]
        parts = self._parts(values)

        def call():
            combined = self._combine(given, parts[0])
            if values is None:
                return combined, None
            homes = [combined[1]] + [self._combine([None] * 3, part)[1] for part in parts[1:]]
            columns = values.shape[1] if self.token_major else self.indices.shape[1]
            return combined[0], torch.cat(homes, 1)[:, :columns].contiguous()

        return self._calling(call)

    def _combine(self, given: List[Any], values: Any) -> Any:
        return self.layer.combine(
            given[0],
            self.descriptor,
            bias=given[1],
            second_bias=given[2],
            pair_values=values,
            add_values=values is not None and self.token_major,
            sm_count=self._layers.call_sms,
        )

    def _parts(self, values: Any) -> List[Any]:
        """Of as many columns as the layer carries; what is wrong it refuses on all ranks."""
        if not isinstance(values, Tensor) or values.layout != torch.strided:
            return [values]
        if not self.token_major or values.dim() != 2 or values.shape[1] == 0:
            return [values.detach()]
        parts = dense(values).split(self.layer.topk, 1)
        return [dense(widened(part, self.layer.topk, 0)) for part in parts]

    def refuse_repeat(self, why: Why) -> NoReturn:
        """Takes part in the repeat that the other ranks make, so that all refuse it."""
        self._layers.refuse_in(self.layer, AllToAll._refuse_dispatch, why)

    def refuse_combine(self, why: Why) -> NoReturn:
        """The same of combine()."""
        self._layers.refuse_in(self.layer, AllToAll._refuse_combine, why)

    def _repeat(self, input: Any, scales: Any, weights: Optional[Tensor]) -> Arrived:
        carried, options = self._input(self.sizes, input, scales)
        out = self._out(carried, self.rows)
        if weights is not None:
            weights = widened(dense(weights), self.layer.topk, 0)
        got = self.layer.dispatch(
            carried, cached=self.descriptor, weights=weights, out=out, **options
        )
        return _arrived(got, scales, out)

    def _dispatch(
        self, sizes: Sizes, input: Any, scales: Any, weights: Optional[Tensor]
    ) -> Tuple[AllToAll, Descriptor, Arrived]:
        carried, options = self._input(sizes, input, scales)
        worst = self._options["worst_case_rows"]
        out = self._out(carried, worst) if worst > 0 else None
        layer, got = self._layers.dispatch(
            sizes,
            carried,
            self.indices,
            tokens=-(-worst // self._layers.world_size),
            weights=None if weights is None else dense(weights),
            out=out,
            **options,
            **self._options,
        )
        return layer, got.descriptor, _arrived(got, scales, out)

    def _input(self, sizes: Sizes, input: Any, scales: Any) -> Tuple[Any, dict]:
        carried = dense(input) if isinstance(input, Tensor) else input
        # In memory of torch's allocator, which knows streams.
        options = {"copy_out": True, "sm_count": self._layers.call_sms}
        if scales is not None:
            options["scales"] = _columns(scales)
        return carried, options

    def _out(self, input: Any, rows: int) -> Optional[Tensor]:
        """Memory for rows whose number is known: no copy on a GPU."""
        if not isinstance(input, Tensor) or not input.is_cuda:
            return None
        shape = (rows, self.sizes.hidden)
        return torch.empty(shape, dtype=input.dtype, device=input.device)

    def _calling(self, call: Any) -> Any:
        try:
            return call()
        except InvalidArgument as error:
            self._layers.answer(error, named(self.sizes))
            raise
        except BaseException as error:
            self._layers.forget_broken(self.layer, error, named(self.sizes))
            raise


def _arrived(got: Any, scales: Any, out: Optional[Tensor]) -> Arrived:
    columns = got.scales
    if columns is not None:
        columns = columns.reshape(len(columns), *scales.shape[1:])
    return Arrived(got.output if out is None else out, columns, got.weights, got.expert_ids)
