"""How the functions of this package refuse."""

from typing import Any, Callable, Dict, NoReturn, Tuple

from winnow._refusal import refuse
from winnow._winnow import argument_of
from winnow.errors import Error, InvalidArgument

__all__ = ["check_value", "flag", "refuse", "refuse_call", "renamed", "shape_of"]


def refuse_call(operation: str, message: str) -> NoReturn:
    """What is not here at all, and what there is in its place."""
    error = Error(f"{operation}: {message}")
    error.operation, error.argument = operation, argument_of(message)
    error.code = "unsupported"
    raise error


def shape_of(operation: str, argument: str, tensor: Any) -> Tuple[int, ...]:
    """The shape of a tensor, or a refusal of what has none."""
    try:
        return tuple(tensor.shape)
    except (AttributeError, RuntimeError, TypeError):  # RuntimeError: a nested tensor's
        refuse(operation, argument, "a tensor", type(tensor).__name__)


def flag(operation: str, argument: str, value: Any) -> bool:
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError):  # of several elements
        refuse(operation, argument, "True or False", type(value).__name__)


def check_value(operation: str, argument: str, wanted: Any, got: Any, note: str = "") -> None:
    """Refuses every value but one. The note says in the error why it is that one."""
    try:
        same = bool(got == wanted)
    except (RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        refuse(operation, argument, f"{wanted}{note}", got)


def renamed(operation: str, names: Dict[str, str], function: Callable, *given, **options) -> Any:
    """function(...), whose errors name the operation and the arguments as the caller knows them:
    `names` has those of the arguments that are called differently here, by the names here."""
    try:
        return function(*given, **options)
    except (InvalidArgument, TypeError) as error:
        head, colon, rest = str(error).partition(": ")
        argument, found, message = rest.partition(": ")
        if not (colon and found):
            raise
        argument = names.get(argument, argument)
        call = "()" if head.endswith("()") else ""
        again = type(error)(f"{operation}{call}: {argument}: {message}")
        if isinstance(error, InvalidArgument):
            again.operation, again.argument, again.code = operation, argument, error.code
        raise again from None
