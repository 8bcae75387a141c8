"""The errors of winnow.transformers."""

from typing import Any, NoReturn

from winnow import _refusal


def refuse(argument: str, wanted: str, got: Any) -> NoReturn:
    _refusal.refuse("transformers", argument, wanted, got)
