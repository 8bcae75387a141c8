"""Signatures of functions as text, in Python's own syntax: what the extension declares its
operations with, and from which stubs and torch operators follow. Needs no other module of winnow.

The result may depend on arguments: ``-> tuple[T, T] if return_lse or out else T`` is the pair if
one of them is given and true; with ``and`` all of them must be.
"""

import ast
from dataclasses import dataclass, replace
from typing import Any, Iterator, List, Optional, Tuple


@dataclass(frozen=True)
class Parameter:
    name: str
    annotation: str
    default: Optional[str] = None
    by_keyword: bool = False

    def __str__(self) -> str:
        if not self.annotation:  # self
            return self.name
        return f"{self.name}: {self.annotation}" + (f" = {self.default}" if self.default else "")


@dataclass(frozen=True)
class Signature:
    name: str
    parameters: Tuple[Parameter, ...]
    result: str

    @classmethod
    def parse(cls, text: str) -> "Signature":
        """Of "def f(x: T, *, y: int = 1) -> T"."""
        node: Any = ast.parse(f"{text}: ...").body[0]
        given = node.args
        first = [None] * (len(given.args) - len(given.defaults)) + given.defaults
        listed = [(a, d, False) for a, d in zip(given.args, first, strict=True)]
        listed += [(a, d, True) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        parameters = tuple(
            Parameter(
                a.arg,
                ast.unparse(a.annotation) if a.annotation else "",
                None if d is None else ast.unparse(d),
                k,
            )
            for a, d, k in listed
        )
        return cls(node.name, parameters, ast.unparse(node.returns))

    def __str__(self) -> str:
        listed = []
        for parameter in self.parameters:
            if parameter.by_keyword and "*" not in listed:
                listed.append("*")
            listed.append(str(parameter))
        return f"def {self.name}({', '.join(listed)}) -> {self.result}"

    def without(self, names: Tuple[str, ...]) -> "Signature":
        """Without the parameters of those names."""
        kept = tuple(p for p in self.parameters if p.name not in names)
        return replace(self, parameters=kept)

    def plus(self, text: str, result: str = "") -> "Signature":
        """With the parameters of a text, by keyword, and with that result."""
        added = Signature.parse(f"def f(*, {text}) -> None").parameters if text else ()
        return replace(self, parameters=self.parameters + added, result=result or self.result)

    def results(self) -> Tuple[List[str], str, List[str]]:
        """The results, "and" or "or", and the names of the conditions. Of two results the first is
        for calls in which the conditions hold. A single result is for all calls, without
        conditions."""
        node = ast.parse(self.result, mode="eval").body
        if not isinstance(node, ast.IfExp):
            return [self.result], "", []
        test = node.test
        word = "and" if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else "or"
        asked = test.values if isinstance(test, ast.BoolOp) else [test]
        known = {p.name for p in self.parameters}
        names = [n.id for n in asked if isinstance(n, ast.Name) and n.id in known]
        if not names:
            return [ast.unparse(node.orelse)], "", []
        return [ast.unparse(node.body), ast.unparse(node.orelse)], word, names

    def overloads(self) -> "Iterator[Signature]":
        """The signatures for a type checker. There is one, or if the result depends on arguments
        three: where none of them is given, where they are, and where that is not known."""
        results, word, names = self.results()
        if not names:
            yield replace(self, result=results[0])
            return
        yield self._overload(results[1], {name: self._absent(name) for name in names})
        given = names if word == "and" else names[:1]
        yield self._overload(results[0], {name: self._present(name) for name in given})
        yield replace(self, result=_either(*results))

    def _overload(self, result: str, changed: dict) -> "Signature":
        parameters = tuple(changed.get(p.name, p) for p in self.parameters)
        return replace(self, parameters=parameters, result=result)

    def _find(self, name: str) -> Parameter:
        return next(p for p in self.parameters if p.name == name)

    def _absent(self, name: str) -> Parameter:
        parameter = self._find(name)
        if parameter.annotation == "bool":
            return replace(parameter, annotation="typing.Literal[False]")
        # A single tensor as `out` does not ask for further results; a tuple may.
        single = parameter.annotation.startswith("T | tuple")
        return replace(parameter, annotation="T | None" if single else "None")

    def _present(self, name: str) -> Parameter:
        parameter = self._find(name)
        if parameter.annotation == "bool":
            return replace(parameter, annotation="typing.Literal[True]", default=None)
        return replace(
            parameter, annotation=parameter.annotation.removesuffix(" | None"), default=None
        )


def _either(one: str, other: str) -> str:
    """A type that covers both. Two tuples become one of any length: callers know which it is."""
    if one.startswith("tuple") and other.startswith("tuple"):
        return "tuple[T, ...]"
    return f"{other} | {one}"
