"""The libraries themselves, where they are installed behind the modules that replace them here.

What a program asks of such a module and Winnow does not have is passed on to the original.
"""

import functools
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Set, TypeVar

__all__ = ["has_functions_of", "is_passed_on", "original", "passed_on"]

_FOLDER = Path(__file__).resolve().parent / "path"  # where path() lets imports find our modules
_COPIES = {"deep_gemm": "vllm.third_party.deep_gemm"}  # of engines, in their own processes
_loading: Set[str] = set()
_absent: Dict[str, List[str]] = {}  # the sys.path on which there was none
_passed_on: Set[Any] = set()
Function = TypeVar("Function", bound=Callable[..., Any])


def original(name: str) -> Optional[ModuleType]:
    """The library of that name, imported; None where it is not installed.

    Where our module stands in its place, the library takes that place with our functions in it: so
    it finds itself and its submodules by its own name, as do the programs that import them.

    Raises:
        Exception: its own, where its import fails. The next call tries again.
    """
    if name in sys.modules and not _is_ours(sys.modules[name]):
        return sys.modules[name]
    if name in _loading or _absent.get(name) == sys.path:
        return None
    module = _load(name)
    if module is None:
        _absent[name] = list(sys.path)
    return module


def passed_on(library: str, inside: str = "") -> Callable[[Function], Function]:
    """A function that the library has itself: this one is for where it is not installed, or has
    none of that name. `inside`: the submodule that has it."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            found: Any = original(library)
            for name in (inside, function.__name__):
                found = getattr(found, name, None) if name else found
            return (function if found in (None, call) else found)(*args, **kwargs)

        _passed_on.add(call)
        return call  # type: ignore[return-value]

    return decorate


def is_passed_on(function: Any) -> bool:
    """Whether it is one of those."""
    return function in _passed_on


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, "__name__", "").startswith("winnow.")


def _load(name: str) -> Optional[ModuleType]:
    """Executes the package. Meanwhile no module of ours has its name or that of a submodule."""

    def registered() -> List[str]:
        return [key for key in sys.modules if key == name or key.startswith(f"{name}.")]

    ours = {key: sys.modules.pop(key) for key in registered()}
    _loading.add(name)
    try:
        if (spec := _find(name)) is not None and spec.loader is not None:
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])  # which may put another module there
            for key in ours if hasattr(sys.modules[name], "__path__") else ():
                if key not in sys.modules and find_spec(key) is not None:
                    import_module(key)
        elif (copy := _copy(name)) is not None:
            sys.modules[name] = copy
    except BaseException:
        for key in registered():
            del sys.modules[key]
        sys.modules.update(ours)
        raise
    finally:
        _loading.discard(name)
    module = sys.modules.get(name)
    for key, stand_in in ours.items():
        _put_over(stand_in, sys.modules.setdefault(key, stand_in))
    return None if module is None or _is_ours(module) else module  # ours: of another Winnow


def _find(name: str) -> Optional[ModuleSpec]:
    """On sys.path, but for the folders of ours."""
    paths = [p for p in sys.path if not p or Path(p).resolve().parent != _FOLDER]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, paths)
        if spec is not None and spec.origin is not None:  # a folder without a package has none
            return spec
    return None


def _copy(name: str) -> Optional[ModuleType]:
    copy = _COPIES.get(name, "")
    if copy.split(".")[0] not in sys.modules or find_spec(copy) is None:
        return None
    return import_module(copy)


def has_functions_of(stand_in: ModuleType, module: Any) -> bool:
    """Whether it is our module, or the library's with our functions in it."""
    return all(getattr(module, name, None) is ours for name, ours in _functions(stand_in).items())


def _put_over(stand_in: ModuleType, module: ModuleType) -> None:
    """Our functions into the library's module; what is passed on to it only where it has none."""
    ours = _functions(stand_in)
    for name in stand_in.__all__:
        if name in ours or not hasattr(module, name):
            setattr(module, name, getattr(stand_in, name))


def _functions(stand_in: ModuleType) -> Dict[str, Any]:
    """Without those that are passed on, and without submodules."""
    found = {name: getattr(stand_in, name) for name in stand_in.__all__}
    return {
        name: ours
        for name, ours in found.items()
        if not is_passed_on(ours) and not isinstance(ours, ModuleType)
    }
