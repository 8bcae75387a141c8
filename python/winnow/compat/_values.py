"""Which expressions of a package's sources are functions or objects of another library.

Reads sources with ast and imports nothing. A name holds what any assignment to it, import or return
gives it, in whatever order: the question is which calls may reach the library, not when. Followed
are imports, also between the modules of the package, assignments, attributes of objects and of
classes, annotations, getattr() by name, import_module(), what functions return, and what of a
library they are given.
"""

import ast
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    AbstractSet,
    Deque,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

# Where packages have copies of the libraries, or had.
_VENDORED = {
    "vllm.third_party.deep_gemm": "deep_gemm",
    "vllm.third_party.flashmla": "flash_mla",
    "sgl_kernel.flash_mla": "flash_mla",
}
LIBRARIES = ("deep_ep", "deep_gemm", "flash_mla")
# The registered operators of copies, which are called beside the library's functions.
_OPERATORS = {
    "torch.ops._flashmla_C": "flash_mla.torch_ops",
    "torch.ops._flashmla_extension_C": "flash_mla.torch_ops",
    "torch.ops._deep_gemm_C": "deep_gemm.torch_ops",
}


@dataclass(frozen=True)
class Value:
    """What an expression may be. The kinds: "of", a module, function or class of a library, by its
    dotted name; "object", an object of a library's class, and "method", one of its attributes;
    "module", "function", "class" and "instance" of the package, by their scopes."""

    kind: str
    name: str

    @property
    def library(self) -> str:
        return self.name.split(".")[0] if self.kind in ("of", "object", "method") else ""


Values = FrozenSet[Value]
# Of a name: x = x.a; x = x.b; ... has the product of all of them.
_MOST_VALUES = 100
_NONE: Values = frozenset()
_RETURN = "return"
Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


_DEEPEST = 300  # levels of a syntax tree, each of which takes up to two calls here


def parsed(text: Union[str, bytes]) -> Tuple[Optional[ast.Module], int, str]:
    """The syntax tree of a source; None for what is none, with the line and the reason."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, getattr(error, "lineno", None) or 1, f"no Python: {error}"
    waiting: List[Tuple[ast.AST, int]] = [(tree, 0)]
    while waiting:
        node, level = waiting.pop()
        if level > _DEEPEST:
            return None, getattr(node, "lineno", 1), f"more than {_DEEPEST} levels of syntax"
        waiting += [(inner, level + 1) for inner in ast.iter_child_nodes(node)]
    return tree, 1, ""


# The nodes that say what a name or an attribute holds, or a function returns, and calls.
_READ = (
    ast.AnnAssign, ast.Assign, ast.AsyncFunctionDef, ast.Call, ast.ClassDef, ast.FunctionDef,
    ast.Global, ast.Import, ast.ImportFrom, ast.NamedExpr, ast.Nonlocal, ast.Return,
)  # fmt: skip


def _prefixes(name: str) -> List[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def library_name(module: str) -> Optional[str]:
    """The dotted name in its library of what a dotted name of Python is."""
    for prefix, library in (*_VENDORED.items(), *((name, name) for name in LIBRARIES)):
        if module == prefix or module.startswith(prefix + "."):
            return library + module[len(prefix) :]
    return None


def dotted(node: ast.AST) -> str:
    """ "a.b.c" of such an expression, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@dataclass
class Scope:
    """The names of a module, class or function."""

    name: str
    module: "Module"
    outer: Optional["Scope"]
    node: ast.AST
    names: Dict[str, Set[Value]] = field(default_factory=dict)  # and what it returns, as _RETURN
    elsewhere: Dict[str, "Scope"] = field(default_factory=dict)  # global and nonlocal names
    nodes: List[ast.AST] = field(default_factory=list)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


