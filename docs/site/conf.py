"""The documentation as a site: `make docs` builds it into build/site.

The source folder is the whole checkout, so that every page stays where it is and a link from one to
another is the same path here as in the repository. This folder adds what only the site has: the
order of the pages and the references, which are generated from the headers and from the package.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
ROOT = Path(__file__).resolve().parents[2]

project = "Winnow"
copyright = "2026 the Winnow authors"  # noqa: A001: Sphinx's name for it
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
nitpick_ignore_regex = [("py:.*", r".*")]  # types of numpy and torch are no pages of this site

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
# Pages are written for a reader of the repository: "text" and "sh" blocks, no roles.
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # some blocks show half a program

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # what is returned begins with names and shapes, which are no types
highlight_language = "text"  # of formulas in docstrings

html_theme = "furo"
html_title = f"Winnow {version}"
html_static_path = ["static"]
html_css_files = ["winnow.css"]
html_extra_path = ["root"]  # index.html of the site leads to the first page
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1b6ca8", "color-brand-content": "#1b6ca8"},
    "dark_css_variables": {"color-brand-primary": "#7cc0f0", "color-brand-content": "#7cc0f0"},
}
