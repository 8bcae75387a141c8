"""Finds the calls of flash_mla, deep_gemm and deep_ep in a package's sources, and says which of
them the modules of winnow.compat take."""

import ast
import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, Iterator, List, NoReturn, Optional, Sequence, Set, Tuple

from winnow.compat._original import is_passed_on
from winnow.compat._values import (
    LIBRARIES,
    Module,
    Package,
    Scope,
    Value,
    dotted,
    keys_of,
    library_name,
    parsed,
)

TAKEN, PASSED_ON, REFUSED = "taken", "passed on", "refused by name"
NOT_TAKEN, NOT_JUDGED = "not taken", "not judged"
STATUSES = (TAKEN, PASSED_ON, REFUSED, NOT_TAKEN, NOT_JUDGED)
# The modules that pass names which they lack on to the original.
_PASSING = ("deep_gemm", "flash_mla")

# Functions and arguments that no GPU of Winnow's could execute, and why.
_NVFP4 = "rows in NVFP4, a format of Blackwell GPUs"
_ASCEND = "a build for Ascend NPUs has it"
_REFUSED = {
    "deep_ep.Buffer.fused_deep_moe": _ASCEND,
    "deep_ep.Buffer.low_latency_dispatch: topk_weights": _ASCEND,
    "deep_ep.Buffer.low_latency_dispatch: use_nvfp4": _NVFP4,
    "deep_ep.Buffer.low_latency_dispatch: x_global_scale": _NVFP4,
}

_DENSE = "flash_mla.flash_mla_with_kvcache without indices"
# The only constants that these arguments may have, whether given or by default. The constants of
# other arguments are not looked at.
_CONSTANTS: Dict[str, Dict[str, Tuple[Any, ...]]] = {
    "flash_mla.flash_mla_sparse_fwd": {"d_v": (512,)},
    "flash_mla.flash_mla_with_kvcache": {
        "head_dim_v": (512,),
        "causal": (False,),
        "is_fp8_kvcache": (True,),
        "kv_format": (None, "V32", "V4"),
        "descale_q": (None,),
        "descale_k": (None,),
    },
    _DENSE: {"head_dim_v": (512,), "kv_format": (None, "V32")},
    "deep_gemm.fp8_mqa_logits": {"logits_dtype": (None,)},
    "deep_gemm.fp8_fp4_mqa_logits": {"logits_dtype": (None,)},
    "deep_gemm.fp8_paged_mqa_logits": {"logits_dtype": (None,), "indices": (None,)},
    "deep_gemm.fp8_fp4_paged_mqa_logits": {"logits_dtype": (None,), "indices": (None,)},
    "deep_ep.Buffer": {"comm": (None,)},
    "deep_ep.Buffer.low_latency_combine": {"use_logfmt": (False,)},
}
_UNKNOWN = object()  # an argument that is no constant

_MENTIONS = re.compile(rb"flash_?mla|deep_?gemm|deep_?ep", re.IGNORECASE)
# Methods of deep_ep that are reported even if the class of the object is not known, in modules that
# import deep_ep.
_METHODS = {
    "clean_low_latency_buffer", "combine_with_unpermute", "dispatch_with_permute",
    "get_dispatch_layout", "low_latency_combine", "low_latency_dispatch",
}  # fmt: skip
# Functions that do not call what they are given.
_LOOKS = {
    "callable", "cast", "getattr", "hasattr", "id", "inspect.signature", "isinstance", "issubclass",
    "repr", "str", "type", "typing.cast",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Finding:
    """A call, and whether the module here takes its arguments."""

    path: str
    line: int
    called: str
    status: str
    reason: str = ""

    @property
    def library(self) -> str:
        return self.called.split(".")[0]

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.path}:{self.line}: {self.called}: {self.status}{reason}"


def check(folder: Path, libraries: Sequence[str] = LIBRARIES) -> List[Finding]:
    """The calls of these libraries in the Python files of a folder, sorted. The folder is the
    package or holds it; nothing in it is imported."""
    package, findings = _read(folder)
    for scope in package.scopes.values():
        for node in scope.nodes:
            if isinstance(node, ast.ImportFrom):
                findings += _failing(package, scope, node, folder)
            elif isinstance(node, ast.Call):
                findings += _calls(package, scope, node, folder)
    return sorted({found for found in findings if found.library in libraries})


