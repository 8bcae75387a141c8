"""The wheel: in an empty environment, and what its objects link and show."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from processes import python, run

import winnow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(winnow.__file__).parent


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
    result = run(empty_environment, "-c", program, cwd=tmp_path, env=environment, check=True)
    assert "q: want a tensor of numpy, torch or another framework" in result.stdout


def test_the_program_runs_in_an_empty_environment(empty_environment, tmp_path):
    info = run(empty_environment, "-m", "winnow", "info", "--json", cwd=tmp_path, check=True)
    assert json.loads(info.stdout)["version"] == winnow.__version__
    assert json.loads(info.stdout)["nvshmem"]["supported"] is False  # nothing but the wheel
    assert "NVSHMEM" in json.loads(info.stdout)["nvshmem"]["reason"]
    script = empty_environment.parent / "winnow"
    case = ("verify", "paged_xl::append")
    for program in ((empty_environment, "-m", "winnow"), (script,)):
        run(*program, *case, cwd=tmp_path, check=True)
    bad = run(empty_environment, "-m", "winnow", "verify", "matmul", cwd=tmp_path)
    assert bad.returncode == 2
    bench = run(
        script, "bench", "paged_xl::append", "--seconds", "0.001", "--repetitions", "1", "--json",
        cwd=tmp_path, check=True,
    )  # fmt: skip
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
        dynamic = run("objdump", "-p", binary, check=True)
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
    for what in ("Eigen", "CLI11", "JSON for Modern C++", "Google Benchmark",
                 "nanobind", "robin_map", "libcudart_static"):  # fmt: skip
        assert re.search(rf"^\|[^|]*\| [^|]*{re.escape(what)}", contained, re.MULTILINE), what
    for licence in ("BSD-3-Clause", "MIT"):
        assert re.search(rf"\n\n{licence}\n\n", contained), licence
    credited = (ROOT / "NOTICE").read_text()
    for what in ("FlashMLA", "DeepEP", "Triton-distributed", "NVSHMEM", "vLLM"):
        assert re.search(rf"^  .*\b{what}\b", credited, re.MULTILINE), what


@pytest.mark.skipif(shutil.which("cmake") is None, reason="has no cmake")
def test_the_wheel_shows_only_its_own_symbols(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    run(
        "cmake", f"-DFOLDERS={tmp_path}", "-DRELOCATABLE=ON", "-DREADELF=readelf", "-DNM=nm",
        "-P", ROOT / "cmake" / "check_binaries.cmake", check=True,
    )  # fmt: skip


# Ranks that meet read each other's text with streams of the C++ library.
_MEETING = """
import sys, tempfile
import torch
from winnow import expert_parallel as ep

torch.ones(4).sum()
store = ep.FileStore(tempfile.mkdtemp(), job="test")
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
        assert "libstdc++" not in run("readelf", "-d", file).stdout
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    result = python("-c", _MEETING, package, env=environment, cwd=tmp_path, check=True)
    assert "caught: expert_parallel::shared_memory: world_size: want" in result.stdout
