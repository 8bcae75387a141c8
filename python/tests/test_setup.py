"""tools/setup on systems of several kinds, and the commands that the README gives for pip."""

import os
import re
import shutil
from pathlib import Path

import pytest
from processes import run

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ["cat", "cmp", "cp", "dirname", "env", "grep", "id", "mkdir", "mv", "python3", "rm", "sh"]
_INSTALLED = "#!/bin/sh\necho install ok installed\n"
_NOTHING = "#!/bin/sh\nexit 1\n"


def _program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """tools/setup in a folder of its own, and a folder of the only programs that it finds."""
    (tmp_path / "checkout" / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup", tmp_path / "checkout" / "tools")
    programs = tmp_path / "programs"
    programs.mkdir()
    for tool in _TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))
    return tmp_path / "checkout", programs


def _setup(checkout, *parts):
    folder, programs = checkout
    environment = {"PATH": str(programs), "HOME": str(folder)}
    return run(folder / "tools" / "setup", *parts, env=environment)


def test_without_apt_it_names_the_packages(checkout):
    """As root too, which these tests usually are."""
    _program(checkout[1] / "dpkg-query", _NOTHING)
    result = _setup(checkout, "pip")
    assert result.returncode == 1
    assert "there is no apt-get to install them: cmake ninja-build g++" in result.stderr
    assert "libeigen3-dev" in result.stderr and "python3-venv" in result.stderr


def test_apt_installs_what_is_missing(checkout):
    folder, programs = checkout
    _program(programs / "dpkg-query", _NOTHING)
    _program(programs / "apt-get", f'#!/bin/sh\necho "$@" >> {folder}/calls\n')
    _program(programs / "id", "#!/bin/sh\necho 0\n")
    result = _setup(checkout, "pip")
    assert result.returncode == 0, result.stderr
    calls = (folder / "calls").read_text()
    assert "update" in calls and "libeigen3-dev" in calls and "python3-venv" in calls


@pytest.mark.parametrize("complete", [False, True])
def test_a_system_without_debian_packages_is_told_the_libraries(checkout, complete):
    for program in ("cmake", "ninja", "c++") if complete else ("cmake",):
        _program(checkout[1] / program, _NOTHING)
    result = _setup(checkout)
    for library in ("Eigen 3.4", "CLI11", "nlohmann-json", "Google Benchmark", "eigen3-devel"):
        assert library in result.stderr
    if complete:
        assert result.returncode == 0 and "going on" in result.stderr
    else:
        assert result.returncode == 1
        assert "these programs are missing: ninja c++" in result.stderr


def test_offline_without_apt_says_so(checkout):
    result = _setup(checkout, "offline")
    assert result.returncode == 1
    assert "offline needs apt-get and dpkg-deb" in result.stderr
    assert not (checkout[0] / ".deps").exists()


_PIP = """#!/bin/sh
# Pins for requirements_of.py; makes the folder that pip is told, and fails for FAILS.
if [ "$1" != -m ]; then shift; printf '%s==1\\n' "$@"; exit; fi
echo "$@" >> calls
while [ $# -gt 1 ]; do
  if [ "$1" = --target ]; then mkdir -p "$2"; fi
  shift
done
if [ "$1" = "$FAILS" ]; then exit 1; fi
"""


def test_versions_beside_the_installed_ones_are_unpacked_once(checkout):
    folder, programs = checkout
    _program(programs / "dpkg-query", _INSTALLED)
    (folder / ".venv" / "bin").mkdir(parents=True)
    _program(folder / ".venv" / "bin" / "python", _PIP.replace("$FAILS", "two==2.0"))
    (folder / "tools" / "requirements-beside.txt").write_text("# Why.\none==1.5\ntwo==2.0\n")
    result = _setup(checkout, "python")
    assert result.returncode == 1 and "could not install what tools/req" in result.stderr, result
    _program(folder / ".venv" / "bin" / "python", _PIP)
    for calls in (1, 0):  # of what is there nothing is done again
        (folder / "calls").write_text("")
        assert _setup(checkout, "python").returncode == 0
        made = (folder / "calls").read_text().splitlines()
        assert len(made) == calls
        for call in made:
            assert "--no-deps" in call and "--ignore-requires-python" in call
            assert call.endswith(" two==2.0")
        there = {path.name for path in (folder / ".venv" / "beside").iterdir()}
        assert there == {"one-1.5", "two-2.0"}


