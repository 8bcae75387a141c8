"""The routing of one dispatch, which every handle of this package keeps."""

from typing import Any, List, NamedTuple, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Descriptor
from winnow.compat._refusal import refuse
from winnow.compat.deep_ep._entry import Why, called
from winnow.compat.deep_ep._layers import Layers, Sizes, named, widened
from winnow.errors import InvalidArgument
from winnow.expert_parallel import gradients, layout

FLOAT8 = torch.float8_e4m3fn

# For entry(): by a layer's name of an argument the methods' name. "x, scales": the scales of x.
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
    "pair_columns": "topk_weights, number of columns",
    "second_bias": "bias",
    "cached": "handle",
    "descriptor": "handle",
}


class Arrived(NamedTuple):
    """The R rows that arrived in a dispatch, in memory of their own."""

    rows: Tensor  # [R, H]
    scales: Optional[Tensor]  # [R, columns] of the dtype that was sent
    weights: Optional[Tensor]  # token-major [R, K], expert-major [R]; float32
    expert_ids: Optional[Tensor]  # token-major [R, K], int32: local experts, or -1


def int32_indices(topk_idx: Tensor, experts: int) -> Tensor:
    """Indices as layout() takes them. An int64 beyond 32 bits is clamped, not truncated: to one
    that names no expert either. On the CPU, where layout() refuses these, it is refused here with
    its own value."""
    given = dense(topk_idx)
    indices = given.clamp(min=-(2**31), max=2**31 - 1).to(torch.int32)
    if (
        given.device.type == "cpu"
        and given.dtype == torch.int64
        and not torch.equal(indices, given)
    ):
        token, k = (indices != given).nonzero()[0].tolist()
        wanted = f"-1 to {experts} (-1 and {experts} name no expert)"
        refuse(called(), "topk_idx", wanted, f"{given[token, k].item()} for token {token}, k {k}")
    return indices


def sums_in(rows: Tensor) -> torch.dtype:
    """The dtype of sums of rows of that dtype."""
    return torch.bfloat16 if rows.dtype == FLOAT8 else rows.dtype


def report_later(indices: Tensor, wrong: Tensor, experts: int) -> None:
    """For calls in which the host does not wait: gives the tokens that are `wrong` an index that
    the layer reports in a later call."""
    beyond = indices.new_full((), experts + 1)
    indices[:, -1] = torch.where(wrong, beyond, indices[:, -1])


def dense(tensor: Tensor) -> Tensor:
    """The tensor without gradients, with the elements of each row side by side.

    torch calls a tensor contiguous whatever the stride of a dimension of one element is.
    """
    tensor = tensor.detach()
    if tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _columns(scales: Any) -> Any:
    """Scales of any number of dimensions as [n, columns]; the layer refuses anything else."""
    if not isinstance(scales, Tensor) or scales.dim() == 0:
        return scales
    return scales.detach().reshape(scales.shape[0], scales.shape[1:].numel())


class Route:
    """A dispatch with counts, and the calls along its routing: repeated dispatches and combines."""

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
        """Collective. `indices` [n, K]: see AllToAll.dispatch(). `arrived` holds the arrived rows.

        `by_rank`: the indices are ranks, and combine() takes any number of values per row.
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
        """Pairs of each local expert, rounded up, on the host; empty if it does not know them."""
        counts = (self.descriptor.host_expert_counts if self._host_knows else None) or []
        return (
            counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]
        )

    @property
    def _host_knows(self) -> bool:
        return self._options["worst_case_rows"] == 0

    def layout(self) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """winnow.expert_parallel.layout() of the indices that the layer has accepted. One that
        names no expert was refused, or a GPU ignores it and a later call reports it."""
        layers = self._layers
        world, local = layers.world_size, layers.local_world_size
        return layout(self.indices.to(torch.int32), self.sizes.experts, world, local)

    def tokens_of_sources(self) -> Tuple[Tensor, Optional[int]]:
        """(int32 [W]: how many tokens come here from ranks 0 to r, each counted once; their total,
        or None if the host does not wait). Collective."""
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
        """int32 [W]: 1 for this rank, 0 for the others."""
        return self._layers.own_column(self.sizes.device)

    def take_arrived(self) -> Arrived:
        """The rows of the dispatch itself. They can be taken once: a handle does not keep them."""
        arrived, self.arrived = self.arrived, None
        assert arrived is not None
        return arrived

    def with_zeros(self, rows: Tensor) -> Tensor:
        """The rows, with zeros in those of the worst case that hold no token."""
        return gradients.used_rows(rows, self.descriptor)

    def repeat(self, input: Any, scales: Any, weights: Optional[Tensor] = None) -> Arrived:
        """Dispatches other values along the same routing. Collective; nothing is counted again."""
        return self._calling(lambda: self._repeat(input, scales, weights))

    def combine(
        self, rows: Any, bias: Any = None, values: Optional[Tensor] = None
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """([n, H]: the sum of each token's rows, [n, K]: the values of its pairs). Collective.

        bias: a tensor, or a tuple of two. values: token-major [R, K], expert-major [R].
        """
        first, second = bias if isinstance(bias, tuple) and len(bias) == 2 else (bias, None)
        if first is None:
            first, second = second, None
        topk = self.sizes.topk
        if values is not None and self.token_major and not self._by_rank:
            # More columns would take more calls than the other ranks make.
            if values.dim() != 2 or values.shape[1] != topk:
                got = f"{list(values.shape)}"
                self.refuse_combine(("topk_weights", f"[{self.rows}, {topk}]", got))
        given = [dense(one) if isinstance(one, Tensor) else one for one in (rows, first, second)]
        parts = self._parts(values)
        whole = values.shape[1] if self._by_rank and len(getattr(values, "shape", ())) == 2 else 0

        def call():
            combined = self._combine(given, parts[0], whole)
            if values is None:
                return combined, None
            others = [self._combine([None] * 3, part, whole)[1] for part in parts[1:]]
            homes = [combined[1], *others]
            columns = values.shape[1] if self.token_major else self.indices.shape[1]
            return combined[0], torch.cat(homes, 1)[:, :columns].contiguous()

        return self._calling(call)

    def _combine(self, given: List[Any], values: Any, columns: int) -> Any:
        return self.layer.combine(
            given[0],
            self.descriptor,
            bias=given[1],
            second_bias=given[2],
            pair_values=values,
            add_values=values is not None and self.token_major,
            pair_columns=columns,
            sm_count=self._layers.call_sms,
        )

    def _parts(self, values: Any) -> List[Any]:
        """The values in parts that the layer carries; it refuses wrong values on all ranks."""
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
        """The same for combine()."""
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
        # The results are in memory of torch's allocator, which keeps track of streams.
        options = {"copy_out": True, "sm_count": self._layers.call_sms}
        if scales is not None:
            options["scales"] = _columns(scales)
        return carried, options

    def _out(self, input: Any, rows: int) -> Optional[Tensor]:
        """Memory for the rows that arrive, so that a GPU need not copy them; None on the CPU."""
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
