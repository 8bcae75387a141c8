"""Writes python/winnow/torch.pyi, the types of winnow.torch for type checkers:

    python python/stubs/torch_stub.py [FILE]

It needs the package and torch. A test compares the file in the repository with its output.
"""

import re
import sys
from pathlib import Path

import winnow.torch

_HEAD = '''"""The types of torch.py, for type checkers. Written by python/stubs/torch_stub.py."""

import typing

import torch
from torch import Tensor
'''

_TYPES = {"T": "Tensor", "dtype": "torch.dtype"}


def _annotation(text):
    return " | ".join(_TYPES.get(word, word) for word in text.split(" | "))


def _definition(signature):
    """A definition on one line, as in the stubs that nanobind writes for the extension."""
    parameters = []
    for parameter in signature.parameters:
        if parameter.by_keyword and "*" not in parameters:
            parameters.append("*")
        default = "" if parameter.default is None else f" = {parameter.default}"
        default = default.replace("'", '"')
        parameters.append(f"{parameter.name}: {_annotation(parameter.annotation)}{default}")
    result = re.sub(r"\bT\b", "Tensor", signature.result)
    return f"def {signature.name}({', '.join(parameters)}) -> {result}: ..."


def stub():
    imports, definitions = [], []
    for name in winnow.torch.__all__:
        function = getattr(winnow.torch, name)
        signature = getattr(function, "declared", None)
        if signature is None:
            imports.append(f"from {function.__module__} import {function.__name__} as {name}")
            continue
        overloads = list(signature.overloads())
        for overload in overloads:
            mark = "@typing.overload\n" if len(overloads) > 1 else ""
            definitions.append(mark + _definition(overload))
    exported = "\n".join(f'    "{name}",' for name in winnow.torch.__all__)
    parts = [_HEAD, "\n".join(sorted(imports)), f"\n__all__ = [\n{exported}\n]\n"]
    return "\n".join(parts) + "\n" + "\n".join(definitions) + "\n"


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "winnow" / "torch.pyi"
    Path(sys.argv[1] if len(sys.argv) > 1 else default).write_text(stub())
