"""The pages: what is drawn or copied from them is up to date; test_site.py follows their links."""

import json
import re
from pathlib import Path

import pytest
import readme
from kinds import gpu
from processes import python, run
from winnow._winnow import tensors_of

import winnow

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(
            page
            for folder in ("docs", "examples", "winnow")
            for page in (ROOT / folder).rglob("*.md")
        ),
    )
)


@pytest.mark.parametrize("page", ["README.md", "docs/site/index.rst"])
def test_the_first_pages_name_the_models_show_a_picture_and_say_how_to_install(page):
    types = pytest.importorskip("winnow.transformers").VERSIONS["5.24"]
    text = (ROOT / page).read_text()
    for model_type in types:
        assert f"`{model_type.removesuffix('_text')}`" in text
    for name in ("DeepSeek-V3.2", "DeepSeek-V4", "GLM-5", "Hy-V4", "dots3", "Mistral Large 4"):
        assert name in text
    pictures = re.findall(r"pictures/\w+\.svg", text)
    assert pictures and all((ROOT / "docs" / picture).exists() for picture in pictures)
    assert "tools/setup pip" in text and "pip install -v ." in text


def test_the_commands_of_the_readme_are_verbs_of_make():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    verbs = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test", "install", "test-gpu"} <= verbs
    for verb in sorted(verbs):
        run("make", "-n", verb, cwd=ROOT, check=True)


_TENSORS = {
    f"{path.parts[-3]}::{path.stem}": path
    for path in PAGES
    if path.with_name(f"{path.stem}_contract.h").exists()
}


def _rows(page):
    """{argument: (shape, dtype)} of the page's table of tensors."""
    rows = {}
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", cells[0]):
            if line.startswith("| `") and len(cells) == 4:
                rows[name] = cells[1], cells[2]
    return rows


@pytest.mark.parametrize("operation", tensors_of)
def test_a_page_has_the_tensors_of_its_operation(operation):
    rows = _rows(_TENSORS[operation])
    for name, shape, dtype, optional in tensors_of[operation]:
        shown = rows.get(name)
        assert shown is not None, name
        if not shown[0].startswith("as in"):  # those of another page
            assert shown == (shape + ", optional" * optional, dtype), name


_NAMES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3fn",
}  # fmt: skip


_TABLE = readme.operations()


def test_the_table_has_every_operation():
    listed = python("-m", "winnow", "verify", "--list", "--json", check=True)
    operations = [case["operation"] for case in json.loads(listed.stdout)["cases"]]
    assert sorted(set(operations)) == sorted(_TABLE)


@pytest.mark.parametrize("operation", sorted(_TABLE))
def test_the_table_has_the_backends_of_the_library(operation):
    """A backend without a kernel is refused with the list of those that have one."""
    claimed = {**_TABLE[operation], "sm100": "sm100" in _TABLE[operation]["sm90"]}
    # With a dtype that it takes, the choice of the backend is what is refused.
    name, dtype = readme.asked(operation)
    for backend, cell in claimed.items():
        answer = winnow.supports(name, backend=backend, dtype=dtype)
        implemented = "one that implements this operation" not in answer.reason
        assert implemented == bool(cell), (backend, answer.reason)


# A layer's dtype is not all that it takes.
_BY_DTYPE = [name for name in sorted(_TABLE) if not re.search("expert|store|paged", name)]


def _claimed(operation, backend):
    """The dtypes of a cell, which may refer to that of the CPU; nothing after "sm100:"."""
    cells = _TABLE[operation]
    cell = cells["cpu"] if cells[backend] == "as on the CPU" else cells[backend]
    return {d for d in _NAMES if d in re.split(r"[ ,;]+", cell.split("; sm100")[0])}


def _taken(operation, **where):
    asked, _ = readme.asked(operation)
    return {d for d, name in _NAMES.items() if winnow.supports(asked, dtype=name, **where)}


@pytest.mark.parametrize("operation", _BY_DTYPE)
def test_the_table_has_the_dtypes_of_the_library(operation):
    assert _claimed(operation, "cpu") == _taken(operation)


@pytest.mark.parametrize(
    "backend", [pytest.param("cuda", marks=gpu), pytest.param("sm90", marks=gpu)]
)
@pytest.mark.parametrize("operation", _BY_DTYPE)
def test_the_table_has_the_dtypes_of_a_gpu(operation, backend):
    """A backend objects to a GPU before it looks at dtypes: this takes one that it supports."""
    if not next(b["supported"] for b in winnow.backends() if b["name"] == backend):
        pytest.skip(f"has no GPU for {backend}")
    assert _claimed(operation, backend) == _taken(operation, device="cuda", backend=backend)
