"""The errors of winnow.transformers."""

from typing import Any, NoReturn

from winnow import _refusal


def refuse(argument: str, wanted: str, got: Any) -> NoReturn:
    _refusal.refuse("transformers", argument, wanted, got)


def is_size(size: Any, *wanted: Any) -> bool:
    """Whether a size is one of those wanted. Not by "in", for which torch.compile takes the symbol
    of a size and its number for different ones."""
    return any(size == one for one in wanted)