def _read(folder: Path) -> Tuple[Package, List[Finding]]:
    """The modules whose text mentions a library, and findings for files that cannot be read."""
    root = folder.resolve()
    while root != root.parent and (root / "__init__.py").exists():
        root = root.parent
    modules: List[Module] = []
    unread: List[Finding] = []
    names: Set[str] = set()

    def not_judged(path: Path, libraries: Sequence[str], line: int, reason: str) -> None:
        where = str(path.relative_to(folder))
        unread.extend(Finding(where, line, library, NOT_JUDGED, reason) for library in libraries)

    for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
        try:
            text = path.read_bytes()
        except OSError as error:
            not_judged(path, LIBRARIES, 1, f"it cannot be read: {error.strerror}")
            continue
        if not _MENTIONS.search(text):
            continue
        # A link counts where it is, not where it leads.
        parts = list((folder.resolve() / path.relative_to(folder)).relative_to(root).parts)
        parts[-1] = path.stem
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if library_name(name) is not None:
            continue  # the library itself, or a copy of it
        while name in names:  # a.py beside a/__init__.py, which is the one that Python imports
            name += "'"
        names.add(name)
        mentioned = [library for library in LIBRARIES if library.encode() in text]
        tree, line, error = parsed(text)
        if tree is None:
            not_judged(path, mentioned, line, error)
        else:
            modules.append(Module(name, path, tree))
    return Package(modules), unread


def _failing(
    package: Package, scope: Scope, node: ast.ImportFrom, folder: Path
) -> Iterator[Finding]:
    """Findings for names that an import does not find, unless the program goes on without them,
    and for every `import *`, whose names are not followed."""
    where, module = str(scope.module.path.relative_to(folder)), package.imported(scope, node)
    for alias in node.names:
        if alias.name == "*":
            if (library := library_name(module)) is not None:
                yield Finding(where, node.lineno, library, NOT_JUDGED, "all its names are imported")
            continue
        of = library_name(f"{module}.{alias.name}")
        if of is not None and _stand_in(of) is None:
            if not _guarded(scope, node):
                status, reason = _absent(of)
                end = "else the import fails" if status == PASSED_ON else "the import fails"
                yield Finding(where, node.lineno, of, status, f"{reason}; {end}")


def _calls(package: Package, scope: Scope, node: ast.Call, folder: Path) -> Iterator[Finding]:
    values = package.values(scope, node.func)
    found = [(v.name, *_judge(scope, node, v)) for v in values if v.library]
    if isinstance(node.func, ast.Attribute) and not values and _imports_deep_ep(package, scope):
        held_in = dotted(node.func.value).rpartition(".")[2]
        exchanged = node.func.attr in ("dispatch", "combine") and "buffer" in held_in.lower()
        if exchanged or node.func.attr in _METHODS:
            reason = "the class of the object is not known"
            found.append((f"deep_ep.?.{node.func.attr}", NOT_JUDGED, reason))
    if dotted(node.func) == "getattr" and _computes_name(node):
        modules = package.values(scope, node.args[0])
        reason = "a name is computed that is taken from it"
        found += [(v.name, NOT_JUDGED, reason) for v in modules if v.kind == "of"]
    if dotted(node.func) not in _LOOKS:
        parameters = package.parameters(scope, node)
        for given in (*node.args, *(keyword.value for keyword in node.keywords)):
            held = [of.names.get(name, ()) for one, of, name in parameters if one is given]
            for value in package.values(scope, given):
                # Objects keep their class in annotations, and a parameter may be followed.
                if value.library and value.kind != "object" and _may_be_called(value):
                    if not any(value in names for names in held):
                        reason = f"it is passed on to {dotted(node.func) or 'a call'}"
                        found.append((value.name, NOT_JUDGED, reason))
    for one in found:
        yield Finding(str(scope.module.path.relative_to(folder)), node.lineno, *one)


def _computes_name(call: ast.Call) -> bool:
    return len(call.args) > 1 and not isinstance(call.args[1], ast.Constant)


def _imports_deep_ep(package: Package, scope: Scope) -> bool:
    names = package.scopes[scope.module.name].names
    return any(value.library == "deep_ep" for values in names.values() for value in values)


def _guarded(scope: Scope, node: ast.AST) -> bool:
    """Whether the program goes on without that import, or needs it for types alone."""
    for around in ast.walk(scope.node):
        guarded: List[ast.stmt] = []
        if isinstance(around, ast.Try) and around.handlers:
            guarded = around.body
        elif isinstance(around, ast.If) and dotted(around.test).endswith("TYPE_CHECKING"):
            guarded = around.body
        if any(inner is node for statement in guarded for inner in ast.walk(statement)):
            return True
    return False


# ---- What stands here for a name of a library


