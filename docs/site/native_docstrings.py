"""A Sphinx extension that makes autodoc accept the package's docstrings.

autodoc does not recognise functions of nanobind, so each is replaced by a Python function of the
same signature (`__nb_signature__`), only in the process that builds the site. Indented lines of
docstrings, which are formulas, become literal blocks.
"""

import inspect
import re
import sys
import types

_NATIVE = ("nb_func", "nb_method")


def as_python(native, module):
    signature, text, defaults = native.__nb_signature__[0]
    header = next(line for line in signature.splitlines() if line.startswith("def "))
    # nanobind writes a default that is an object as \0, \1, ...
    header = re.sub(r"\\(\d+)", "...", header)
    names = {}
    exec(f"from __future__ import annotations\n{header}: ...", names)
    (function,) = (value for value in names.values() if isinstance(value, types.FunctionType))
    function.__doc__ = text if len(native.__nb_signature__) == 1 else native.__doc__
    function.__module__ = module
    return function


def replace(owner, module, seen):
    for name, value in list(vars(owner).items()):
        if type(value).__name__ in _NATIVE and not name.startswith("_"):
            setattr(owner, name, as_python(value, module))
        elif inspect.isclass(value) and value.__module__.startswith("winnow._winnow"):
            if value not in seen:
                seen.add(value)
                replace(value, module, seen)
                value.__module__ = module


_SECTIONS = ("Args:", "Attributes:", "Example:", "Raises:", "Returns:", "Yields:")


def literal_formulas(app, what, name, obj, options, lines):
    """Turns indented lines outside of sections into literal blocks."""
    result, above, in_block = [], "", False
    for line in lines:
        inside = line.startswith(" ")
        if inside and not in_block and above not in _SECTIONS and not above.startswith(">>>"):
            in_block = True
            result += ["", "::", ""]
        elif line and not inside:
            if in_block:
                result.append("")
            in_block = False
        if inside and not in_block and ":" in line and _continues(result):
            result[-1] += " " + line.strip()  # joins argument names that are on two lines
        else:
            result.append(line)
        if line and not inside:
            above = line.strip()
    lines[:] = [*result, ""]


def _continues(lines):
    return bool(lines) and lines[-1].endswith(",") and ":" not in lines[-1]


def setup(app):
    app.connect("autodoc-process-docstring", literal_formulas, priority=100)  # before napoleon
    import winnow.compat
    import winnow.distributed
    import winnow.megatron
    import winnow.torch
    import winnow.transformers  # noqa: F401

    seen = set()
    for name, module in sorted(sys.modules.items()):
        if re.match(r"winnow(\.|$)", name) and not name.startswith("winnow._winnow"):
            replace(module, name, seen)
    return {"version": "1", "parallel_read_safe": True}
