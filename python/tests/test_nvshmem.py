"""Where NVSHMEM is looked for, by the package and by its build."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import winnow.nvshmem
from processes import python, run

ROOT = Path(__file__).resolve().parents[2]


def _planted(place):
    """An NVSHMEM to be found along a path with that place."""
    (place / "nvidia" / "nvshmem" / "lib").mkdir(parents=True)
    (place / "nvidia" / "nvshmem" / "lib" / "libnvshmem_host.so.3").touch()
    return place


@pytest.mark.parametrize(
    "how", ["home", "target", "path file", "current folder", "relative home", "nowhere"]
)
def test_nvshmem_is_looked_for_along_the_path(how, empty_environment, tmp_path):
    place = _planted(tmp_path / "place")
    environment = {"PATH": os.environ["PATH"]}
    (site,) = empty_environment.parent.parent.glob("lib/python3*/site-packages")
    path_file = site / "place.pth"
    if how == "home":
        environment["NVSHMEM_HOME"] = str(place / "nvidia" / "nvshmem")
    elif how == "relative home":
        environment["NVSHMEM_HOME"] = "nvidia/nvshmem"
    if how in ("target", "relative home"):  # as after `pip install --target place`
        environment["PYTHONPATH"] = str(place)
    elif how == "path file":
        path_file.write_text(str(place))
    program = "from winnow import nvshmem; print(nvshmem.folder())"
    try:
        result = run(
            empty_environment, "-c", program, env=environment,
            cwd=place if how in ("current folder", "relative home") else tmp_path,
        )  # fmt: skip
    finally:
        path_file.unlink(missing_ok=True)
    found = how in ("home", "target", "path file")
    want = f"{place}/nvidia/nvshmem/lib" if found else ""
    assert result.stdout.strip() == want, result.stderr


def test_entries_of_the_path_that_are_no_text_are_passed_over(tmp_path, monkeypatch):
    _planted(tmp_path)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [None, b"/x", 3, tmp_path, str(tmp_path / "place")])
    assert winnow.nvshmem.folder() == ""
    monkeypatch.setattr(sys, "path", [None, b"/x", 3, str(tmp_path)])
    assert winnow.nvshmem.folder() == f"{tmp_path}/nvidia/nvshmem/lib"


def test_the_program_refuses_a_relative_home(empty_environment, tmp_path):
    """Whatever is along the path of Python, which the program does not know."""
    _planted(tmp_path)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "NVSHMEM_HOME": "here"}
    info = run(
        empty_environment, "-m", "winnow", "info", "--json", env=environment, cwd=tmp_path
    )  # fmt: skip
    reason = json.loads(info.stdout)["nvshmem"]["reason"]
    refused = 'expert_parallel::nvshmem: NVSHMEM_HOME: want an absolute path, got "here"'
    assert reason == refused or "this build has no NVSHMEM" in reason


def test_nvshmem_elsewhere_on_the_path_is_opened(empty_environment, tmp_path):
    """The wheel in one place and NVSHMEM in another."""
    real = winnow.nvshmem.folder()
    (site,) = empty_environment.parent.parent.glob("lib/python3*/site-packages")
    if not real or not list(site.glob("winnow/lib/libwinnow_nvshmem*")):
        pytest.skip("built without NVSHMEM, or it is not installed")
    (tmp_path / "nvidia" / "nvshmem").mkdir(parents=True)
    (tmp_path / "nvidia" / "nvshmem" / "lib").symlink_to(real)
    program = "from winnow import expert_parallel as ep; print(repr(ep.nvshmem_obstacle()))"
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    without = run(empty_environment, "-c", program, env=environment, cwd=tmp_path)
    assert "NVSHMEM cannot be loaded" in without.stdout, without.stderr
    environment["PYTHONPATH"] = str(tmp_path)
    opened = run(empty_environment, "-c", program, env=environment, cwd="/")
    assert opened.stdout.strip() == "''", opened
    info = run(empty_environment, "-m", "winnow", "info", "--json", env=environment, cwd="/")
    assert json.loads(info.stdout)["nvshmem"]["supported"] is True, info


_BACKEND = """
import subprocess, sys


def build_wheel(folder, *others):
    command = ["cmake", "-S", ".", "-B", folder + "/build", f"-DPython_EXECUTABLE={sys.executable}"]
    raise SystemExit(subprocess.run(command, capture_output=True, text=True).stdout)
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="has no cmake")
@pytest.mark.parametrize("how", ["wheel", "folder", "relative", "nowhere", "no kernels", "off"])
def test_a_build_finds_nvshmem_and_says_so(how, tmp_path):
    """As pip builds: isolated from what is installed beside it."""
    environment = tmp_path / "environment"
    assert python("-m", "venv", "--without-pip", environment).returncode == 0
    place = tmp_path / "elsewhere"
    if how == "wheel":
        (place,) = environment.glob("lib/python3*/site-packages")
        place = place / "nvidia" / "nvshmem"
    for file in ("include/nvshmem.h", "lib/libnvshmem_host.so.3", "lib/libnvshmem_device.a"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).touch()
    project = tmp_path / "project"
    project.mkdir()
    (project / "backend.py").write_text(_BACKEND)
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(toy NONE)\n"
        "set_property(GLOBAL PROPERTY TARGET_SUPPORTS_SHARED_LIBS TRUE)\n"
        f"set(WINNOW_WITH_CUDA {'OFF' if how == 'no kernels' else 'ON'})\n"
        f"set(WINNOW_NVSHMEM {'OFF' if how == 'off' else 'AUTO'})\n"
        f"include({ROOT}/cmake/WinnowNvshmem.cmake)\n"
    )
    home = {"NVSHMEM_HOME": str(place if how == "folder" else tmp_path)}
    if how == "relative":  # to the project, in which CMake looks
        home = {"NVSHMEM_HOME": "../elsewhere"}
    # The environment first, so that `python3` is its own as well.
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    result = python(
        "-m", "pip", "--python", environment / "bin" / "python", "wheel",
        "--no-index", "--no-deps", "-w", tmp_path / "wheels", project,
        env={**os.environ, "PATH": path, **home},
    )  # fmt: skip
    lines = re.findall(r"NVSHMEM transport: .*", result.stdout + result.stderr)
    assert len(lines) == 1, result
    want = {
        "wheel": f"built with {place}/include",
        "folder": f"built with {place}/include",
        "relative": "not built: the environment variable NVSHMEM_HOME must be an absolute path",
        "nowhere": "not built: NVSHMEM was not found: pip install nvidia-nvshmem-cu13",
        "no kernels": "not built: there are no CUDA kernels in this build",
        "off": "not built: WINNOW_NVSHMEM is OFF",
    }
    assert lines[0].startswith("NVSHMEM transport: " + want[how])
