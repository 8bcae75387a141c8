"""Configuration of the documentation site, which `make docs` builds into build/site.

The source folder is the whole checkout, so that links between pages are the same paths on the site
as in the repository. This folder holds what only the site has: the order of the pages, and the
references, which are generated from the headers and from the package.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
ROOT = Path(__file__).resolve().parents[2]

project = "Winnow"
copyright = "2026 the Winnow authors"  # noqa: A001 (Sphinx demands this name)
version = re.search(r"project\(winnow VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
release = version

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "cpp_reference",
    "native_docstrings",
]
root_doc = "docs/site/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**",
    "examples/**.md",
    "winnow/**.md",
]
default_role = "code"  # `name` in docstrings
nitpicky = True
nitpick_ignore_regex = [("py:.*", r".*")]  # the site has no pages for types of numpy and torch

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # some blocks show half a program

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "Returns:" begins with names and shapes, not with a type
highlight_language = "text"  # for formulas in docstrings

html_theme = "furo"
html_title = f"Winnow {version}"
html_static_path = ["static"]
html_css_files = ["winnow.css"]
html_extra_path = ["root"]  # its index.html redirects to the first page
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1b6ca8", "color-brand-content": "#1b6ca8"},
    "dark_css_variables": {"color-brand-primary": "#7cc0f0", "color-brand-content": "#7cc0f0"},
}
