"""The entry of public methods: errors name the method and its arguments as the caller does."""

import contextlib
import functools
import inspect
from contextvars import ContextVar
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, TypeVar

from winnow.errors import Error

Method = TypeVar("Method", bound=Callable)

# What is wrong with a call: (argument, wanted, got).
Why = Tuple[str, str, Any]

# The method that is being called, and what its errors call the layers' arguments.
_called: ContextVar[Tuple[str, Optional[Callable[[], Dict[str, str]]]]] = ContextVar(
    "called", default=("deep_ep", None)
)


def text_of(why: Why) -> str:
    argument, wanted, got = why
    return f"{argument}: want {wanted}, got {got}"


def called() -> str:
    """The method that is being called, "deep_ep.Buffer.dispatch"."""
    return _called.get()[0]


@contextlib.contextmanager
def calling(name: str, names: Optional[Callable[[], Dict[str, str]]] = None) -> Iterator[None]:
    """Within it called() is `name`. Errors that leave it get the caller's names(), if any."""
    before = _called.set((name, names))
    try:
        yield
    except Error as error:
        if names is not None:
            _translate(error, names())
        raise
    finally:
        _called.reset(before)


def later(function: Callable[[], Any]) -> Callable[[], Any]:
    """`function`, to be called when the method has returned: its errors are the method's."""
    method = _called.get()

    def call() -> Any:
        with calling(*method):
            return function()

    return call


def entry(
    refuse: Optional[Callable[[Any, Why], Any]] = None, **names: str
) -> Callable[[Method], Method]:
    """Decorates a public method: errors that it raises name it and its arguments.

    `names` maps the layers' names of arguments to the caller's, "x", or to a part of one of the
    caller's, "x, scales"; those of the object's `_names` hold, too. All ranks make the same call,
    so each can translate what another one reports. refuse(layers, why), if all ranks make the call:
    takes part in it when this rank's arguments do not fit the signature. A constructor gives it the
    group in place of the layers.
    """

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)
        own = {name: name for name in signature.parameters}

        @functools.wraps(method)
        def call(self: Any, *given: Any, **options: Any) -> Any:
            new = method.__name__ == "__init__"
            layers = getattr(self, "_layers", None)
            if refuse is None:
                layers = None
            elif new:
                layers = given[0] if given else options.get("group")
            elif layers is not None and not getattr(self, "enable_shrink", False):
                layers.count_call()  # which masked ranks do not make
            name = self._name if new else f"{self._name}.{method.__name__}"
            with calling(name, lambda: {**own, **self._names, **names}):
                try:
                    return method(self, *given, **options)
                except TypeError:
                    if layers is not None and (why := _unfit(signature, self, given, options)):
                        with contextlib.suppress(Error):  # which the other ranks raise
                            refuse(layers, why)
                    raise

        return call  # type: ignore[return-value]

    return decorate


def _translate(error: Error, names: Dict[str, str]) -> None:
    """Changes the error in place, which keeps its traceback."""
    message, found = error.message, error.argument or error.differing
    argument = error.argument
    if found in names:
        argument, _, part = names[found].partition(", ")
        if error.argument:
            new = f"{argument}: want {part}: " if part else f"{argument}: want "
            message = message.replace(f"{found}: want ", new, 1)
        else:  # "dtype of input differs: ..."
            new = f"{part} of {argument}" if part else argument
            message = message.replace(f"{found} differs: ", f"{new} differs: ", 1)
    error.args = (f"{called()}: {message}",)
    error.operation, error.argument = called(), argument


def _unfit(signature: Any, self: Any, given: tuple, options: dict) -> Optional[Why]:
    """What is wrong with the arguments if they do not fit the signature."""
    try:
        signature.bind(self, *given, **options)
    except TypeError as error:
        unknown = next((name for name in options if name not in signature.parameters), None)
        if unknown is not None:
            return unknown, "no argument of this name", "one"
        return "arguments", "those of the signature", error
    return None
