"""How the functions of this package refuse."""

from typing import Any, NoReturn

from winnow._winnow import argument_of
from winnow.errors import Error, InvalidArgument


def refuse(operation: str, argument: str, wanted: str, got: Any) -> NoReturn:
    error = InvalidArgument(f"{operation}: {argument}: want {wanted}, got {got}")
    error.operation, error.argument = operation, argument
    raise error


def refuse_call(operation: str, message: str) -> NoReturn:
    """What is not here at all, and what there is in its place."""
    error = Error(f"{operation}: {message}")
    error.operation, error.argument = operation, argument_of(message)
    error.code = "unsupported"
    raise error
