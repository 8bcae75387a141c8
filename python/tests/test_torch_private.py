"""What winnow uses of torch that is not public stands in one file, which checks torch's version."""

import re
from pathlib import Path

import pytest
import torch
from processes import python

import winnow

PACKAGE = Path(winnow.__file__).parent
# A name of torch with an underscore; its modules for compilers are as private without one.
_PRIVATE = re.compile(r"\btorch(\.\w+)*\._[a-z]\w*|torch\.fx\.experimental|\b_functorch\b")


def _uses(text):
    """The lines that use private parts; comments and documentation may name them."""
    code = re.sub(r'""".*?"""|#.*', "", text, flags=re.S)
    return [line.strip() for line in code.splitlines() if _PRIVATE.search(line)]


def test_private_parts_of_torch_stand_in_one_file():
    assert _uses("x = torch._C._part\n") and _uses("from torch._inductor import lowering\n")
    assert not _uses("from torch.utils.flop_counter import register_flop_formula\n")
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "_torch_private.py"]
    assert len(files) > 10
    assert {file.name: uses for file in files if (uses := _uses(file.read_text()))} == {}


_OTHERS = ["2.10.1", "2.1.1", "2.12.0+cu130", "2.110.0", "3.0.0"]
_TESTED = ["2.11.3+cpu", "2.14.1+cu130", "2.15.0"]
_PARTS = [
    ("torch._C", "_after_autograd_keyset", "to record gradients"),
    ("torch._functorch.utils", "enable_single_level_autograd_function", "for torch.func"),
]
# Torch is imported once, which takes seconds; each process behind it imports winnow.torch.
_PROGRAM = """
import os, sys, torch
for number, before in enumerate(sys.argv[2:]):
    if os.fork() == 0:
        os.dup2(os.open(f"{sys.argv[1]}/{number}", os.O_CREAT | os.O_WRONLY), 2)
        exec(before)
        import winnow.torch
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def _as_version(version):
    return f"torch.__version__ = {version!r}"


def _without(module, name):
    return f"import {module}\ndel {module}.{name}"


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    """(the status, what was said) where winnow.torch is imported behind these lines."""
    folder = tmp_path_factory.mktemp("imports")
    lines = [_as_version(version) for version in _OTHERS + _TESTED]
    lines += [_without(module, name) for module, name, _ in _PARTS]
    result = python("-c", _PROGRAM, folder, *lines, check=True)
    said = [(folder / str(number)).read_text() for number in range(len(lines))]
    statuses = map(int, result.stdout.split())
    return dict(zip(lines, zip(statuses, said, strict=True), strict=True))


@pytest.mark.parametrize("version", _OTHERS)
def test_another_version_of_torch_is_named(imports, version):
    status, said = imports[_as_version(version)]
    assert status == 0, said
    assert f"winnow.torch was tested with torch 2.11, 2.14 and 2.15, not with {version}" in said


@pytest.mark.parametrize("version", _TESTED)
def test_a_version_that_was_tested_passes_silently(imports, version):
    assert imports[_as_version(version)] == (0, "")


@pytest.mark.parametrize(("module", "name", "purpose"), _PARTS)
def test_a_part_that_is_gone_is_an_error_that_names_it(imports, module, name, purpose):
    status, said = imports[_without(module, name)]
    assert status == 1
    assert re.search(
        rf"ImportError: torch {re.escape(torch.__version__)} has no {module}\.{name}, which "
        rf"winnow\.torch needs {purpose}; it was tested with torch 2\.11, 2\.14 and 2\.15",
        said,
    ), said
