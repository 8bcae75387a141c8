"""The wheels and the sdist in build/wheels: names, contents, and runs in bare systems.

`make test-bare` runs this as root. A bare system is a Debian with Python alone, from debootstrap.
"""

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted((ROOT / "build" / "wheels").glob("*.whl"))
AUDIT = ROOT / "build" / "release-tools" / "audit" / "bin"
# Debian release, and the wheel for its Python: one for that version alone, one for the stable ABI.
SYSTEMS = {"bookworm": "cp311-cp311", "trixie": "cp312-abi3"}
# A program for an environment in which only the wheel is installed.
PROGRAM = """
import sys, winnow
assert 'torch' not in sys.modules and 'numpy' not in sys.modules
assert winnow.supports('sparse_mla.forward'), winnow.backends()
try:
    winnow.sparse_mla.forward([1.0], None, None)
except ValueError as error:
    print(error, winnow.__version__)
"""


def _run(*command, **options):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=3000, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("python", ["cp310-cp310", "cp311-cp311", "cp312-abi3"])
def test_there_is_one_portable_wheel_for_each_python(python):
    (wheel,) = (wheel for wheel in WHEELS if python in wheel.name)
    tag = re.fullmatch(
        rf"winnow_kernels-[0-9.]+-{python}-(?:manylinux\w+\.)*manylinux_2_(\d+)_\w+\.whl",
        wheel.name,
    )
    assert tag and int(tag[1]) <= 34, wheel.name
    assert wheel.stat().st_size < 40e6


def test_the_version_is_the_changelogs():
    version = re.search(r"^## ([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert {wheel.name.split("-")[1] for wheel in WHEELS} == {version}


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name.split("-", 2)[2][:11])
def test_a_wheel_needs_the_c_library_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        names = archive.namelist()
    for text in ("LICENSE", "NOTICE", "THIRD_PARTY"):
        assert any(name.endswith(f"dist-info/licenses/{text}") for name in names), text
    binaries = [*tmp_path.rglob("*.so*"), tmp_path / "winnow" / "bin" / "winnow"]
    assert len(binaries) >= 5
    system = r"lib(c|m|gcc_s|pthread|dl|rt)\.so\.[0-9]+|ld-linux.*"
    own = {binary.name for binary in binaries}
    for binary in binaries:
        needed = re.findall(r"NEEDED\s+(\S+)", _run("objdump", "-p", binary))
        assert needed
        foreign = [name for name in needed if name not in own and not re.fullmatch(system, name)]
        assert foreign == [], binary


def test_the_wheel_of_the_stable_abi_uses_nothing_else():
    (wheel,) = (wheel for wheel in WHEELS if "abi3" in wheel.name)
    # The name of a module only claims the stable ABI; abi3audit checks its symbols.
    _run(AUDIT / "abi3audit", "--strict", wheel)


def test_the_kernels_are_inside():
    """Wheels of `WINNOW_CUDA=OFF make portable-wheels` must not be released."""
    for wheel in WHEELS:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if "/libwinnow.so" in n)
            assert b".nv_fatbin" in archive.read(name), wheel.name


def test_the_sdist_has_the_sources_and_no_more():
    (sdist,) = (ROOT / "build" / "wheels").glob("*.tar.gz")
    names = _run("tar", "tzf", sdist).split()
    inside = {name.split("/", 1)[1] for name in names if "/" in name}
    tracked = set(_run("git", "ls-files", cwd=ROOT).split())
    missing = {
        name for name in tracked - inside
        if not name.startswith((".ci/", ".github/")) and (ROOT / name).exists()
    }  # fmt: skip
    assert missing == set()
    assert inside - tracked <= {"PKG-INFO"}


@pytest.fixture(scope="module", params=SYSTEMS)
def bare_system(request):
    """(codename, root folder of a bare Debian). The folder is kept between runs."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap: `tools/setup bare` installs it")
    root = ROOT / "build" / "roots" / request.param
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        mirror = re.search(
            r"https?://\S+/debian/?(?=\s|$)",
            "\n".join(
                p.read_text()
                for p in Path("/etc/apt").rglob("*")
                if p.suffix in (".sources", ".list")
            ),
        )
        _run(
            "debootstrap", "--variant=minbase", "--include=python3-venv",
            request.param, root, mirror[0] if mirror else "http://deb.debian.org/debian",
        )  # fmt: skip
        (root / "complete").touch()
    for program in ("usr/bin/c++", "usr/bin/cmake", "usr/local/cuda"):
        assert not (root / program).exists(), program
    return request.param, root


def test_the_wheel_runs_in_a_bare_system(bare_system):
    codename, root = bare_system
    (wheel,) = (wheel for wheel in WHEELS if SYSTEMS[codename] in wheel.name)
    for old in (root / "tmp").glob("*.whl"):
        old.unlink()
    shutil.copy(wheel, root / "tmp")
    (root / "tmp" / "program.py").write_text(PROGRAM)
    script = (
        "set -e; cd /tmp; rm -rf environment; python3 -m venv environment\n"
        f"environment/bin/pip install -q --no-index /tmp/{wheel.name}\n"
        "environment/bin/python program.py\n"
        "environment/bin/winnow verify sparse_mla::forward\n"
        "environment/bin/winnow info --json\n"
    )
    output = _run(
        "unshare", "--mount", "--pid", "--fork", "sh", "-c",
        f"mount -t proc proc {root}/proc && mount -t tmpfs tmpfs {root}/dev/shm; "
        f"exec chroot {root} env -i PATH=/usr/bin:/bin sh -c '{script}'",
    )  # fmt: skip
    assert "q: want a tensor of numpy, torch or another framework" in output


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_the_wheel_computes_in_each_python(minor, tmp_path):
    """The README's first call, with numpy from PyPI."""
    names = [f"python3.{minor}", *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
    works = (n for n in names if shutil.which(n) and not subprocess.call([n, "-c", ""]))
    python = next(works, None)
    if python is None:
        pytest.skip(f"has no Python 3.{minor}")
    _run(python, "-m", "venv", tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    _run(python, "-m", "pip", "install", "-q", "numpy")
    folder = ROOT / "build" / "wheels"
    # pip chooses among the wheels, as it would among those of an index.
    _run(python, "-m", "pip", "install", "-q", "--no-index", "-f", folder, "winnow-kernels")
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert _run(python, "-c", program, cwd=tmp_path).strip() == "2.0 7.0"
