"""The pages: their links lead somewhere, and what is drawn or copied from them is up to date."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

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


def _prose(page):
    """The page without its code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def _anchors(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h)) for h in headings]
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


def broken_links(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            broken.append(link)
        elif anchor and anchor not in _anchors(target):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title: one\n[a](#a-title-one) [b](#two) [c](none.md) [d](page.md#three)\n")
    assert broken_links(page) == ["#two", "none.md", "page.md#three"]


def test_every_page_can_be_found_from_the_index():
    found, new = set(), [ROOT / "docs" / "index.md"]
    while new:
        page = new.pop()
        found.add(page)
        for link in re.findall(r"\]\(([^)\s#]+\.md)", _prose(page)):
            target = (page.parent / link).resolve()
            if target not in found and target.exists():
                new.append(target)
    assert sorted(str(page.relative_to(ROOT)) for page in set(PAGES) - found) == []


def test_the_picture_shows_the_table():
    docs = ROOT / "docs"
    draw = runpy.run_path(str(docs / "plot_benchmarks.py"))["draw"]
    picture = draw((docs / "benchmarks.md").read_text())
    assert picture.count("<rect") == 3 + 2 * 18  # background, legend, three bars in six rows
    assert picture == (docs / "benchmarks.svg").read_text(), "run docs/plot_benchmarks.py"


def test_the_commands_of_the_readme_are_verbs_of_make():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    verbs = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test", "install", "test-gpu"} <= verbs
    for verb in sorted(verbs):
        dry = subprocess.run(["make", "-n", verb], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0, f"make {verb}: {dry.stderr}"
