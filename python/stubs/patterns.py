"""Writes patterns for nanobind's stub generator: overloads for results that depend on arguments.

    python patterns.py FOLDER_OF_THE_EXTENSION FILE

FILE begins with the contents of module.pattern in this folder.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOMS = ("compressor", "expert_parallel", "indexer", "paged_xl", "sparse_mla")


def signatures():
    """Loads winnow._signatures by its path, since the package is not installed yet."""
    path = HERE.parent / "winnow" / "_signatures.py"
    spec = importlib.util.spec_from_file_location("_signatures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["_signatures"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def functions(owner, path):
    """(name in stubs, signature) of a module's functions and of its classes' methods."""
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, type):
            yield from functions(value, f"{path}.{name}")
        elif hasattr(value, "__nb_signature__"):
            yield f"{path}.{name}", value.__nb_signature__[0][0]


def patterns(extension, parse):
    for room in ROOMS:
        for path, declared in functions(getattr(extension, room), f"_winnow.{room}"):
            if " if " not in declared:
                continue
            *first, last = parse(declared).overloads()
            yield f"{path}$:"
            for overload in first:
                yield f"    @typing.overload\n    {overload}: ..."
            yield f"    @typing.overload\n    {last}:\n        \\doc\n"


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    lines = patterns(importlib.import_module("_winnow"), signatures().Signature.parse)
    text = (HERE / "module.pattern").read_text() + "\n" + "\n".join(lines) + "\n"
    Path(sys.argv[2]).write_text(text)