_BACKEND = """
import zipfile


def build_wheel(folder, *others):
    name = "toy-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\\nName: toy\\nVersion: 1.0\\n"
    tags = "Wheel-Version: 1.0\\nGenerator: toy\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("winnow_toy.py", "")
        wheel.writestr("toy-1.0.dist-info/METADATA", metadata)
        wheel.writestr("toy-1.0.dist-info/WHEEL", tags)
        wheel.writestr("toy-1.0.dist-info/RECORD", "")
    return name
"""


def _commands(page):
    """The block of the page that installs the package, without its comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (commands,) = [block for block in blocks if "pip install -v ." in block]
    return re.sub(r" *#.*", "", commands)


def test_the_documented_commands_install_where_python_is_managed(checkout, tmp_path):
    """With a package that takes no time; pip refuses to work outside a virtual environment."""
    folder, programs = checkout
    commands = _commands("README.md")
    (folder / "backend.py").write_text(_BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "toy"\nversion = "1.0"\n'
    )
    _program(programs / "dpkg-query", _INSTALLED)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "PIP_REQUIRE_VIRTUALENV": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip
    script = f"set -e\n{commands}\npython -c 'import sys, winnow_toy; print(sys.prefix)'\n"
    result = run("sh", "-c", script, cwd=folder, env=environment, check=True)
    assert result.stdout.splitlines()[-1] == str(folder / ".venv")


def test_no_page_installs_the_package_that_pypi_calls_winnow():
    """PyPI's winnow is another project, and a pip that asks the index would prefer it."""
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("winnow/**/*.md")):
        assert not re.search(r"pip (install|download)[^`\n]* winnow(?![\w/-])", page.read_text()), (
            page
        )


def _requirements(*groups):
    return run("python3", ROOT / "tools" / "requirements_of.py", *groups, check=True).stdout


def test_everything_of_pip_is_pinned_by_version():
    listed = _requirements("build", "test", "clients", "docs")
    lists = [listed, *(path.read_text() for path in (ROOT / "tools").glob("requirements*.txt"))]
    pins = [line for text in lists for line in text.splitlines() if line and line[0] != "#"]
    assert len(pins) > 15
    assert [pin for pin in pins if not re.fullmatch(r"[\w.\[\]-]+==[0-9][0-9.]*", pin)] == []


def test_the_page_carries_the_wheels_that_a_build_without_a_network_wants():
    page = (ROOT / "docs" / "python.md").read_text()
    (carried,) = re.findall(r"`pip download -d wheels ([^`]*)`", page)
    wanted = {line for line in _requirements("build").splitlines() if line and line[0] != "#"}
    assert wanted and set(carried.split()) == wanted
    assert "`pip install --no-index --find-links wheels .`" in page
    # What the page names for the carried wheel is the name that the build gives it.
    assert "dist/winnow_kernels-*.whl" in page and "dist/winnow-" not in page


def test_pages_that_install_the_package_name_what_their_examples_import():
    """The package depends on nothing, so nothing comes with it."""
    imported = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        if "pip install -v ." not in text:
            continue
        code = "\n".join(re.findall(r"```python.*?\n(.*?)```", text, re.DOTALL))
        installed = " ".join(re.findall(r"pip install ([^`\n#]*)", text))
        for package in ("numpy", "torch", "transformers"):
            if re.search(rf"^(import|from) {package}\b", code, re.MULTILINE):
                assert re.search(rf"\b{package}\b", installed), (page, package)
                imported.add(package)
    assert imported == {"numpy", "torch", "transformers"}