@dataclass
class Module:
    name: str
    path: Path
    tree: ast.Module
    attributes: Dict[str, Set[Value]] = field(default_factory=dict)  # of objects of unknown kind

    @property
    def package(self) -> str:
        """That from which its relative imports count."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


class Package:
    """The modules of a package, and what their names hold."""

    def __init__(self, modules: List[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.scopes: Dict[str, Scope] = {}
        self.scope_of: Dict[ast.AST, Scope] = {}
        self._telling: Set[str] = set()  # names that hold something of a library
        self._statements: List[Tuple[Scope, ast.AST]] = []
        # Statements are read again when something has changed that they have read: by the dict and
        # the name, or the name alone of what is telling.
        self._reading = -1
        self._readers: Dict[Tuple[int, str], Set[int]] = {}
        self._waiting: Deque[int] = deque()
        self._queued: Set[int] = set()
        named = [*self.modules, *_VENDORED]
        self._folders = {p for name in named for p in _prefixes(name)}
        for module in modules:
            self._open(module.name, module, None, module.tree)
        self._queue(range(len(self._statements)))
        while self._waiting:
            self._reading = self._waiting.popleft()
            self._queued.remove(self._reading)
            scope, node = self._statements[self._reading]
            if isinstance(node, ast.Call):
                self._pass(scope, node)
            else:
                self._read(scope, node)
        self._reading = -1

    def _queue(self, statements: Iterable[int]) -> None:
        new = [one for one in statements if one not in self._queued]
        self._waiting += new
        self._queued.update(new)

    def _see(self, of: int, name: str) -> None:
        """The statement that is being read depends on it."""
        if self._reading >= 0:
            self._readers.setdefault((of, name), set()).add(self._reading)

    def _held(self, names: Dict[str, Set[Value]], name: str) -> AbstractSet[Value]:
        self._see(id(names), name)
        return names.get(name, _NONE)

    # ---- Scopes

    def _open(self, name: str, module: Module, outer: Optional[Scope], node: ast.AST) -> Scope:
        while name in self.scopes:  # a function that is defined twice
            name += "'"
        scope = self.scopes[name] = self.scope_of[node] = Scope(name, module, outer, node)
        scope.nodes = [inner for inner in statements(node) if isinstance(inner, _READ)]
        self._statements += [(scope, inner) for inner in scope.nodes]
        for inner in scope.nodes:
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._open(f"{name}:{inner.name}", module, scope, inner)
            elif isinstance(inner, (ast.Global, ast.Nonlocal)):
                of = self.scopes[module.name] if isinstance(inner, ast.Global) else outer
                if of is not None:
                    scope.elsewhere.update(dict.fromkeys(inner.names, of))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._parameters(scope, node)
        return scope

    def _parameters(self, scope: Scope, node: Function) -> None:
        first = (*node.args.posonlyargs, *node.args.args)[:1]
        if first and scope.outer is not None and scope.outer.is_class:
            if not _is_static(node):
                of_class = any(dotted(d) == "classmethod" for d in node.decorator_list)
                kind = "class" if of_class else "instance"
                scope.names[first[0].arg] = {Value(kind, scope.outer.name)}

    def _add(self, names: Dict[str, Set[Value]], name: str, values: Values) -> None:
        known = names.setdefault(name, set())
        if not values <= known and len(known) < _MOST_VALUES:
            known |= values
            self._queue(self._readers.get((id(names), name), ()))
            if any(value.library for value in values):
                self._tell(name)

    def _give_back(self, scope: Scope, values: Values) -> None:
        """Of a function: what it returns."""
        self._add(scope.names, _RETURN, values)
        if any(value.library for value in values):
            self._tell(scope.name.rpartition(":")[2].rstrip("'"))

    def _tell(self, name: str) -> None:
        if name not in self._telling:
            self._telling.add(name)
            self._queue(self._readers.get((0, name), ()))

    # ---- Statements

    def _read(self, scope: Scope, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = self.scope_of[node]
            self._add(scope.names, node.name, frozenset({Value("function", inner.name)}))
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                self._add(inner.names, argument.arg, self._annotated(scope, argument.annotation))
            returned = self._annotated(scope, node.returns)
            self._give_back(inner, returned)
        elif isinstance(node, ast.ClassDef):
            self._add(scope.names, node.name, frozenset({Value("class", self.scope_of[node].name)}))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.name if alias.asname else alias.name.split(".")[0]
                self._add(scope.names, alias.asname or bound, self._module(bound))
        elif isinstance(node, ast.ImportFrom):
            module = self.imported(scope, node)
            for alias in node.names:
                self._add(scope.names, alias.asname or alias.name, self._from(module, alias.name))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(scope, target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            self._assign(scope, node.target, node.value)
            if isinstance(node, ast.AnnAssign):
                self._hold(scope, node.target, self._annotated(scope, node.annotation))
        elif isinstance(node, ast.Return) and node.value is not None:
            self._give_back(scope, self.values(scope, node.value))

    def _pass(self, scope: Scope, node: ast.Call) -> None:
        """Gives parameters of the package's functions what of a library a call gives them."""
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        if any(self._of_library(scope, argument) for argument in given):
            for argument, inner, name in self.parameters(scope, node):
                self._add(inner.names, name, self._of_library(scope, argument))

    def _of_library(self, scope: Scope, node: ast.AST) -> Values:
        whole = dotted(node.func if isinstance(node, ast.Call) else node)
        parts = whole.split(".")
        for part in parts:
            self._see(0, part)
        if whole != "getattr" and self._telling.isdisjoint(parts):
            return _NONE
        return frozenset(value for value in self.values(scope, node) if value.library)

    def parameters(self, scope: Scope, node: ast.Call) -> List[Tuple[ast.AST, Scope, str]]:
        """Arguments of a call, and the parameters that they are of functions of the package, also
        of __init__() of its classes."""
        found: List[Tuple[ast.AST, Scope, str]] = []
        for value in self.values(scope, node.func):
            made = value.kind == "class"
            for one in self._member(value, "__init__", set()) if made else {value}:
                if one.kind != "function":
                    continue
                inner = self.scopes[one.name]
                assert isinstance(inner.node, (ast.FunctionDef, ast.AsyncFunctionDef))
                listed = [*inner.node.args.posonlyargs, *inner.node.args.args]
                in_class = inner.outer is not None and inner.outer.is_class
                by_place = listed[in_class and not _is_static(inner.node) :]
                for argument, parameter in zip(node.args, by_place, strict=False):
                    if isinstance(argument, ast.Starred):
                        break
                    found.append((argument, inner, parameter.arg))
                found += [(k.value, inner, k.arg) for k in node.keywords if k.arg is not None]
        return found

    def imported(self, scope: Scope, node: ast.ImportFrom) -> str:
        """The absolute name of the module of an import."""
        if not node.level:
            return node.module or ""
        package = scope.module.package.split(".")
        kept = package[: len(package) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _module(self, name: str) -> Values:
        of = library_name(name)
        if of is not None:
            return frozenset({Value("of", of)})
        return frozenset({Value("module", name)})

    def _from(self, module: str, name: str) -> Values:
        of = library_name(f"{module}.{name}")
        if of is not None:
            return frozenset({Value("of", of)})
        return self._attribute(Value("module", module), name)

    def _assign(self, scope: Scope, target: ast.AST, value: Optional[ast.AST]) -> None:
        if value is None:
            return
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            if len(target.elts) == len(value.elts):
                for one, of in zip(target.elts, value.elts, strict=True):
                    self._assign(scope, one, of)
            return
        self._hold(scope, target, self.values(scope, value))

    def _hold(self, scope: Scope, target: ast.AST, values: Values) -> None:
        if not values:
            return
        if isinstance(target, ast.Name):
            self._add(scope.elsewhere.get(target.id, scope).names, target.id, values)
        elif isinstance(target, ast.Attribute):
            of = [v for v in self.values(scope, target.value) if v.kind in ("class", "instance")]
            for value in of:
                self._add(self.scopes[value.name].names, target.attr, values)
            if not of:
                self._add(scope.module.attributes, target.attr, values)

    def _annotated(self, scope: Scope, node: Optional[ast.AST]) -> Values:
        """Objects of the classes that an annotation names."""
        if node is None:
            return _NONE
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            tree, _, _ = parsed(node.value)
            if tree is None:
                return _NONE
            node = tree
        found: Set[Value] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                found |= self._annotated(scope, inner)
            if isinstance(inner, (ast.Name, ast.Attribute)):
                found |= self._made_of(self.values(scope, inner))
        return frozenset(found)

    def _made_of(self, classes: Values) -> Set[Value]:
        """Objects of those of the values that are classes."""
        made = set()
        for value in classes:
            if value.kind == "of" and value.name.rpartition(".")[2][:1].isupper():
                made.add(Value("object", value.name))
            elif value.kind == "class":
                made.add(Value("instance", value.name))
        return made

    # ---- Expressions

    def values(self, scope: Scope, node: ast.AST) -> Values:
        """What an expression may be."""
        if isinstance(node, ast.Name):
            return self._named(scope, node.id)
        if isinstance(node, ast.Attribute):
            if (whole := dotted(node)).startswith("torch.ops."):
                for prefix, of in _OPERATORS.items():
                    if whole.startswith(prefix + "."):
                        return frozenset({Value("of", of + whole[len(prefix) :])})
            bases = self.values(scope, node.value)
            found = set().union(*(self._attribute(base, node.attr) for base in bases))
            if not found and not any(base.library for base in bases):
                found = self._held(scope.module.attributes, node.attr)
            return frozenset(found)
        if isinstance(node, ast.Call):
            return self._called(scope, node)
        if isinstance(node, ast.BoolOp):
            return _NONE.union(*(self.values(scope, value) for value in node.values))
        if isinstance(node, ast.IfExp):
            return self.values(scope, node.body) | self.values(scope, node.orelse)
        if isinstance(node, (ast.NamedExpr, ast.Await)):
            return self.values(scope, node.value)
        return _NONE

    def _named(self, scope: Scope, name: str) -> Values:
        at: Optional[Scope] = scope.elsewhere.get(name, scope)
        while at is not None:
            if not (at.is_class and at is not scope):
                found = self._held(at.names, name)
                if name in at.names:
                    return frozenset(found)
            at = at.outer
        return _NONE

    def _attribute(self, base: Value, name: str) -> Values:
        if base.kind in ("of", "object"):
            if base.name.count(".") > 5:  # x = x.next
                return _NONE
            kind = "of" if base.kind == "of" else "method"
            return frozenset({Value(kind, f"{base.name}.{name}")})
        if base.kind == "module":
            inner = f"{base.name}.{name}"
            if library_name(inner) is not None:
                return self._module(inner)
            if base.name in self.modules:
                names = self.scopes[base.name].names
                found = self._held(names, name)
                if name in names:
                    return frozenset(found)
            return frozenset({Value("module", inner)}) if inner in self._folders else _NONE
        if base.kind in ("class", "instance"):
            return self._member(base, name, set())
        return _NONE

    def _member(self, base: Value, name: str, seen: Set[str]) -> Values:
        scope = self.scopes[base.name]
        if base.name in seen:
            return _NONE
        found: Set[Value] = set()
        for value in self._held(scope.names, name):
            of = self.scopes.get(value.name) if value.kind == "function" else None
            decorators = getattr(of.node, "decorator_list", []) if of else []
            if of and any("property" in dotted(d) for d in decorators):
                found |= self._held(of.names, _RETURN)
            else:
                found.add(value)
        assert isinstance(scope.node, ast.ClassDef)
        for parent in scope.node.bases:
            for value in self.values(scope.outer or scope, parent):
                if value.kind == "class":
                    found |= self._member(value, name, seen | {base.name})
        return frozenset(found)

    def _called(self, scope: Scope, node: ast.Call) -> Values:
        name = dotted(node.func)
        if name in ("getattr", "importlib.import_module", "import_module") and node.args:
            text = node.args[-1 if name != "getattr" else min(1, len(node.args) - 1)]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                if name != "getattr":
                    return self._module(text.value)
                bases = self.values(scope, node.args[0])
                return _NONE.union(*(self._attribute(base, text.value) for base in bases))
            return _NONE
        if name in ("cast", "typing.cast") and len(node.args) == 2:
            return self._annotated(scope, node.args[0]) | self.values(scope, node.args[1])
        found: Set[Value] = set()
        for value in self.values(scope, node.func):
            if value.kind == "function":
                found |= self._held(self.scopes[value.name].names, _RETURN)
            else:
                found |= self._made_of(frozenset({value}))
        return frozenset(found)


def _is_static(node: Function) -> bool:
    return any(dotted(decorator) == "staticmethod" for decorator in node.decorator_list)


def statements(of: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope: not those of functions and classes within, but these themselves."""
    waiting: List[ast.AST] = list(getattr(of, "body", []))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            waiting += _around(node)
        else:
            waiting += list(ast.iter_child_nodes(node))


def _around(node: ast.AST) -> List[ast.AST]:
    """What of a definition belongs to the scope around it."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    defaults = [d for d in node.args.kw_defaults if d is not None]
    return [*node.decorator_list, *node.args.defaults, *defaults]


@dataclass(frozen=True)
class Keys:
    """The keys of a dict that is given as **it: those that it has, and that it may have."""

    certain: FrozenSet[str] = frozenset()
    possible: FrozenSet[str] = frozenset()

    @classmethod
    def of(cls, names: Sequence[Optional[object]]) -> "Optional[Keys]":
        known = [name for name in names if isinstance(name, str)]
        both = frozenset(known)
        return cls(both, both) if len(known) == len(names) else None

    @classmethod
    def either(cls, some: "List[Optional[Keys]]") -> "Optional[Keys]":
        known = [keys for keys in some if keys is not None]
        if not known or len(known) < len(some):
            return None
        certain = frozenset.intersection(*(keys.certain for keys in known))
        return cls(certain, frozenset().union(*(keys.possible for keys in known)))


_Read = Dict[Tuple[int, str], Optional[Keys]]  # by scope and name; None while a name is read


def keys_of(scope: Scope, node: ast.AST) -> Optional[Keys]:
    """The keys of such a dict, if all can be read."""
    try:
        return _keys_of(scope, node, {})
    except RecursionError:  # a long chain of names
        return None


def _keys_of(scope: Scope, node: ast.AST, read: _Read) -> Optional[Keys]:
    if isinstance(node, ast.Dict):
        return Keys.of([k.value if isinstance(k, ast.Constant) else None for k in node.keys])
    if isinstance(node, ast.IfExp):
        return Keys.either([_keys_of(scope, one, read) for one in (node.body, node.orelse)])
    if isinstance(node, ast.Call) and dotted(node.func) == "dict" and not node.args:
        return Keys.of([keyword.arg for keyword in node.keywords])
    at: Optional[Scope] = scope if isinstance(node, ast.Name) else None
    while at is not None:
        name = id(at), dotted(node)
        if name in read:
            return read[name]
        read[name] = None
        keys = _assigned_keys(at, dotted(node), read)
        if keys or dotted(node) in _parameters_of(at.node):
            read[name] = Keys.either(keys)
            return read[name]
        del read[name]
        at = at.outer
    return None


def _parameters_of(node: ast.AST) -> List[str]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    given = node.args
    several = [a for a in (given.vararg, given.kwarg) if a is not None]
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several)]


def _assigned_keys(scope: Scope, name: str, read: _Read) -> List[Optional[Keys]]:
    """Those of each assignment to the name, and of each to one key of it; None for a change that
    cannot be read."""
    found: List[Optional[Keys]] = []
    for node in scope.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(_keys_of(scope, node.value, read))
                elif isinstance(target, ast.Subscript) and dotted(target.value) == name:
                    key = target.slice.value if isinstance(target.slice, ast.Constant) else None
                    found.append(Keys(possible=frozenset({key})) if isinstance(key, str) else None)
        elif isinstance(node, ast.Call) and dotted(node.func) == f"{name}.update":
            found.append(None)
    return found
