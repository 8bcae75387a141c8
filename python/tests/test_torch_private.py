"""What winnow uses of torch that is not public stands in one file, which checks torch's version."""

import re
from pathlib import Path

import pytest
import torch
from processes import forked

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


def _imported_behind(before):
    return forked("-c", f"import torch\n{before}\nimport winnow.torch")


@pytest.mark.parametrize("version", _OTHERS)
def test_another_version_of_torch_is_named(version):
    result = _imported_behind(f"torch.__version__ = {version!r}")
    assert result.returncode == 0, result.stderr
    said = f"winnow.torch was tested with torch 2.11, 2.14 and 2.15, not with {version}"
    assert said in result.stderr


@pytest.mark.parametrize("version", _TESTED)
def test_a_version_that_was_tested_passes_silently(version):
    result = _imported_behind(f"torch.__version__ = {version!r}")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("module", "name", "purpose"), _PARTS)
def test_a_part_that_is_gone_is_an_error_that_names_it(module, name, purpose):
    result = _imported_behind(f"import {module}\ndel {module}.{name}")
    assert result.returncode == 1
    assert re.search(
        rf"ImportError: torch {re.escape(torch.__version__)} has no {module}\.{name}, which "
        rf"winnow\.torch needs {purpose}; it was tested with torch 2\.11, 2\.14 and 2\.15",
        result.stderr,
    ), result.stderr
