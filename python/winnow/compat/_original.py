"""The libraries themselves, where they are installed behind the modules that replace them here.

What a program asks of such a module and Winnow does not have is passed on to the original.
"""

import contextlib
import functools
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, TypeVar

__all__ = ["has_functions_of", "is_passed_on", "lock_of", "original", "passed_on"]

_COPIES = {"deep_gemm": "vllm.third_party.deep_gemm"}  # of engines, in their own processes
_loading: Set[str] = set()
_absent: Dict[str, Tuple[List[str], bool]] = {}  # where there was none
_failed: Set[str] = set()  # whose last import has raised an error
_passed_on: Set[Any] = set()
_importlib: Any = import_module("importlib._bootstrap")
Function = TypeVar("Function", bound=Callable[..., Any])


def lock_of(name: str) -> Any:
    """A context in which no other thread imports that module: the lock that import statements of it
    take, so that no lock of ours and that one can be taken in two orders."""
    return _importlib._ModuleLockManager(name)


def original(name: str) -> Optional[ModuleType]:
    """The library of that name, imported; None where it is not installed.

    Where our module stands in its place, the library takes that place with our functions in it: so
    it finds itself and its submodules by its own name, as do the programs that import them. Other
    threads wait for that.

    Raises:
        Exception: its own, where its import fails. The next call tries again.
    """
    found = sys.modules.get(name)
    if found is not None and not _is_ours(found):
        if not getattr(getattr(found, "__spec__", None), "_initializing", False):
            return found
    elif _absent.get(name) == _searched():
        return None
    with lock_of(name):
        found = sys.modules.get(name)
        if found is not None and not _is_ours(found):
            return found
        if name in _loading:
            return None
        searched = _searched()
        try:
            module = _load(name)
        except BaseException:
            _failed.add(name)
            raise
        _failed.discard(name)
        if module is None:
            _absent[name] = searched
        return module


def _searched() -> Tuple[List[str], bool]:
    """Where libraries are looked for."""
    return list(sys.path), "vllm" in sys.modules


def passed_on(
    library: str, inside: str = "", works_here: bool = False
) -> Callable[[Function], Function]:
    """A function that the library has itself: this one is for where it is not installed, or has
    none of that name, and if it works here also for where the library's import fails. `inside`: the
    submodule that has it."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if works_here and library in _failed:
                return function(*args, **kwargs)
            try:
                found: Any = original(library)
            except Exception:
                if not works_here:
                    raise
                found = None
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


class _Completing(MetaPathFinder, Loader):
    """Finds the modules of a library for which we have stand-ins, and puts our functions into each
    while other threads still wait for its import."""

    def __init__(self, spec: ModuleSpec, ours: Dict[str, ModuleType]) -> None:
        self._root = spec
        self._ours = ours
        self._loaders: Dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name == self._root.name:
            spec: Optional[ModuleSpec] = self._root
        else:
            spec = _find(name, path) if name in self._ours else None
        if spec is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> Optional[ModuleType]:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = loader = self._loaders.pop(spec.name)
        loader.exec_module(module)
        found = sys.modules[spec.name]  # it may have put another one there
        if spec.name in self._ours:
            _put_over(self._ours[spec.name], found)
        if spec.name == self._root.name:
            for key, stand_in in self._ours.items():
                if hasattr(found, "__path__") and key not in sys.modules:
                    with contextlib.suppress(Exception):  # then the stand-in for it stays
                        import_module(key)
                sys.modules.setdefault(key, stand_in)


class _OfCopy(MetaPathFinder, Loader):
    """Finds submodules of a copy by the library's name, too. None is executed twice."""

    def __init__(self, name: str) -> None:
        self._name, self._copy = name, _COPIES[name]
        self._specs: Dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        root = getattr(sys.modules.get(self._name), "__name__", "")
        if not name.startswith(f"{self._name}.") or root != self._copy:
            return None
        found = find_spec(self._copy + name[len(self._name) :])
        return None if found is None else spec_from_loader(name, self, origin=found.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._copy + spec.name[len(self._name) :])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # that of the library's name, which importlib has set
        module.__spec__ = self._specs.pop(module.__spec__.name)


def _load(name: str) -> Optional[ModuleType]:
    """Executes the package. Meanwhile no module of ours has its name or that of a submodule."""

    def registered() -> List[str]:
        return [key for key in sys.modules if key == name or key.startswith(f"{name}.")]

    spec = _find(name)
    if spec is None and not _has_copy(name):
        return None
    ours = {key: sys.modules.pop(key) for key in registered()}
    finders: List[Any] = [] if spec is None else [_Completing(spec, ours)]
    sys.meta_path[:0] = finders
    _loading.add(name)
    try:
        if spec is not None:
            import_module(name)
        else:
            copy = import_module(_COPIES[name])
            for stand_in in ours.values():
                _put_over(stand_in, copy)
            sys.meta_path.insert(0, _OfCopy(name))
            sys.modules[name] = copy
    except BaseException:
        for key in registered():
            del sys.modules[key]
        sys.modules.update(ours)
        raise
    finally:
        _loading.discard(name)
        for finder in finders:
            sys.meta_path.remove(finder)
    return sys.modules[name]


def _find(name: str, path: Optional[Sequence[str]] = None) -> Optional[ModuleSpec]:
    """In the folders of `path`, or on sys.path but for the folders of compat.path()."""
    if path is None:
        path = [folder for folder in sys.path if not _is_of_path(folder, name)]
    for finder in sys.meta_path:
        if isinstance(finder, (_Completing, _OfCopy)):
            continue
        spec = finder.find_spec(name, path)
        # A folder without a package has no origin.
        if spec is not None and spec.origin is not None and spec.loader is not None:
            return spec
    return None


def _is_of_path(folder: str, name: str) -> bool:
    """Whether it is a folder of compat.path(), of this Winnow or of another one."""
    try:
        text = (Path(folder) / name / "__init__.py").read_bytes()
    except OSError:
        return False
    return b"from winnow.compat import install" in text


def _has_copy(name: str) -> bool:
    copy = _COPIES.get(name, "")
    if copy.split(".")[0] not in sys.modules:
        return False
    try:
        return find_spec(copy) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def has_functions_of(stand_in: ModuleType, module: Any) -> bool:
    """Whether it is our module, or the library's with our functions in it."""
    return all(getattr(module, name, None) is ours for name, ours in _functions(stand_in).items())


def _put_over(stand_in: ModuleType, module: ModuleType) -> None:
    """Our functions into the library's module; what is passed on to it only where it has none."""
    ours = _functions(stand_in)
    for name in stand_in.__all__:
        if name in ours or not hasattr(module, name):
            try:
                setattr(module, name, getattr(stand_in, name))
            except (AttributeError, TypeError) as error:
                text = f"{stand_in.__name__} cannot complete the library: it takes no {name}"
                raise ImportError(text) from error


def _functions(stand_in: ModuleType) -> Dict[str, Any]:
    """Without those that are passed on, and without submodules."""
    found = {name: getattr(stand_in, name) for name in stand_in.__all__}
    return {
        name: ours
        for name, ours in found.items()
        if not is_passed_on(ours) and not isinstance(ours, ModuleType)
    }
