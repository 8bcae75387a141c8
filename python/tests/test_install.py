"""The wheel in an empty environment, the program, the stubs, the documented examples."""

import ast
import doctest
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import winnow.__main__
import winnow.nvshmem
import winnow.support

import winnow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(winnow.__file__).parent


def _run(*command, **options):
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=250, **options
    )


@pytest.fixture(scope="module")
def wheel():
    path = os.environ.get("WINNOW_WHEEL")
    assert path, "WINNOW_WHEEL must name the wheel under test; `make test` sets it"
    return Path(path).resolve()


@pytest.fixture(scope="module")
def empty_environment(wheel, tmp_path_factory):
    """A fresh virtual environment with nothing but the wheel, installed without an index."""
    folder = tmp_path_factory.mktemp("empty")
    assert _run(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    python = folder / "bin" / "python"
    installed = _run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel
    )
    assert installed.returncode == 0, installed.stderr
    return python


def test_the_wheel_imports_in_an_empty_environment(empty_environment, tmp_path):
    program = (
        "import sys, winnow\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert winnow.supports('sparse_mla.forward')\n"
        "assert [b['name'] for b in winnow.backends()][-1] == 'cpu'\n"
        "import winnow.compat\n"
        "for missing in ('numpy', 'torch', 'winnow.torch', 'winnow.expert_parallel.layer'):\n"
        "    try:\n"
        "        __import__(missing)\n"
        "    except ImportError:\n"
        "        pass\n"
        "    else:\n"
        "        raise AssertionError(missing)\n"
        "try:\n"
        "    winnow.sparse_mla.forward([1.0], None, None)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    result = _run(empty_environment, "-c", program, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert "q: want a tensor of numpy, torch or another framework" in result.stdout


def test_the_program_runs_in_an_empty_environment(empty_environment, tmp_path):
    info = _run(empty_environment, "-m", "winnow", "info", "--json", cwd=tmp_path)
    assert info.returncode == 0, info.stderr
    assert json.loads(info.stdout)["version"] == winnow.__version__
    assert json.loads(info.stdout)["nvshmem"]["supported"] is False  # nothing but the wheel
    assert "NVSHMEM" in json.loads(info.stdout)["nvshmem"]["reason"]
    script = empty_environment.parent / "winnow"
    case = ("verify", "paged_xl::append")
    for program in ((empty_environment, "-m", "winnow"), (script,)):
        verified = _run(*program, *case, cwd=tmp_path)
        assert verified.returncode == 0, verified.stdout + verified.stderr
    bad = _run(empty_environment, "-m", "winnow", "verify", "matmul", cwd=tmp_path)
    assert bad.returncode == 2
    bench = _run(
        script, "bench", "paged_xl::append", "--seconds", "0.001", "--repetitions", "1", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert bench.returncode == 0, bench.stderr
    assert json.loads(bench.stdout)["results"]


def test_the_wheel_links_neither_torch_nor_the_build_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    binaries = [*tmp_path.rglob("*.so*"), tmp_path / "winnow" / "bin" / "winnow"]
    assert len(binaries) >= 4
    for binary in binaries:
        # The one library that is opened only where NVSHMEM is installed beside it.
        of_nvshmem = binary.name.startswith("libwinnow_nvshmem")
        foreign = r"torch|c10|cuda|libpython" + ("" if of_nvshmem else "|nvshmem")
        dynamic = _run("objdump", "-p", binary)
        assert dynamic.returncode == 0, dynamic.stderr
        for line in dynamic.stdout.splitlines():
            if re.match(r"\s*(NEEDED|RUNPATH|RPATH)\s", line):
                assert not re.search(foreign, line), (binary, line)
                if "PATH" in line:
                    assert all(p.startswith("$ORIGIN") for p in line.split()[1].split(":")), line


def test_the_wheel_has_the_licences_of_what_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        for text in ("LICENSE", "NOTICE", "THIRD_PARTY"):
            (name,) = (n for n in archive.namelist() if n.endswith(f".dist-info/licenses/{text}"))
            assert archive.read(name) == (ROOT / text).read_bytes(), text
    contained = (ROOT / "THIRD_PARTY").read_text()
    for what in ("Eigen", "CLI11", "JSON for Modern C++", "stb_", "DejaVu", "Google Benchmark",
                 "nanobind", "robin_map", "libcudart_static"):  # fmt: skip
        assert re.search(rf"^\|[^|]*\| [^|]*{re.escape(what)}", contained, re.MULTILINE), what
    for licence in ("BSD-3-Clause", "MIT", "Bitstream Vera"):
        assert re.search(rf"\n\n{licence}\n\n", contained), licence
    credited = (ROOT / "NOTICE").read_text()
    for what in ("FlashMLA", "DeepEP", "Triton-distributed", "NVSHMEM", "vLLM"):
        assert re.search(rf"^  .*\b{what}\b", credited, re.MULTILINE), what


@pytest.mark.skipif(shutil.which("cmake") is None, reason="has no cmake")
def test_the_wheel_shows_only_its_own_symbols(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    checked = _run(
        "cmake", f"-DFOLDERS={tmp_path}", "-DRELOCATABLE=ON", "-DREADELF=readelf", "-DNM=nm",
        "-P", ROOT / "cmake" / "check_binaries.cmake",
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


# Ranks that meet read each other's text with streams of the C++ library.
_MEETING = """
import sys, tempfile
import torch
from winnow import expert_parallel as ep

torch.ones(4).sum()
store = ep.FileStore(tempfile.mkdtemp())
transport = ep.create_shared_memory(store, 0, 1, timeout=20)
try:
    ep.create_shared_memory(store, 0, 0, timeout=20)
except ValueError as error:
    print("caught:", error)
print(transport)
maps = open("/proc/self/maps").read()
assert f"{sys.argv[1]}/lib/libwinnow.so" in maps and "libtorch" in maps
"""


def test_a_build_with_its_own_libstdcxx_works_beside_torch(tmp_path):
    """As some compilers link: libwinnow and the extension each with a copy of the C++ library."""
    built = ROOT / "build" / "release" / "static_runtime"
    if not built.exists():
        pytest.skip("built without tests, or by a compiler that has no static libstdc++")
    package = tmp_path / "winnow"
    shutil.copytree(PACKAGE, package, symlinks=True)
    (extension,) = built.glob("_winnow*.so")
    (old,) = package.glob("_winnow*.so")
    shutil.copy(extension, old)
    (library,) = (file for file in built.glob("libwinnow.so.*") if not file.is_symlink())
    shutil.copy(library, package / "lib" / library.name)
    for file in (old, package / "lib" / library.name):
        assert "libstdc++" not in _run("readelf", "-d", file).stdout
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    result = _run(sys.executable, "-c", _MEETING, package, env=environment, cwd=tmp_path)
    assert result.returncode == 0, (result.returncode, result.stderr)
    assert "caught: expert_parallel::shared_memory: world_size: want" in result.stdout


@pytest.mark.parametrize("how", ["home", "target", "path file", "current folder", "nowhere"])
def test_nvshmem_is_looked_for_along_the_path(how, empty_environment, tmp_path):
    place = tmp_path / "place"
    (place / "nvidia" / "nvshmem" / "lib").mkdir(parents=True)
    (place / "nvidia" / "nvshmem" / "lib" / "libnvshmem_host.so.3").touch()
    environment = {"PATH": os.environ["PATH"]}
    (site,) = empty_environment.parent.parent.glob("lib/python3*/site-packages")
    path_file = site / "place.pth"
    if how == "home":
        environment["NVSHMEM_HOME"] = str(place / "nvidia" / "nvshmem")
    elif how == "target":  # as after `pip install --target place`
        environment["PYTHONPATH"] = str(place)
    elif how == "path file":
        path_file.write_text(str(place))
    program = "from winnow import nvshmem; print(nvshmem.folder())"
    try:
        result = _run(
            empty_environment, "-c", program, env=environment,
            cwd=place if how == "current folder" else tmp_path,
        )  # fmt: skip
    finally:
        path_file.unlink(missing_ok=True)
    found = how in ("home", "target", "path file")
    want = f"{place}/nvidia/nvshmem/lib" if found else ""
    assert result.stdout.strip() == want, result.stderr


def test_entries_of_the_path_that_are_no_text_are_passed_over(tmp_path, monkeypatch):
    (tmp_path / "nvidia" / "nvshmem" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "nvshmem" / "lib" / "libnvshmem_host.so.3").touch()
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [None, b"/x", 3, tmp_path, str(tmp_path / "place")])
    assert winnow.nvshmem.folder() == ""
    monkeypatch.setattr(sys, "path", [None, b"/x", 3, str(tmp_path)])
    assert winnow.nvshmem.folder() == f"{tmp_path}/nvidia/nvshmem/lib"


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
    without = _run(empty_environment, "-c", program, env=environment, cwd=tmp_path)
    assert "NVSHMEM cannot be loaded" in without.stdout, without.stderr
    environment["PYTHONPATH"] = str(tmp_path)
    opened = _run(empty_environment, "-c", program, env=environment, cwd="/")
    assert opened.stdout.strip() == "''", opened
    info = _run(empty_environment, "-m", "winnow", "info", "--json", env=environment, cwd="/")
    assert json.loads(info.stdout)["nvshmem"]["supported"] is True, info


_BACKEND = """
import subprocess, sys


def build_wheel(folder, *others):
    command = ["cmake", "-S", ".", "-B", folder + "/build", f"-DPython_EXECUTABLE={sys.executable}"]
    raise SystemExit(subprocess.run(command, capture_output=True, text=True).stdout)
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="has no cmake")
@pytest.mark.parametrize("how", ["wheel", "folder", "nowhere", "no kernels", "off"])
def test_a_build_finds_nvshmem_and_says_so(how, tmp_path):
    """As pip builds: isolated from what is installed beside it."""
    environment = tmp_path / "environment"
    assert _run(sys.executable, "-m", "venv", "--without-pip", environment).returncode == 0
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
    # The environment first, so that `python3` is its own as well.
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    result = _run(
        sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "wheel",
        "--no-index", "--no-deps", "-w", tmp_path / "wheels", project,
        env={**os.environ, "PATH": path, **home},
    )  # fmt: skip
    lines = re.findall(r"NVSHMEM transport: .*", result.stdout + result.stderr)
    assert len(lines) == 1, result
    want = {
        "wheel": f"built with {place}/include",
        "folder": f"built with {place}/include",
        "nowhere": "not built: NVSHMEM was not found: pip install nvidia-nvshmem-cu13",
        "no kernels": "not built: there are no CUDA kernels in this build",
        "off": "not built: WINNOW_NVSHMEM is OFF",
    }
    assert lines[0].startswith("NVSHMEM transport: " + want[how])


def test_the_cost_of_a_call_is_reported():
    # A tenth of the calls: in short runs, which a busy machine leaves undisturbed at times.
    program = "from winnow import __main__, call_cost; call_cost._CALLS = 20; __main__.main()"
    result = _run(sys.executable, "-c", program, "bench", "python", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["benchmark"] for row in rows][-1] == "torch operator, recorded"
    assert all(row["target_seconds"] in (10e-6, 25e-6) for row in rows)
    # Ten times the target: finds a copy or a second parse, not a busy machine.
    assert all(0 < row["seconds"] < 10 * row["target_seconds"] for row in rows), rows


@pytest.mark.parametrize(
    ("arguments", "costs"),
    [
        ([], True),
        (["--seconds", "0.1", "--device", "cpu"], True),
        (["sparse_mla"], False),
        (["--device", "cpu", "paged_xl::append"], False),
        (["--name", "one"], False),
        (["--help"], False),
        (["--nonsense"], False),
    ],
)
def test_bench_shows_the_cost_of_a_call_beside_the_operations(
    arguments, costs, tmp_path, monkeypatch, capfd
):
    """The program is replaced by one that prints its arguments, the measurement by two rows."""
    program = tmp_path / "winnow"
    program.write_text(
        "#!/bin/sh\n"
        'for a in "$@"; do [ "$a" = --nonsense ] && exit 2; done\n'
        'for a in "$@"; do [ "$a" = --json ] && echo "{\\"results\\": [1]}" && exit 0; done\n'
        'echo "program $@"\n'
    )
    program.chmod(0o755)
    row = {"operation": "python", "benchmark": "a", "seconds": 2e-6, "target_seconds": 1e-5}
    rows = [{**row, "reached": True}, {**row, "seconds": 2e-5, "reached": False}]
    monkeypatch.setattr("winnow.__main__._PROGRAM", program)
    monkeypatch.setattr("winnow.call_cost.measure", lambda: rows)
    status = winnow.__main__._bench(arguments)
    output = capfd.readouterr().out
    assert status == (2 if "--nonsense" in arguments else 0)
    assert ("program bench" in output) == (status == 0)
    assert ("2.00 us  10.0 us reached" in output and "20.00 us  10.0 us MISSED" in output) == costs
    assert winnow.__main__._bench([*arguments, "--check"]) == (1 if costs else status)
    capfd.readouterr()
    winnow.__main__._bench([*arguments, "--json"])
    if status == 0:
        assert json.loads(capfd.readouterr().out)["results"] == ([1, *rows] if costs else [1])


@pytest.mark.parametrize("output", ["> /dev/full", ">&-"])
@pytest.mark.parametrize("arguments", ["info", "compat-path"])  # the program's, and Python's
def test_lost_output_is_an_error_of_the_system(arguments, output):
    command = f"{sys.executable} -m winnow {arguments} {output}"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=250)
    assert result.returncode == 4, result.stderr
    assert "winnow: standard output: the output is incomplete: " in result.stderr


@pytest.mark.parametrize("room", ["sparse_mla", "paged_xl"])
def test_every_function_has_a_docstring_and_a_stub(room):
    stub = ast.parse((PACKAGE / "_winnow" / f"{room}.pyi").read_text())
    typed = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    module = getattr(winnow, room)
    assert set(typed) == set(module.__all__)
    for name, node in typed.items():
        documented = getattr(module, name).__doc__
        assert "Raises:" in documented or "errors" in documented, name
        arguments = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        assert arguments[-2:] == ["stream", "backend"], name
        assert ast.get_docstring(node), name
    assert (PACKAGE / "py.typed").exists()


def test_the_expert_parallel_stub_has_what_the_module_has():
    module = winnow.expert_parallel
    stub = ast.parse((PACKAGE / "_winnow" / "expert_parallel.pyi").read_text())
    typed = {node.name: node for node in stub.body if hasattr(node, "name")}
    need_torch = set(module._NEED_TORCH)
    of_the_package = {"_numbered"}
    assert set(typed) == (set(module.__all__) - need_torch - {"notify"}) | of_the_package
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    for name in ("AllToAll", "Notifier", "layout", "create_shared_memory"):
        assert "Raises:" in ast.get_docstring(typed[name]), name
    for name in ("dispatch", "combine", "combine_buffer", "barrier"):
        assert "Raises:" in getattr(module.AllToAll, name).__doc__, name
    arguments = typed["layout"].args
    assert [a.arg for a in arguments.kwonlyargs] == ["out", "stream", "backend"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler has its own
@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("docs/python.md", 5),
        ("docs/transformers.md", 3),
        ("README.md", 1),
        ("docs/getting_started.md", 2),
        ("docs/migrate.md", 2),
    ],
)
def test_the_examples_of_the_docs_run(page, least, capsys):
    text = (ROOT / page).read_text()
    examples = 0
    # A section can be pasted into a new session: it imports what it uses.
    for section in re.split(r"^#+ .*$", text, flags=re.MULTILINE):
        names = {}
        for source, expected in re.findall(
            r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", section, re.DOTALL
        ):
            examples += 1
            capsys.readouterr()
            exec(compile(source, page, "exec"), names)
            if expected:
                assert capsys.readouterr().out == expected
    assert examples >= least


def test_the_examples_in_docstrings_run():
    result = doctest.testmod(winnow.support)
    assert result.attempted >= 2 and result.failed == 0
