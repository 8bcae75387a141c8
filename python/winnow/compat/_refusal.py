"""How the functions of this package refuse."""

import contextlib
import re
from typing import Any, Dict, NoReturn, Tuple, Type, TypeVar

from winnow._refusal import refuse
from winnow._winnow import details_of
from winnow.errors import Error, InvalidArgument

__all__ = [
    "REFUSALS", "check_value", "error_of", "flag", "refuse", "refuse_call", "renamed", "shape_of",
]  # fmt: skip


Raised = TypeVar("Raised", bound=Error)


def error_of(kind: Type[Raised], operation: str, message: str, **fields: str) -> Raised:
    """The error with that message, which may name an argument as those of the library do."""
    error = kind(f"{operation}: {message}")
    error.operation = operation
    error.argument, error.wanted, error.got = details_of(message)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def refuse_call(operation: str, message: str) -> NoReturn:
    """What is not here at all, and what there is in its place."""
    raise error_of(Error, operation, message, code="unsupported")


def shape_of(operation: str, argument: str, tensor: Any) -> Tuple[int, ...]:
    """The shape of a tensor, or a refusal of what has none."""
    try:
        return tuple(tensor.shape)
    except (AttributeError, RuntimeError, TypeError):  # RuntimeError: a nested tensor's
        refuse(operation, argument, "a tensor", type(tensor).__name__)


def flag(operation: str, argument: str, value: Any) -> bool:
    """True or False, also as a number or a tensor with one element; anything else is refused."""
    if value is True or value is False:
        return value
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # of several elements
        for known in (True, False):
            if value == known:
                return known
    shown = type(value).__name__ if hasattr(type(value), "shape") else repr(value)
    refuse(operation, argument, "True or False", shown)


def check_value(operation: str, argument: str, wanted: Any, got: Any, note: str = "") -> None:
    """Refuses every value but one. The note says in the error why it is that one."""
    try:
        if got == wanted:
            return
    except (RuntimeError, TypeError, ValueError):  # of several elements
        pass
    refuse(operation, argument, f"{wanted}{note}", got)


REFUSALS = (InvalidArgument, TypeError)


def renamed(operation: str, names: Dict[str, str], error: Exception) -> Exception:
    """An error of Winnow's functions, to be raised in terms of the operation and the arguments as
    the caller knows them: `names` has those of the arguments that are called differently here, by
    the names here; "" is what an error is about that names none. No wrapper of the call, which
    would cost 0.8 us."""
    found = getattr(error, "argument", None)  # None: of a TypeError of Python's own
    argument = names.get(found, found)
    if not argument:
        return error

    def theirs(text: str) -> str:
        # Names of one word are words of sentences, too.
        for ours in [name for name in names if "_" in name]:
            text = re.sub(rf"\b{ours}\b", names[ours], text)
        return text

    if isinstance(error, TypeError):
        return TypeError(f"{operation}(): {argument}: want {theirs(error.wanted)}, got {error.got}")
    text = error.message.removeprefix(f"{found}: " if found else "")
    error.args = (f"{operation}: {argument}: {theirs(text)}",)
    error.operation, error.argument, error.wanted = operation, argument, theirs(error.wanted)
    return error
