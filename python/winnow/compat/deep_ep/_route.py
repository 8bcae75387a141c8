"""One routing of tokens to ranks, which every handle of this package keeps."""

from typing import Any, List, NamedTuple, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from winnow._winnow.expert_parallel import AllToAll, Descriptor
from winnow.compat.deep_ep._layers import Layers, Sizes, widened
from winnow.errors import Error
from winnow.expert_parallel import gradients

FLOAT8 = torch.float8_e4m3fn


class Arrived(NamedTuple):
    """R rows of a dispatch, in memory of their own."""

    rows: Tensor  # [R, H]
    scales: Optional[Tensor]  # [R, columns] of the dtype that was sent
    weights: Optional[Tensor]  # token-major [R, K], expert-major [R]; float32
    expert_ids: Optional[Tensor]  # token-major [R, K], int32: local experts, or -1


def int32_indices(topk_idx: Tensor, experts: int) -> Tensor:
    """Indices as the layer takes them. Those that name no expert stay so: an int64 is not cut."""
    return topk_idx.clamp(min=-2, max=experts + 1).to(torch.int32)


def dense(tensor: Tensor) -> Tensor:
    """Without gradients, and with rows whose elements stand side by side.

    torch calls a tensor contiguous whatever the stride of a dimension of one element is.
    """
    tensor = tensor.detach()
    if tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


