"""tools/backend: what an sdist and a wheel take of a checkout."""

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from processes import python, run

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "THIRD_PARTY", ".gitignore")
PLANTED = (
    "secret.txt", ".env", "build-old/object.o", "python/winnow/secret.py", "winnow/ spaces ",
    "winnow/note; [1] #2!.txt",
)  # fmt: skip
PROGRAM = """
import subprocess, sys, tracked_files
print(getattr(tracked_files, sys.argv[1])("dist"))
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout of a package that takes no time to build, with the settings of the real one."""
    if shutil.which("git") is None or shutil.which("cmake") is None:
        pytest.skip("has no git or no cmake")
    folder = tmp_path / "checkout"
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(
        ROOT / "tools" / "backend", folder / "tools" / "backend",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(winnow VERSION 1.2.3 LANGUAGES NONE)\n"
        'file(WRITE ${CMAKE_BINARY_DIR}/built.txt "")\n'
        "install(FILES ${CMAKE_BINARY_DIR}/built.txt DESTINATION winnow/lib COMPONENT python)\n"
    )
    for name in ("python/winnow/__init__.py", "winnow/core/a.cc", ".ci/run"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    git = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b")
    run(*git, "init", "-q", check=True)
    run(*git, "add", "-A", check=True)
    run(*git, "commit", "-qm", "a", check=True)
    for name in (*PLANTED, "python/winnow/lib/built.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("untracked")
    return folder


def _build(folder, hook, **options):
    """As a front end calls the hook of pyproject.toml: in the folder, with its backend-path."""
    text = (ROOT / "pyproject.toml").read_text()
    assert 'build-backend = "tracked_files"\nbackend-path = ["tools/backend"]\n' in text
    (folder / "dist").mkdir(exist_ok=True)
    program = f"import sys; sys.path.insert(0, 'tools/backend')\n{PROGRAM}"
    return python("-c", program, hook, cwd=folder, **options)


def test_an_sdist_holds_what_git_tracks(checkout):
    tracked = run("git", "-C", checkout, "ls-files", "-z", check=True).stdout.split("\0")
    result = _build(checkout, "build_sdist")
    assert result.returncode == 0, result.stderr
    with tarfile.open(checkout / "dist" / result.stdout.split()[-1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
        archive.extractall(checkout.parent)
    assert names == {name for name in tracked if name and name != ".ci/run"} | {"PKG-INFO"}
    # What is unpacked is no checkout, and makes the same again.
    (again,) = (path for path in checkout.parent.iterdir() if path != checkout)
    result = _build(again, "build_sdist")
    assert result.returncode == 0, result.stderr
    with tarfile.open(again / "dist" / result.stdout.split()[-1]) as archive:
        assert {name.split("/", 1)[1] for name in archive.getnames()} == names


def test_a_wheel_holds_what_git_tracks_and_what_was_built(checkout):
    result = _build(checkout, "build_wheel")
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(checkout / "dist" / result.stdout.split()[-1]) as archive:
        of_package = [name for name in archive.namelist() if name.startswith("winnow/")]
        assert sorted(of_package) == ["winnow/__init__.py", "winnow/lib/built.txt"]
        assert archive.read("winnow/lib/built.txt") == b""


def test_a_checkout_that_git_cannot_read_makes_no_sdist(checkout):
    shutil.rmtree(checkout / ".git")
    (checkout / ".git").write_text("gitdir: nowhere\n")
    result = _build(checkout, "build_sdist")
    assert result.returncode != 0 and "git" in result.stderr
    assert list((checkout / "dist").iterdir()) == []
    result = _build(checkout, "build_wheel")
    assert result.returncode == 0, result.stderr
    assert "may hold files that git does not track" in result.stderr