def _stand_in(name: str) -> Optional[Any]:
    """The function, class or module of winnow.compat for a name; None if there is none."""
    from winnow.compat import _MODULES

    modules = _MODULES[name.split(".")[0]]
    known = max((m for m in modules if name == m or name.startswith(f"{m}.")), key=len)
    found: Any = import_module(modules[known])
    for part in name[len(known) + 1 :].split("."):
        if part:  # only a module's own names, since it passes others on
            found = vars(found).get(part) if inspect.ismodule(found) else getattr(found, part, None)
    return found


def _may_be_called(value: Value) -> bool:
    found = _stand_in(value.name)
    return callable(found) or inspect.ismodule(found) or (found is None and value.kind == "of")


def _absent(name: str) -> Tuple[str, str]:
    """The status of what is not here, and the reason."""
    library, _, inside = name.partition(".")
    if name in _REFUSED:
        return REFUSED, _REFUSED[name]
    if inside.startswith("torch_ops."):
        return PASSED_ON, "to an operator of the package's own copy"
    if library in _PASSING:
        return PASSED_ON, f"to {library}, which must be installed"
    return NOT_TAKEN, f"winnow.compat.{library} has no {inside}"


def _judge(scope: Scope, call: ast.Call, value: Value) -> Tuple[str, str]:
    """Whether the call is taken, and why not."""
    function = _stand_in(value.name)
    if function is None or not callable(function):
        return _absent(value.name)
    signature = inspect.signature(function)
    if signature.return_annotation in (NoReturn, "NoReturn"):
        return _absent(value.name) if is_passed_on(function) else (NOT_TAKEN, "it raises an error")
    parameters = list(signature.parameters.values())
    if value.kind == "method" and not _is_static(value.name):
        signature = signature.replace(parameters=parameters[1:])
    given = [_constant(a) for a in call.args if not isinstance(a, ast.Starred)]
    named: Dict[str, Any] = {}
    unread = len(given) < len(call.args)  # arguments that cannot be read
    perhaps: Set[str] = set()
    for keyword in call.keywords:
        if keyword.arg is not None:
            named[keyword.arg] = _constant(keyword.value)
        elif (keys := keys_of(scope, keyword.value)) is not None:
            named.update(dict.fromkeys(keys.certain, _UNKNOWN))
            perhaps |= keys.possible - keys.certain
        else:
            unread = True
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        known = set(signature.parameters)
        if wrong := sorted(set(named) - known):
            return _wrong(value.name, wrong, "there is no argument")
        if wrong := sorted(perhaps - known):
            return _wrong(value.name, wrong, "where it gives")
    placed = list(signature.parameters)[: len(given)]
    named.update(dict.fromkeys(perhaps.difference(placed), _UNKNOWN))
    bind = signature.bind_partial if unread else signature.bind
    try:
        bound = bind(*given, **named)
    except TypeError as error:
        return NOT_TAKEN, str(error)
    bound.apply_defaults()
    if not unread and (reason := _refused(value.name, bound.arguments)):
        return NOT_TAKEN, reason
    if unread:
        return NOT_JUDGED, "not all of its arguments can be read"
    return TAKEN, "for data in 8 bits" if "fp8_fp4" in value.name else ""


def _wrong(name: str, arguments: List[str], text: str) -> Tuple[str, str]:
    """The status of a call with arguments that the function here does not have."""
    text = f"{text} {' or '.join(arguments)}"
    reasons = {_REFUSED.get(f"{name}: {argument}", "") for argument in arguments}
    return (
        (NOT_TAKEN, text) if "" in reasons else (REFUSED, f"{text}: {'; '.join(sorted(reasons))}")
    )


def _refused(name: str, arguments: Dict[str, Any]) -> str:
    """Which argument has a constant that is not taken, and what is; empty if none has."""
    name = name.replace("flash_mla.flash_mla_interface.", "flash_mla.")
    if name == "flash_mla.flash_mla_with_kvcache" and arguments["indices"] is None:
        name = _DENSE
        for argument in ("block_table", "cache_seqlens"):
            if arguments[argument] is None:
                return f"{argument}: want a tensor without indices, got None"
    for argument, taken in _CONSTANTS.get(name, {}).items():
        value = arguments[argument]
        if value is not _UNKNOWN and value not in taken:
            return f"{argument}: want {' or '.join(map(str, taken))}, got {value}"
    return ""


def _is_static(name: str) -> bool:
    owner, _, method = name.rpartition(".")
    return isinstance(
        inspect.getattr_static(_stand_in(owner), method, None), (staticmethod, classmethod)
    )


def _constant(node: ast.AST) -> Any:
    """Its value, or _UNKNOWN."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN
