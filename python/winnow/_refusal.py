"""How functions written in Python refuse an argument, as those of the library do."""

from typing import Any, NoReturn

from winnow.errors import InvalidArgument


def refuse(operation: str, argument: str, wanted: str, got: Any) -> NoReturn:
    error = InvalidArgument(f"{operation}: {argument}: want {wanted}, got {got}")
    error.operation, error.argument, error.wanted, error.got = operation, argument, wanted, str(got)
    raise error
