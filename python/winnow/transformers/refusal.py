"""The errors of winnow.transformers."""

from typing import Any, NoReturn

from winnow.errors import InvalidArgument


def refuse(argument: str, wanted: str, got: Any) -> NoReturn:
    error = InvalidArgument(f"transformers: {argument}: want {wanted}, got {got}")
    error.operation, error.argument = "transformers", argument
    raise error