class _Scales:
    """Columns of 4 bytes in the float32 columns that a layer carries bit for bit, one for 128."""

    def __init__(self, scales: Any, hidden: int) -> None:
        self.given = scales
        if not self.can_travel(scales, hidden):
            self.columns = scales  # the layer refuses it on all ranks
            return
        self.columns = torch.zeros(
            (scales.shape[0], -(-hidden // 128)), dtype=torch.int32, device=scales.device
        )
        given = scales.detach()
        words = given if given.dtype == torch.int32 else given.view(torch.int32)
        self.columns[:, : self._width].copy_(words.reshape(len(words), self._width))
        self.columns = self.columns.view(torch.float32)

    @staticmethod
    def can_travel(scales: Any, hidden: int) -> bool:
        if not isinstance(scales, Tensor) or scales.dtype not in (torch.float32, torch.int32):
            return False
        return scales.dim() in (1, 2) and scales.shape[1:].numel() <= -(-hidden // 128)

    @property
    def _width(self) -> int:
        return self.given.shape[1:].numel()

    def arrived(self, columns: Tensor) -> Tensor:
        """As they were given: dtype and number of columns."""
        words = columns.view(torch.int32)[:, : self._width].contiguous()
        return words.view(self.given.dtype).reshape(len(words), *self.given.shape[1:])


def _own(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """On a GPU in memory of torch's allocator, which knows streams; on the CPU it is already."""
    return tensor.clone() if tensor is not None and tensor.is_cuda else tensor


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
    ) -> None:
        """Collective. `indices` [n, K]: see AllToAll.dispatch(). The arrived rows: `arrived`."""
        self._layers, self.sizes = layers, sizes
        self.indices = indices
        self._options = {
            "order": order,
            "expert_alignment": expert_alignment,
            "worst_case_rows": worst_case_rows,
        }
        self._values: Optional[Tuple[int, AllToAll, Descriptor]] = None
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
        counts = self.descriptor.host_expert_counts if self._host_knows else None
        return [-(-count // alignment) * alignment for count in counts or []]

    @property
    def _host_knows(self) -> bool:
        return self._options["worst_case_rows"] == 0

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

    def combine(self, rows: Any, bias: Optional[Tensor] = None) -> Tensor:
        """[n, H]: the sum of each token's rows. Collective."""
        given = dense(rows) if isinstance(rows, Tensor) else rows
        return self._calling(
            lambda: self.layer.combine(
                given, self.descriptor, bias=None if bias is None else dense(bias)
            )
        )

    def refuse_repeat(self, why: Tuple[str, str, Any]) -> NoReturn:
        """Takes part in the repeat that the other ranks make, so that all refuse it."""
        argument, wanted, got = why
        text = f"{argument}: want {wanted}, got {got}"
        self._calling(lambda: self.layer._refuse_dispatch(text))
        raise AssertionError("a refusal did not raise")

    def refuse_combine(self, why: Tuple[str, str, Any]) -> NoReturn:
        """The same of combine()."""
        argument, wanted, got = why
        text = f"{argument}: want {wanted}, got {got}"
        self._calling(lambda: self.layer._refuse_combine(text))
        raise AssertionError("a refusal did not raise")

    def combine_values(self, values: Any) -> Tensor:
        """[n, K] float32: numbers of the rows' pairs, added over ranks; each crosses as it is.

        They travel as narrow rows of a layer of their own, whose routing is counted once a route.
        Collective.
        """
        usable = isinstance(values, Tensor) and values.dtype == torch.float32
        usable = usable and values.layout == torch.strided
        if usable and self.token_major:
            usable = values.dim() == 2 and values.shape[0] == self.rows
        elif usable:
            usable = values.shape == (self.rows,)
        columns = self.layer.topk  # the same on every rank, as indices need not be
        if self.token_major and usable:
            columns = max(columns, values.shape[1])
        layer, descriptor = self._values_layer(columns)
        if not usable:
            # The layer names it on all ranks.
            return self._calling(lambda: layer.combine(values, descriptor))
        values = values.detach()
        if not self.token_major:
            values = gradients.by_pair(values, descriptor, None)[:, :columns]
        given = values.shape[1]
        shape = (values.shape[0], layer.hidden)
        rows = torch.zeros(shape, dtype=torch.float32, device=values.device)
        rows[:, :given] = values
        combined = self._calling(lambda: layer.combine(rows, descriptor))
        return combined[:, : given if self.token_major else self.indices.shape[1]].contiguous()

    def _values_layer(self, columns: int) -> Tuple[AllToAll, Descriptor]:
        if self._values is None or self._values[0] < columns:
            hidden = -(-columns // 4) * 4  # a row is a multiple of 16 bytes
            nothing = torch.zeros(
                (self.tokens, hidden), dtype=torch.float32, device=self.indices.device
            )
            sizes = self.sizes._replace(hidden=hidden, dtype=torch.float32)
            layer, got = self._layers.dispatch(
                sizes, nothing, self.indices, own=False, **self._options
            )
            self._values = (columns, layer, got.descriptor)
        return self._values[1:]

    def _repeat(self, input: Any, scales: Any, weights: Optional[Tensor]) -> Arrived:
        carried, options = self._input(self.sizes, input, scales)
        out = self._out(carried, self.rows)
        if weights is not None:
            weights = widened(dense(weights), self.layer.topk, 0)
        got = self.layer.dispatch(
            carried, cached=self.descriptor, weights=weights, out=out, **options
        )
        return self._arrived(got, scales, out)

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
        return layer, got.descriptor, self._arrived(got, scales, out)

    def _input(self, sizes: Sizes, input: Any, scales: Any) -> Tuple[Any, dict]:
        carried = dense(input) if isinstance(input, Tensor) else input
        options = {"copy_out": sizes.device.type == "cpu"}
        if scales is not None:
            options["scales"] = _Scales(scales, sizes.hidden).columns
        return carried, options

    def _out(self, input: Any, rows: int) -> Optional[Tensor]:
        """Memory for rows whose number is known: no copy on a GPU."""
        if not isinstance(input, Tensor) or not input.is_cuda:
            return None
        shape = (rows, self.sizes.hidden)
        return torch.empty(shape, dtype=input.dtype, device=input.device)

    def _arrived(self, got: Any, scales: Any, out: Optional[Tensor]) -> Arrived:
        columns = _own(got.scales)
        return Arrived(
            out if out is not None else _own(got.output),
            None if columns is None else _Scales(scales, self.sizes.hidden).arrived(columns),
            _own(got.weights),
            _own(got.expert_ids),
        )

    def _calling(self, call: Any) -> Any:
        try:
            return call()
        except Error as error:
            self._layers.forget_broken(self.layer, error)
            raise
