"""Writes the patterns of nanobind's stub generator for functions whose result depends on arguments:

    python patterns.py FOLDER_OF_THE_EXTENSION FILE

FILE begins with module.pattern, which stands beside this script.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOMS = ("expert_parallel", "indexer", "paged_xl", "sparse_mla")


def signatures():
    """The module of that name of the package, which is not installed yet."""
    path = HERE.parent / "winnow" / "_signatures.py"
    spec = importlib.util.spec_from_file_location("_signatures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["_signatures"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def patterns(extension, parse):
    for room in ROOMS:
        module = getattr(extension, room)
        for name, function in sorted(vars(module).items()):
            declared = getattr(function, "__nb_signature__", None)
            if declared is None or " if " not in declared[0][0]:
                continue
            *first, last = parse(declared[0][0]).overloads()
            yield f"_winnow.{room}.{name}$:"
            for overload in first:
                yield f"    @typing.overload\n    {overload}: ..."
            yield f"    @typing.overload\n    {last}:\n        \\doc\n"
    yield "_winnow.expert_parallel.AllToAll.combine$:"
    for rows, values, result, body in (
        ("T", "None = None", "T", " ..."),
        ("T | None", "T", "tuple[T | None, T]", "\n        \\doc\n"),
    ):
        yield (
            "    @typing.overload\n"
            f"    def combine(self, expert_output: {rows}, descriptor: Descriptor, *, "
            "bias: T | None = None, second_bias: T | None = None, weighted: bool = False, "
            f"weights: T | None = None, pair_values: {values}, add_values: bool = False, "
            f"out: T | None = None, sm_count: int = 0, stream: Stream = None) -> {result}:{body}"
        )


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    lines = patterns(importlib.import_module("_winnow"), signatures().Signature.parse)
    text = (HERE / "module.pattern").read_text() + "\n" + "\n".join(lines) + "\n"
    Path(sys.argv[2]).write_text(text)
