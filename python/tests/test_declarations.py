"""Each operation is declared once: what follows from that, and what a new one has to touch."""

import re
from pathlib import Path

import pytest
import torch
import winnow.torch
from processes import forked, run
from winnow._signatures import Signature
from winnow._winnow import OF_A_CALL, by_position

from winnow import _operators

ROOT = Path(__file__).resolve().parents[2]


def _sources():
    """All but what a new operation may join, and need not: users, and parts of torch.py."""
    listed = run("git", "ls-files", cwd=ROOT).stdout
    if not listed:
        pytest.skip("no repository")
    for name in listed.split():
        ours = not re.search(
            r"^(CHANGELOG|docs|examples|python/tests|tools|winnow/simulator)|_test\.|_operators\.",
            name,
        )
        if ours and name.endswith((".cc", ".h", ".txt", ".cmake", ".py", ".md", ".toml", ".yml")):
            yield name, (ROOT / name).read_text()


def test_a_new_operation_touches_the_files_that_contributing_lists():
    """What names every operation of every family, or of one, has to name a new one, too."""
    # (family, name) of all operations with a kernel per instruction set.
    text = (ROOT / "winnow" / "cpu" / "kernels.h").read_text()
    operations = re.findall(r"^  X\((\w+), (\w+), \w+\)", text, re.MULTILINE)
    assert len(operations) >= 13
    sources = list(_sources())
    found = set()
    for family in {family for family, _ in operations}:
        names = [name for of, name in operations if of == family]
        for path, text in sources:
            if path.startswith(f"winnow/{family}/"):
                continue  # its own family's rooms
            if all(
                name in text
                and re.search(rf"\b{family}(/|_|\.|::|, |/cache/){name}\b|import.*\b{name}\b", text)
                for name in names
            ):
                found.add(path.replace(f"/{family}.py", "/FAMILY.py"))
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding an operation")[1]
    listed = re.findall(r"^\| `([^`]+)` \|", section.split("\n## ")[0], re.MULTILINE)
    assert len(listed) == 6
    assert found == set(listed)


def test_the_stub_of_the_operators_is_up_to_date():
    made = forked(ROOT / "python" / "stubs" / "torch_stub.py", "/dev/stdout", check=True).stdout
    committed = (ROOT / "python" / "winnow" / "torch.pyi").read_text()
    assert made == committed, "run python/stubs/torch_stub.py"
    assert committed.count("@typing.overload") == 3 * 7


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("def f(x: T, *, y: bool = False) -> T", ["T"]),
        ("def f(*, y: bool = False) -> tuple[T, T] if y else T", ["T", "tuple[T, T]"]),
        ("def f(*, y: T | None = None) -> None if y else T", ["T", "None"]),
        ("def f(*, x: int = 1) -> None if y else T", ["T"]),  # no such argument here
    ],
)
def test_results_that_depend_on_arguments_become_overloads(text, results):
    overloads = list(Signature.parse(text).overloads())
    assert [overload.result for overload in overloads][:2] == results
    assert len(overloads) == (3 if len(results) == 2 else 1)


def test_overloads_say_what_is_given():
    text = "def f(*, s: bool = False, out: T | tuple[T | None, T] | None = None) -> "
    absent, given, either = map(str, Signature.parse(text + "T if s or out else None").overloads())
    assert "s: typing.Literal[False] = False, out: T | None = None) -> None" in absent
    assert "s: typing.Literal[True], out: T | tuple[T | None, T] | None = None) -> T" in given
    assert "s: bool = False" in either and either.endswith("-> None | T")


def test_arguments_are_taken_by_name():
    signature = Signature.parse("def f(q: T, *, scale: float | None = None, k: int = 7) -> T")
    arguments = _operators.Arguments("winnow::f", signature.parameters)
    assert arguments.of((1, 2), "k", "q", "scale") == (7, 1, 2)
    assert arguments.of((1, 2, 3), "k", "q") == (3, 1)


def test_operators_have_the_parameters_of_their_functions():
    """The schema that torch has, and what the declaration in C++ says."""
    native = Signature.parse(winnow.sparse_mla.forward.__nb_signature__[0][0])
    schema = torch.ops.winnow.sparse_mla_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    ours = [p.name for p in native.parameters if p.name not in OF_A_CALL]
    assert names == [*ours, "deterministic", "dkv_dtype"]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    assert defaults["k_stride"] == 1 and defaults["scale"] is None


_SIZES = (
    "b n s_q s_k s_kv h h_q d d_qk topk blocks block_size num_pages num_seqs num_tokens num_heads "
    "num_kv_heads head_size num_blocks world_size local_world_size experts tokens ratio"
).split()


@pytest.mark.parametrize("operation", sorted(by_position))
def test_descriptions_of_tensors_follow_their_sizes(operation):
    """What supports() describes has the shapes that the operation checks, whatever the sizes: a
    rule may refuse one of them, but no tensor is at odds with another."""
    dtypes = ("float32", "bfloat16", "float8_e4m3fn")
    dtype = next(d for d in dtypes if winnow.supports(operation, dtype=d))
    taken = 0
    for size in _SIZES:
        try:
            answer = winnow.supports(operation, dtype=dtype, **{size: 128})
        except TypeError:
            continue  # not a size of this operation
        taken += 1
        assert "want shape" not in answer.reason, size
    assert taken >= 2
