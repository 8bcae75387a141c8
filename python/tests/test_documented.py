"""Every function has a docstring and a stub, and every documented example runs."""

import ast
import doctest
import re
from pathlib import Path

import pytest
import winnow.support

import winnow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(winnow.__file__).parent


@pytest.mark.parametrize("room", ["sparse_mla", "compressor", "paged_xl"])
def test_every_function_has_a_docstring_and_a_stub(room):
    """A stub of each, test_typing.py demands."""
    stub = ast.parse((PACKAGE / "_winnow" / f"{room}.pyi").read_text())
    typed = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    for name, node in typed.items():  # of overloads the last, which has the text
        documented = getattr(getattr(winnow, room), name).__doc__
        assert "Raises:" in documented or "errors" in documented, name
        arguments = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        assert arguments[-2:] == ["stream", "backend"], name
        assert ast.get_docstring(node), name
    assert (PACKAGE / "py.typed").exists()


def test_the_expert_parallel_stub_has_what_the_module_has():
    module = winnow.expert_parallel
    stub = ast.parse((PACKAGE / "_winnow" / "expert_parallel.pyi").read_text())
    typed = {node.name: node for node in stub.body if hasattr(node, "name")}
    need_torch = set(module._NEED_TORCH)
    of_the_package = {"_numbered"}
    assert set(typed) == (set(module.__all__) - need_torch - {"notify"}) | of_the_package
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    for name in ("AllToAll", "Notifier", "layout", "create_shared_memory"):
        assert "Raises:" in ast.get_docstring(typed[name]), name
    for name in ("dispatch", "combine", "combine_buffer", "barrier"):
        assert "Raises:" in getattr(module.AllToAll, name).__doc__, name
    arguments = typed["layout"].args
    assert [a.arg for a in arguments.kwonlyargs] == ["out", "stream", "backend"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler has its own
@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("docs/python.md", 5),
        ("docs/transformers.md", 4),
        ("docs/same_bits.md", 1),
        ("docs/context_parallel.md", 1),
        ("README.md", 1),
        ("docs/getting_started.md", 2),
        ("docs/migrate.md", 2),
    ],
)
def test_the_examples_of_the_docs_run(page, least, capsys):
    text = (ROOT / page).read_text()
    examples = 0
    # A section can be pasted into a new session: it imports what it uses.
    for section in re.split(r"^#+ .*$", text, flags=re.MULTILINE):
        names = {}
        for source, expected in re.findall(
            r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", section, re.DOTALL
        ):
            examples += 1
            capsys.readouterr()
            exec(compile(source, page, "exec"), names)
            if expected:
                assert capsys.readouterr().out == expected
    assert examples >= least


def test_the_examples_in_docstrings_run():
    result = doctest.testmod(winnow.support)
    assert result.attempted >= 2 and result.failed == 0
