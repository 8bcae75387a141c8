"""The documentation as a site: it builds without a warning, has what it must, and fits a window."""

import re
import shutil
from pathlib import Path

import pytest
from processes import forked, run

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def _sphinx(*arguments):
    return forked("-m", "sphinx", "-q", "-W", "--keep-going", *arguments)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    cache = tmp_path_factory.mktemp("cache")
    made = _sphinx("-c", ROOT / "docs" / "site", "-d", cache, ROOT, folder)
    assert made.returncode == 0, made.stderr
    return folder


def _text(page):
    return re.sub(r"<[^>]+>", "", page.read_text())


def test_the_site_has_every_public_header_and_function(site):
    listed = (ROOT / "winnow" / "winnow.h").read_text()
    headers = re.findall(r'#include "winnow/(.*)"', listed)
    assert len(headers) > 30
    shown = "".join(_text(page) for page in (site / "docs/site/reference").glob("cpp_*.html"))
    assert [h for h in headers if h != "core/version.h" and f"winnow/{h}" not in shown] == []
    for function in ("Backend forward(", "class AllToAll", "enum class DType", "Throws Error"):
        assert function in shown
    assert "private:" not in shown and "WINNOW_EXPORT" not in shown


@pytest.mark.parametrize(
    "room", ["sparse_mla", "indexer", "compressor", "paged_xl", "torch", "compat"]
)
def test_the_site_has_every_function_of_the_package(site, room):
    module = __import__(f"winnow.{room}", fromlist=["*"])
    page = (site / f"docs/site/reference/python_{room}.html").read_text()
    names = [n for n in module.__all__ if callable(getattr(module, n)) and n[0].islower()]
    assert names and [n for n in names if f'id="winnow.{room}.{n}"' not in page] == []


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    """In a checkout that is a page and the site's settings."""
    shutil.copytree(ROOT / "docs" / "site", tmp_path / "docs" / "site")
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    pages = tmp_path / "docs" / "site"
    shutil.rmtree(pages / "reference")
    (pages / "index.rst").write_text("Title\n=====\n\n.. toctree::\n\n   /docs/page\n")
    settings = (pages / "conf.py").read_text()
    settings = settings.replace('    "native_docstrings",\n', "")
    settings = settings.replace('(ROOT / "CMakeLists.txt")', f'Path("{ROOT}/CMakeLists.txt")')
    (pages / "conf.py").write_text(settings)
    (tmp_path / "docs" / "page.md").write_text("# Page\n[a](#page) [b](none.md) [c](#none)\n")
    made = _sphinx("-c", pages, tmp_path, tmp_path / "build")
    assert made.returncode != 0
    warnings = re.findall(r"WARNING: .*", made.stderr)
    assert len(warnings) == 2 and "none.md" in made.stderr and "'none'" in made.stderr, made.stderr


PAGES = (
    "docs/site/index", "README", "docs/concepts", "docs/troubleshooting",
    "docs/site/reference/cpp_sparse_mla", "docs/site/reference/python_torch",
)  # fmt: skip
WIDTHS = (400, 1280)

_MEASURE = """<script>addEventListener("load", () => {
  document.title = [...document.getElementsByTagName("iframe")].map(frame => {
    const page = frame.contentWindow.document.documentElement;
    return [frame.id, page.scrollWidth, page.clientWidth, page.querySelectorAll("h1").length];
  }).join(";");
});</script>
"""


@pytest.fixture(scope="module")
def measured(site, tmp_path_factory):
    """{(page, width): (its width, that of its window, titles)}, all shown by one browser."""
    if CHROMIUM is None:
        pytest.skip("has no chromium")
    frames = (
        f'<iframe id="{page}@{width}" src="{page}.html" style="width: {width}px; height: 900px; '
        'border: 0"></iframe>'
        for page in PAGES
        for width in WIDTHS
    )
    (site / "frames.html").write_text(_MEASURE + "\n".join(frames))
    home = tmp_path_factory.mktemp("home")
    shown = run(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        f"--user-data-dir={home}", f"--window-size={max(WIDTHS) + 40},1000",
        "--virtual-time-budget=10000", "--dump-dom", (site / "frames.html").as_uri(),
        add={"HOME": str(home)},
    )  # fmt: skip
    found = re.search(r"<title>(.*?)</title>", shown.stdout)
    assert found, shown.stdout[-500:] + shown.stderr[-500:]
    sizes = {}
    for entry in found[1].split(";"):
        name, *numbers = entry.split(",")
        page, width = name.split("@")
        sizes[page, int(width)] = tuple(map(int, numbers))
    return sizes


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_browser(measured, page, width):
    """Nothing is wider than the window: what is too wide scrolls by itself."""
    wide, window, titles = measured[page, width]
    assert titles >= 1 and wide <= window and width - 20 <= window <= width  # less a scroll bar
